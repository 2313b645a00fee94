"""Atomic writes, JSON, errors of the file system."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitpt import fsio
from vitpt.errors import Exit, VitptError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write_half(path: Path) -> None:
    with fsio.atomic_write(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with fsio.atomic_write(path) as file:
        file.write(b"new")
        assert not path.exists()
    assert path.read_bytes() == b"new"
    with pytest.raises(KeyboardInterrupt):
        write_half(path)
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["file"]


def test_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    writer = fsio.atomic_write(tmp_path / "shard.tar")
    with writer as file:
        file.write(b"half")
        file.flush()
        left = next(tmp_path.iterdir()).read_bytes(), next(tmp_path.iterdir()).name
    (tmp_path / left[1]).write_bytes(left[0])
    (tmp_path / ".hidden").write_bytes(b"")
    assert fsio.remove_temporary_files(tmp_path) == 1
    assert names(tmp_path) == [".hidden", "shard.tar"]


@given(JSON)
def test_canonical_json_is_json_and_unique(obj: object) -> None:
    data = fsio.canonical_json(obj)
    assert json.loads(data) == obj
    assert fsio.canonical_json(json.loads(data)) == data
    assert b"\n" not in data


def test_canonical_json_is_fixed() -> None:
    assert fsio.canonical_json({"b": [1, 2.5, None], "a": "é"}) == '{"a":"é","b":[1,2.5,null]}'.encode()


def test_names_that_are_not_utf8_survive_json() -> None:
    name = os.fsdecode(b"caf\xe9.jpg")
    assert os.fsencode(json.loads(fsio.canonical_json(name))) == b"caf\xe9.jpg"


def test_hashes() -> None:
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # FIPS 180: of no bytes
    assert fsio.sha256_bytes(b"") == empty


def test_hash_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc" * 100_000)
    assert fsio.sha256_file(tmp_path / "file") == fsio.sha256_bytes(b"abc" * 100_000)


def test_too_little_space_is_found_for_a_folder_to_be_made(tmp_path: Path) -> None:
    fsio.require_free_space(tmp_path / "a" / "b", 1, "this")
    with pytest.raises(VitptError, match=r"this needs 1000000000.0 TB") as raised:
        fsio.require_free_space(tmp_path / "a" / "b", 10**21, "this")
    assert raised.value.exit_code == Exit.ENVIRONMENT


def test_a_file_in_the_way_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(VitptError, match="in the way"):
            fsio.make_folder(path)


@pytest.mark.parametrize(
    ("number", "code"), [("ENOSPC", Exit.ENVIRONMENT), ("EROFS", Exit.ENVIRONMENT), ("EACCES", Exit.USAGE)]
)
def test_refusals_of_the_system_become_one_line(tmp_path: Path, number: str, code: Exit) -> None:
    import errno

    with pytest.raises(VitptError) as raised, fsio.atomic_write(tmp_path / "file"):
        raise OSError(getattr(errno, number), "refused")
    assert raised.value.exit_code == code
    assert str(tmp_path / "file") in raised.value.message
    assert names(tmp_path) == []


def test_other_errors_pass_through(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), fsio.atomic_write(tmp_path / "absent" / "file"):
        pass


def test_missing_path_says_the_nearest_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "photos" / "train").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert fsio.missing_path(Path("photo/train"), "folder").hint == "did you mean photos?"
    assert fsio.missing_path(Path("photos/trian"), "folder").hint == "did you mean photos/train?"
    assert fsio.missing_path(tmp_path / "phots", "folder").hint == f"did you mean {tmp_path / 'photos'}?"
    assert fsio.missing_path(Path("zzz"), "folder").hint is None


def test_shipped_shards_are_found() -> None:
    assert (fsio.shipped("shards") / "README.md").is_file()


def test_a_lock_is_held_by_one_and_free_however_its_holder_ended(tmp_path: Path) -> None:
    path = tmp_path / "new" / "lock"
    holder = f"""
import os, sys
from pathlib import Path
from vitpt import fsio
with fsio.locked(Path({str(path)!r}), "busy"):
    print(os.getpid(), flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pid = process.stdout.readline().strip()
        with pytest.raises(VitptError, match=rf"^busy \(process {pid} on .+\)$") as caught, fsio.locked(path, "busy"):
            pass
        assert caught.value.exit_code == Exit.USAGE
        process.kill()
    with (
        fsio.locked(path, "busy"),
        pytest.raises(VitptError, match=f"process {os.getpid()} "),
        fsio.locked(path, "busy"),
    ):
        pass


def test_a_lock_file_that_was_removed_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with fsio.locked(path, "busy"):
        path.unlink()
        with fsio.locked(path, "busy"), pytest.raises(VitptError), fsio.locked(path, "busy"):
            pass


def test_a_folder_is_published_once(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "content").write_text(name)
    fsio.publish_folder(tmp_path / "first", tmp_path / "final")
    with pytest.raises(VitptError, match="final exists already") as caught:
        fsio.publish_folder(tmp_path / "second", tmp_path / "final")
    assert caught.value.exit_code == Exit.USAGE
    assert (tmp_path / "final" / "content").read_text() == "first"


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 100_000])
def test_what_is_no_json(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        fsio.parse_json(data)
