"""The error border, exit statuses and start-up cost, each in a process of its own."""

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from vitpt import __version__

GROUPS = ["data", "recipe"]
COMMANDS = [
    "shard",
    "pretrain",
    "finetune",
    "eval",
    "convert",
    "data stream",
    "recipe list",
    "recipe show",
    "recipe check",
    "recipe schema",
]
HEAVY = ["torch", "accelerate", "webdataset", "nvidia.dali", "numpy"]


def run(*args, cwd=None, **env):
    """Run `python -m vitpt`; return the finished process."""
    return python("-m", "vitpt", *args, cwd=cwd, **env)


def python(*args, cwd=None, **env):
    path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")])
    base = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS")
    }
    return subprocess.run(
        [sys.executable, *args],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=120,
        env=base | {"PYTHONPATH": path} | env,
    )


def raising(statement, *args, **env):
    """Run the real command line with one more command, whose body is `statement`."""
    code = f"""
import errno, os, sys
from vitpt.cli.app import app, main
from vitpt.errors import Exit, VitptError
@app.command("boom")
def boom() -> None:
    {statement}
sys.argv = ["vitpt", "boom"]
main()
"""
    return python("-c", code, *args, **env)


@pytest.mark.parametrize(
    ("statement", "status", "stderr"),
    [
        ("pass", 0, ""),
        ("raise VitptError('a: wrong', hint='Did you mean b?')", 2, "a: wrong\nDid you mean b?\n"),
        ("raise VitptError('no shard', exit_code=Exit.DATA)", 3, "no shard\n"),
        ("raise VitptError('no decoder', exit_code=Exit.ENVIRONMENT)", 4, "no decoder\n"),
        ("raise VitptError('loss is nan', exit_code=Exit.FAILED)", 5, "loss is nan\n"),
        ("raise VitptError('saved', exit_code=Exit.PREEMPTED)", 75, "saved\n"),
        ("raise VitptError('name\\x1b[31m\\rx')", 2, "name\\x1b[31m\\x0dx\n"),
        ("raise KeyboardInterrupt", 130, "interrupted\n"),
        ("raise MemoryError", 4, "out of memory\n"),
        ("raise OSError(errno.ENOSPC, 'x', '/data/a')", 4, "/data/a: No space left on device\n"),
        ("raise RuntimeError(\"DefaultCPUAllocator: can't allocate memory: 9 bytes\")", 4, "DefaultCPUAllocator: can't allocate memory: 9 bytes\n"),
        ("raise BrokenPipeError", 141, ""),
    ],
)  # fmt: skip
def test_what_a_command_raises_becomes_a_message_and_a_status(statement, status, stderr):
    done = raising(statement)
    assert done.returncode == status
    assert done.stderr.startswith(stderr)
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    "statement", ["raise ValueError('a bug')", "raise RuntimeError('a bug')", "raise OSError(5, 'a bug')"]
)
def test_a_bug_keeps_its_traceback(statement):
    done = raising(statement)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    assert done.stderr.rstrip().endswith("a bug")
    assert "╭" not in done.stderr


def test_other_ranks_say_who_they_are():
    assert raising("raise VitptError('no shard', hint='Look.', exit_code=Exit.DATA)", RANK="3").stderr == (
        "[rank 3] no shard\n[rank 3] Look.\n"
    )


def test_closed_pipe_is_quiet():
    reader = subprocess.Popen(["true"], stdin=subprocess.PIPE)
    reader.wait()
    done = subprocess.run(
        [sys.executable, "-m", "vitpt", "recipe", "schema"],
        stdout=reader.stdin,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    reader.stdin.close()
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_under_stdout():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "vitpt", "recipe", "schema"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 4
    assert done.stderr.startswith("No space left on device\n")


@pytest.mark.parametrize(
    ("args", "status", "message"),
    [
        ((), 2, ""),
        (("--version",), 0, ""),
        (("pretrian",), 2, "Error: No such command 'pretrian'. Did you mean 'pretrain'?"),
        (("pretrain", "quickstart", "--dryrun"), 2, "Error: No such option: --dryrun (Possible options: --dry-run)"),
        (("pretrain", "quikstart"), 2, '"quikstart": no such file and no such shipped recipe\nDid you mean quickstart or quickstart_finetune?'),
        (("pretrain", "quickstart", "-o", "optim.lrr=1"), 2, "-o optim.lrr=1: optim.lrr: unknown key; did you mean optim.lr?"),
        (("recipe", "shwo", "x"), 2, "Did you mean 'show'?"),
        (("shard", "no_such_folder"), 2, "no_such_folder"),
    ],
)  # fmt: skip
def test_usage(tmp_path, args, status, message):
    done = run(*args, cwd=tmp_path)
    assert done.returncode == status
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert "\x1b" not in done.stderr + done.stdout


def test_version():
    assert run("--version").stdout == f"vitpt {__version__}\n"


@pytest.mark.parametrize("command", ["", *GROUPS, *COMMANDS])
def test_help(command):
    done = run(*command.split(), "--help", COLUMNS="100")
    assert done.returncode == 0
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"Usage: vitpt {command}".rstrip())
    if command not in GROUPS:
        examples = lines[lines.index("  Examples:") + 1 :]
        assert len(examples) == 2
        assert all("vitpt" in line for line in examples)
    assert run(*command.split(), "-h", COLUMNS="100").stdout == done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_says_its_default(command):
    done = run(*command.split(), "--help")
    text = done.stdout.split("Options:\n", 1)[1].split("\n\n", 1)[0]
    options = [" ".join(part.split()) for part in re.split(r"\n(?=  -)", text)]
    assert len(options) == len([line for line in text.splitlines() if line.startswith("  -")])
    for option in options:
        assert re.search(r"[Dd]efault: |\[required\]|--help", option), option


def test_every_command_is_tested():
    listed = set()
    for group in ("", *GROUPS):
        text = run(*group.split(), "--help").stdout.split("Commands:\n", 1)[1].split("\n\n", 1)[0]
        listed |= {
            f"{group} {line.split()[0]}".strip()
            for line in text.splitlines()
            if line.startswith("  ") and line[2] != " "
        }
    assert listed == {*COMMANDS, *GROUPS}


def cpu_seconds(code):
    """Return the CPU seconds of a process that runs `code`, and its output."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = python("-c", code)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done


def loaded_by(args):
    return f"""
import sys
from vitpt.cli.app import main
sys.argv = ["vitpt", *{args!r}]
try:
    main()
except SystemExit as end:
    print("status", end.code, "heavy", *[name for name in {HEAVY!r} if name in sys.modules])
"""


def test_help_is_quick_and_imports_nothing_heavy():
    seconds, done = cpu_seconds(loaded_by(["--help"]))
    assert done.stdout.splitlines()[-1] == "status 0 heavy"
    assert seconds <= 0.4


def test_a_wrong_recipe_is_answered_quickly_and_without_torch(tmp_path):
    path = tmp_path / "wrong.yaml"
    path.write_text("name: x\noptim: {kind: adamw, lrr: 1}\n")
    for command in (["recipe", "check", str(path)], ["pretrain", str(path)], ["pretrain", "quickstart", "-o", "lr=1"]):
        seconds, done = cpu_seconds(loaded_by(command))
        status, heavy = done.stdout.splitlines()[-1].split(" heavy")
        assert status == "status 2"
        assert set(heavy.split()) <= {"numpy"}
        assert seconds <= 0.6


def test_module_and_entry_point_are_the_same():
    code = (
        "import importlib.metadata as m; (e,) = m.entry_points(group='console_scripts', name='vitpt'); print(e.value)"
    )
    assert python("-c", code).stdout == "vitpt.cli.app:main\n"
