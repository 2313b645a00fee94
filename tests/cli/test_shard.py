"""`vitpt shard` as a person and a script meet it: every exit status, in a process of its own."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from images import encode, texture, write_class_folder

from vitpt.dataset import open_dataset

COMMAND = [sys.executable, "-m", "vitpt", "shard"]


def run(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=120, check=False)
    assert "Traceback" not in done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    return done


def tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_default_target_summary_and_next_command(class_folders: Path, tmp_path: Path) -> None:
    done = run("photos", cwd=tmp_path)
    assert done.returncode == 0
    lines = done.stderr.splitlines()
    assert "photos-shards" in lines[0]
    assert lines[-1].startswith("next: vitpt pretrain")
    assert "12 files" in done.stderr
    assert "3 classes" in done.stdout
    assert open_dataset(tmp_path / "photos-shards").split("train").num_samples == 12
    again = run("photos", cwd=tmp_path)
    assert again.returncode == 0
    assert "finished already" in again.stderr


def test_json_is_one_document(class_folders: Path, tmp_path: Path) -> None:
    (class_folders / "cat" / "bad\nname.jpg").write_text("no image")
    done = run(class_folders, tmp_path / "out", "--json", "--val-fraction", "0.25", "-j", "2")
    assert done.returncode == 0
    result = json.loads(done.stdout)
    data = open_dataset(tmp_path / "out")
    assert result["out"] == str(tmp_path / "out")
    assert result["dataset_id"] == data.dataset_id
    assert {name: split["num_samples"] for name, split in result["splits"].items()} == {"train": 9, "val": 3}
    assert result["checked"]["train"]["rejected"] | result["checked"]["val"]["rejected"] == {"not_an_image": 1}


def test_dry_run_writes_nothing(class_folders: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    done = run(class_folders, tmp_path / "out", "--dry-run")
    assert done.returncode == 0
    assert "12" in done.stdout
    assert (
        json.loads(run(class_folders, tmp_path / "out", "--dry-run", "--json").stdout)["splits"]["train"]["files"] == 12
    )
    assert sorted(tmp_path.iterdir()) == before


def test_errors_are_short_and_have_their_exit_status(class_folders: Path, tmp_path: Path) -> None:
    (tmp_path / "text" / "a").mkdir(parents=True)
    (tmp_path / "text" / "a" / "notes.txt").write_text("text")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.jpg").write_bytes(encode(texture(1)))
    cases: list[tuple[list[object], int, str]] = [
        ([tmp_path / "photo"], 2, "did you mean"),
        ([tmp_path / "file.jpg"], 2, "must be a folder"),
        ([tmp_path / "empty"], 3, "no files"),
        ([tmp_path / "text", tmp_path / "o1"], 3, "no usable image"),
        ([class_folders, class_folders / "out"], 2, "source folder"),
        ([class_folders, tmp_path / "text"], 2, "not empty"),
        ([class_folders, tmp_path / "file.jpg"], 2, "OUT must be"),
        ([class_folders, tmp_path / "file.jpg" / "out"], 2, "in the way"),
        ([class_folders, "--samples-per-shard", "0"], 2, "samples-per-shard"),
        ([class_folders, tmp_path / "o2", "--val-fraction", "1.5"], 2, "val-fraction"),
    ]
    for arguments, status, text in cases:
        done = run(*arguments, cwd=tmp_path)
        assert done.returncode == status, (arguments, done.stderr)
        assert text in done.stderr
        assert done.stdout == ""
    assert not (tmp_path / "o1").exists()


def test_too_many_rejects(class_folders: Path, tmp_path: Path) -> None:
    for number in range(2):
        (class_folders / "cat" / f"bad{number}.jpg").write_bytes(b"")
    done = run(class_folders, tmp_path / "out")
    assert done.returncode == 3
    assert "cat/bad0.jpg" in done.stderr
    assert "--max-reject-fraction" in done.stderr
    (class_folders / "cat" / "bad1.jpg").unlink()
    assert run(class_folders, tmp_path / "out", "--strict").returncode == 3
    assert run(class_folders, tmp_path / "out").returncode == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_target_without_permission(class_folders: Path, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o555)
    done = run(class_folders, tmp_path / "locked" / "out")
    assert done.returncode == 2
    assert "no permission" in done.stderr


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """800 images in 4 classes."""
    root = tmp_path_factory.mktemp("many") / "many"
    for number in range(4):
        write_class_folder(root / f"class{number}", 200, seed=number)
    return root


@pytest.fixture(scope="module")
def undisturbed(source: Path) -> Path:
    out = source.parent / "undisturbed"
    assert run(source, out, "--samples-per-shard", "32", "-j", "1").returncode == 0
    return out


def stop_when(source: Path, out: Path, reached: Callable[[], bool], number: int) -> subprocess.Popen[str]:
    """Start sharding and send a signal once `reached`; returns the ended process."""
    command = [*COMMAND, str(source), str(out), "--samples-per-shard", "32", "-j", "2"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while process.poll() is None and not reached():
        time.sleep(0.002)
    if number == signal.SIGKILL:
        process.kill()
    elif process.poll() is None:
        os.killpg(process.pid, number)  # what a terminal does on Ctrl-C
    return process


def group_is_gone(group: int) -> bool:
    """Whether every process of a group ends soon."""
    for _ in range(500):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


STAGES: dict[str, Callable[[Path], bool]] = {
    "start": lambda out: out.exists(),
    "check": lambda out: any(out.glob(".vitpt-work/check-*.json")),
    "second shard": lambda out: len(list(out.glob("train-*.tar"))) >= 2,
    "finish": lambda out: (out / "classes.txt").exists(),
}


def test_killed_at_every_stage_and_run_again(source: Path, undisturbed: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for stage in STAGES.values():
        process = stop_when(source, out, lambda stage=stage: stage(out), signal.SIGKILL)  # type: ignore[misc]
        process.communicate()
        assert group_is_gone(process.pid)  # the workers notice
        for path in out.glob("train-*.tar"):
            assert path.stat().st_size == (undisturbed / path.name).stat().st_size
    assert run(source, out, "--samples-per-shard", "32").returncode == 0
    assert tree(out) == tree(undisturbed)


def test_ctrl_c_leaves_no_process_and_no_temporary_file(source: Path, undisturbed: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = stop_when(source, out, lambda: len(list(out.glob("train-*.tar"))) >= 2, signal.SIGINT)
    _, messages = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in messages
    assert "goes on from here" in messages
    assert group_is_gone(process.pid)
    assert not [path for path in out.rglob("*") if ".tmp-" in path.name]
    done = run(source, out, "--samples-per-shard", "32", "-j", "1")
    assert done.returncode == 0
    assert "finished by an earlier run" in done.stderr
    assert tree(out) == tree(undisturbed)
    shutil.rmtree(out)
