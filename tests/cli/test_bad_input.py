"""What a person can get wrong or a machine can break, over all commands: one message, the right status, nothing half-written."""

import contextlib
import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from running import command, environment, metrics, run, same_weights, status, tiny_recipe, vitpt
from small_checkpoint import write_checkpoint
from typer.testing import CliRunner

from vitpt import checkpoint
from vitpt.cli.app import app
from vitpt.errors import Exit
from vitpt.train.claim import claimed

torch.set_num_threads(1)
STEPS = ("train.steps=12", "eval.every_steps=8")
OVERRIDES = [part for override in STEPS for part in ("-o", override)]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory, tiny_shards):
    """tiny.yaml and the finished run `done` (steps 8, 10 and 12 kept, 8 or 12 the best); not to be changed."""
    root = tmp_path_factory.mktemp("work")
    tiny_recipe(root, tiny_shards).rename(root / "tiny.yaml")
    run(root / "tiny.yaml", root / "done", *STEPS)
    return root


@pytest.fixture
def here(workplace, tmp_path, monkeypatch):
    """A working directory with tiny.yaml, an empty folder, a folder of text files, a text file and a checkpoint."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(workplace / "tiny.yaml", "tiny.yaml")
    Path("empty").mkdir()
    Path("texts/a").mkdir(parents=True)
    for number in range(3):
        Path(f"texts/a/{number}.txt").write_text("not an image")
    Path("file").write_text("hello")
    return tmp_path


@pytest.fixture
def half(workplace, here):
    """A run `half` that stopped after step 10."""
    shutil.copytree(workplace / "done", "half")
    shutil.rmtree("half/checkpoints/step-00000012")
    checkpoint.point(Path("half/checkpoints"), "LATEST", "step-00000010")
    Path("half/summary.json").unlink()
    content = status(Path("half"))
    Path("half/status.json").write_text(json.dumps({**content, "state": "running", "step": 0}))
    return Path("half")


def invoke(*args):
    """Run a command in this process; a traceback is a failure of the test."""
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def refused(*args):
    """Run a command that must fail with nothing on stdout; returns the status and the last lines on stderr."""
    before = everything()
    result = invoke(*args)
    assert result.exit_code != Exit.DONE, args
    assert result.stdout == ""
    assert everything() == before, args
    return Exit(result.exit_code), result.stderr


def everything():
    return sorted(str(path) for path in Path().rglob("*") if path.name != ".lock")


WRONG = ["missing", "file", "empty", "texts", "x" * 300, "file/below"]
RECIPE_COMMANDS = [("pretrain",), ("data", "stream"), ("recipe", "show"), ("recipe", "check")]


@pytest.mark.parametrize("path", WRONG)
def test_wrong_paths(here, workplace, path):
    for words in RECIPE_COMMANDS:
        code, message = refused(*words, path)
        assert code == Exit.USAGE
        assert path[:50] in message
    done = workplace / "done"
    for args in (
        ("shard", path, "out", "-j", 1),
        ("eval", path, "--data", "bundled:eurosat_mini"),
        ("eval", done, "--data", path),
        ("convert", path, "out", "--to", "timm"),
        ("finetune", "tiny.yaml", "--from", path),
        ("pretrain", "tiny.yaml", "-o", f"data.path={path}"),
        ("data", "stream", "tiny.yaml", "-o", f"data.path={path}"),
    ):
        code, message = refused(*args)
        assert code in (Exit.USAGE, Exit.DATA), args
        assert path in message, args
    if path == "missing":
        return
    code, message = refused("convert", done, path, "--to", "timm")
    assert (code, path.split("/")[0] in message) == (Exit.USAGE, True)
    if path != "empty":
        code, message = refused("pretrain", "tiny.yaml", "--out", path)
        assert (code, path.split("/")[0] in message) == (Exit.USAGE, True)


def test_a_checkpoint_that_is_not_there_is_named_with_the_nearest(here, half):
    assert refused("eval", "hlaf") == (
        Exit.USAGE,
        "hlaf: no such run, checkpoint or converted folder\ndid you mean half?\n",
    )


def test_nothing_to_take_by_default(here):
    for name in ("eval", "finetune"):
        code, message = refused(name)
        assert code == Exit.USAGE
        assert "under ./runs" in message


def test_a_working_folder_that_was_removed(here, monkeypatch):
    Path("gone").mkdir()
    monkeypatch.chdir("gone")
    Path(here / "gone").rmdir()
    result = invoke("recipe", "list")
    assert (result.exit_code, result.stderr.splitlines()[0]) == (2, "the working folder does not exist any more")


def damage(path, how):
    content = path.read_bytes() if path.is_file() else b""
    if how == "removed":
        path.unlink()
    elif how == "a folder":
        path.unlink()
        path.mkdir()
    elif how == "another array":
        np.save(path, np.zeros(len(np.load(path))))
    else:
        new = {
            "cut": content[: len(content) // 2],
            "empty": b"",
            "garbage": b"\x80garbage\n\x00",
            "deep": b"[" * 100_000,
            "other JSON": b'[1]\n{"step": "x", "id": [1]}\n{"micro_batch_sizes": {"1": 0}}\n',
        }
        path.write_bytes(new[how])


@pytest.mark.parametrize(
    ("name", "ways"),
    [
        ("plan.json", ["removed", "cut", "deep", "other JSON"]),
        ("status.json", ["removed", "garbage", "deep"]),
        ("metrics.jsonl", ["other JSON"]),
        ("bad_samples.jsonl", ["garbage", "other JSON"]),
        ("digests.npy", ["removed", "cut", "empty", "garbage", "another array"]),
        ("checkpoints/BEST", ["garbage", "empty", "removed"]),
        ("checkpoints/LATEST", ["garbage", "cut"]),
        ("checkpoints/step-00000010/model.safetensors", ["cut", "removed"]),
        ("checkpoints/step-00000010/state.json", ["garbage", "deep"]),
    ],
)
def test_a_run_goes_on_whatever_became_of_what_it_can_do_without(half, workplace, name, ways):
    for number, how in enumerate(ways):
        folder = Path(f"copy{number}")
        shutil.copytree(half, folder)
        damage(folder / name, how)
        result = invoke("pretrain", "tiny.yaml", *OVERRIDES, "--out", folder)
        assert result.exit_code == Exit.DONE, (how, result.stderr)
        assert same_weights(folder, workplace / "done"), how
        assert status(folder)["state"] == "finished"
        steps = [record["step"] for record in metrics(folder)]
        assert steps == sorted(set(steps))
        assert steps[-1] == 12


@pytest.mark.parametrize("how", ["removed", "cut", "other JSON"])
def test_the_summary_of_a_finished_run_is_written_again(workplace, here, how):
    shutil.copytree(workplace / "done", "again")
    damage(Path("again/summary.json"), how)
    result = invoke("pretrain", "tiny.yaml", *OVERRIDES, "--out", "again", "--json")
    assert result.exit_code == Exit.DONE
    assert json.loads(result.stdout)["steps"] == 12
    assert json.loads(Path("again/summary.json").read_text()) == json.loads(
        (workplace / "done/summary.json").read_text()
    )


@pytest.mark.parametrize(
    ("name", "ways"),
    [
        ("recipe.yaml", ["cut", "garbage", "removed"]),
        ("data.json", ["cut", "deep", "other JSON"]),
        ("metrics.jsonl", ["a folder"]),
        ("digests.npy", ["a folder"]),
        ("status.json", ["a folder"]),
        ("checkpoints/step-*/model.safetensors", ["garbage"]),
        ("checkpoints/step-*/state.json", ["other JSON", "a folder"]),
    ],
)
def test_a_run_is_refused_when_what_it_needs_is_damaged(half, name, ways):
    for number, how in enumerate(ways):
        folder = Path(f"copy{number}")
        shutil.copytree(half, folder)
        for path in folder.glob(name):
            damage(path, how)
        result = invoke("pretrain", "tiny.yaml", *OVERRIDES, "--out", folder)
        assert result.exit_code in (Exit.USAGE, Exit.DATA), how
        assert str(folder) in "".join(result.stderr.splitlines()[-2:])
        assert len(list(folder.glob("checkpoints/step-*"))) == 2


def test_a_failed_start_is_in_status_json(half):
    for path in half.glob("checkpoints/step-*/state.json"):
        path.write_text("{}")
    assert invoke("pretrain", "tiny.yaml", *OVERRIDES, "--out", half).exit_code == Exit.DATA
    found = status(half)
    assert (found["state"], found["exit_code"], found["step"]) == ("failed", Exit.DATA, None)
    assert found["message"] == "half/checkpoints: no checkpoint is undamaged"


@pytest.mark.parametrize("words", [("eval",), ("finetune", "tiny.yaml", "--from"), ("convert",)])
def test_damaged_checkpoints_are_refused_before_anything_is_made(half, words):
    end = ("out", "--to", "timm") if words == ("convert",) else ()
    for name in ("model.safetensors", "config.json"):
        for how in ("cut", "garbage", "removed", "a folder"):
            shutil.rmtree("copy", ignore_errors=True)
            shutil.copytree(half, "copy")
            for path in Path("copy").glob(f"checkpoints/step-*/{name}"):
                damage(path, how)
            code, message = refused(*words, "copy", *end)
            assert code == Exit.DATA, (name, how)
            assert name in message


def test_a_killed_start_is_in_nobodys_way(here, workplace):
    for name in ("checkpoints/.step-00000001.9", "run/checkpoints"):
        Path(name).mkdir(parents=True)
    for name in (".lock", ".recipe.yaml.tmp-7-0", "status.json", ".status.json.tmp-7-3"):
        Path("run", name).write_text("")
    assert invoke("pretrain", "tiny.yaml", *OVERRIDES, "--out", "run").exit_code == Exit.DONE
    assert same_weights(Path("run"), workplace / "done")
    assert not list(Path("run").glob("*.tmp-*"))


def test_a_second_launch_into_the_same_folder_is_refused(here):
    with claimed(Path("run")):
        code, message = refused("pretrain", "tiny.yaml", "--out", "run")
        assert code == Exit.USAGE
        assert message.startswith(f"run: another run is training into this folder (process {os.getpid()} on ")
        assert message.count("\n") == 1
    assert invoke("pretrain", "tiny.yaml", *OVERRIDES, "--out", "run").exit_code == Exit.DONE


@contextlib.contextmanager
def small_disk(size):
    """While inside, no file grows beyond `size` bytes: to this process the disk is full."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, hard))


@pytest.mark.parametrize("size", [100, 600, 20_000])
def test_full_disk_while_training(here, workplace, size):
    with small_disk(size):
        result = invoke("pretrain", "tiny.yaml", *OVERRIDES, "--out", "run")
    assert result.exit_code == Exit.ENVIRONMENT
    assert "no space left on the disk" in result.stderr.splitlines()[-1]
    assert not list(Path("run").rglob("*.tmp-*"))
    assert not list(Path("run").glob("checkpoints/.step*"))
    assert invoke("pretrain", "tiny.yaml", *OVERRIDES, "--out", "run").exit_code == Exit.DONE
    assert same_weights(Path("run"), workplace / "done")


@pytest.mark.parametrize("to", ["timm", "google", "native"])
def test_full_disk_while_converting(here, to):
    write_checkpoint(Path("model"))
    source = Path("model")
    if to == "native":
        assert invoke("convert", "model", "as-timm", "--to", "timm").exit_code == Exit.DONE
        source = Path("as-timm")
    with small_disk(5000):
        code, message = refused("convert", source, "out.npz", "--to", to)
    assert code == Exit.ENVIRONMENT
    assert message.splitlines()[-1] == "out.npz: no space left on the disk"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"architecture": 3}, "architecture"),
        ({"architecture": "vit_base_patch16_224", "model_args": 3}, ""),
        ({"architecture": "vit_base_patch16_224", "model_args": {"num_heads": "x"}}, ""),
        ({"architecture": "vit_base_patch16_224", "model_args": {"num_heads": 5}}, "heads"),
        ({"architecture": "vit_base_patch16_224", "model_args": {"act_layer": []}}, ""),
        ({"architecture": "vit_base_patch16_224", "pretrained_cfg": {"mean": [0.5]}}, "pretrained_cfg.mean has 1"),
        ({"architecture": "vit_base_patch16_224", "pretrained_cfg": {"crop_pct": 0, "crop_mode": "center"}}, ""),
    ],
)
def test_a_foreign_folder_that_makes_no_sense(here, content, message):
    write_checkpoint(Path("model"))
    assert invoke("convert", "model", "foreign", "--to", "timm").exit_code == Exit.DONE
    described = json.loads(Path("foreign/config.json").read_text())
    for key, value in content.items():
        described[key] = {**described[key], **value} if isinstance(value, dict) else value
    Path("foreign/config.json").write_text(json.dumps(described))
    code, said = refused("convert", "foreign", "out", "--to", "native")
    assert code == Exit.DATA
    assert "foreign" in said
    assert message in said


def test_a_foreign_file_that_makes_no_sense(here):
    write_checkpoint(Path("model"))
    assert invoke("convert", "model", "m.npz", "--to", "google").exit_code == Exit.DONE
    arrays = dict(np.load("m.npz"))
    for name in arrays:
        for wrong in (np.zeros((), np.float32), np.zeros((0, 0, 0, 0), np.float32), np.array({}, object)):
            np.savez("wrong.npz", **{**arrays, name: wrong})
            code, said = refused("convert", "wrong.npz", "out", "--to", "native")
            assert code == Exit.DATA, name
            assert "wrong.npz" in said
    code, said = refused("convert", "model/model.safetensors", "out", "--to", "native")
    assert (code, "not a readable .npz file" in said) == (Exit.DATA, True)


def test_a_timm_folder_where_a_checkpoint_is_expected(here):
    write_checkpoint(Path("model"))
    assert invoke("convert", "model", "foreign", "--to", "timm").exit_code == Exit.DONE
    for args in (("eval", "foreign", "--data", "bundled:eurosat_mini"), ("finetune", "tiny.yaml", "--from", "foreign")):
        code, message = refused(*args)
        assert code == Exit.DATA
        assert "vitpt convert SRC DST --to native" in message


def stopped(args, number, when, cwd):
    """Start a command, send it a signal once `when()` holds; returns the finished process."""
    process = subprocess.Popen(
        command(*args),
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    deadline = time.monotonic() + 60
    while not when() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, Exit.PREEMPTED), (signal.SIGINT, Exit.INTERRUPTED)])
def test_a_signal_while_starting_up(here, number, code):
    found = stopped(("pretrain", "tiny.yaml", *OVERRIDES), number, lambda: Path("runs/tiny/.lock").exists(), here)
    assert found[0] == code
    assert found[1] == ""
    assert "Traceback" not in found[2]
    assert not list(Path("runs").rglob("*.tmp-*"))
    done = vitpt("pretrain", "tiny.yaml", *OVERRIDES, "--json", cwd=here)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 12


@pytest.mark.parametrize("redirection", [">&-", "2>&-", "<&-", ">&- 2>&- <&-", "2>/dev/full"])
def test_streams_that_are_closed(here, redirection):
    line = f"{shlex.join(command('recipe', 'list'))} {redirection}"
    assert subprocess.run(["sh", "-c", line], env=environment(), capture_output=True, timeout=60).returncode == 0


def test_nothing_to_evaluate_is_a_failure(here, workplace, tiny_shards):
    shutil.copytree(tiny_shards, "shards")
    for path in Path("shards").glob("val-*.tar"):
        path.write_bytes(bytes(path.stat().st_size))
    code, message = refused("eval", workplace / "done", "--data", "shards", "--json")
    assert code == Exit.DATA
    assert "none of the 21 samples of split 'val' could be read" in message


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("pretrain", "tiny.yaml", "-o", "model.depth=1000000000"), "<= 1000"),
        (("pretrain", "tiny.yaml", "-o", "train.steps=10000000000"), "at most 1,000,000,000"),
        (("pretrain", "tiny.yaml", "-o", "train.steps=null", "-o", "train.epochs=1e300"), "at most 1,000,000,000"),
        (
            ("data", "stream", "tiny.yaml", "--steps", "9999999999999999999:99999999999999999999"),
            "at most 1,000,000,000",
        ),
    ],
)
def test_numbers_beyond_all_sense(here, args, message):
    code, said = refused(*args)
    assert code == Exit.USAGE
    assert message in said


def test_a_model_larger_than_the_machine(here):
    wide = ("-o", "model.width=65536", "-o", "model.mlp=1048576", "-o", "model.depth=1000")
    result = invoke("pretrain", "tiny.yaml", *wide)
    assert result.exit_code == Exit.ENVIRONMENT
    assert "M parameters needs" in result.stderr.splitlines()[-2]
