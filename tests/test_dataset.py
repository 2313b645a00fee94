"""Opening a dataset: what is there, and everything that can be wrong with it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vitpt import dataset
from vitpt.dataset import open_dataset
from vitpt.errors import Exit, VitptError


@pytest.fixture
def copied(tiny_shards: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_shards, tmp_path / "tiny-shards"))


def failure(root: Path | str) -> VitptError:
    with pytest.raises(VitptError) as raised:
        open_dataset(root)
    assert "\n" not in raised.value.message
    return raised.value


def change_manifest(root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = root / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def test_splits_columns_and_names(tiny_shards: Path, split_folders: Path) -> None:
    data = open_dataset(str(tiny_shards))
    assert data.classes == ("cat", "dog", "eel")
    assert list(data.splits) == ["train", "val"]
    train = data.split("train")
    assert (train.num_samples, train.num_labelled, len(train.shards)) == (60, 60, 4)
    for name, kind in dataset.COLUMNS.items():
        column = getattr(train, name)
        assert column.dtype == np.dtype(kind)
        assert len(column) == 60 + (name == "name_off")
    for row in range(60):
        payload = (split_folders / train.sample_name(row)).read_bytes()
        with train.shard_path(int(train.shard[row])).open("rb") as file:
            file.seek(int(train.offset[row]))
            assert file.read(int(train.length[row])) == payload
        assert train.sample_name(row).split("/")[1] == data.classes[train.label[row]]
        assert train.key(row) == f"{row:09d}"


def test_columns_are_not_read_when_opened(tiny_shards: Path) -> None:
    train = open_dataset(tiny_shards).split("train")
    assert all(isinstance(getattr(train, name), np.memmap) for name in dataset.COLUMNS)


def test_ids_follow_from_the_content(tiny_shards: Path) -> None:
    data = open_dataset(tiny_shards)
    for split in data.splits.values():
        columns = {name: getattr(split, name) for name in dataset.CONTENT_COLUMNS}
        assert split.split_id == dataset.split_id(columns)
    assert data.dataset_id == dataset.dataset_id(data.classes, {n: s.split_id for n, s in data.splits.items()})


def test_unknown_split_names_those_there_are(tiny_shards: Path) -> None:
    with pytest.raises(VitptError, match="no split 'test'; there is train, val"):
        open_dataset(tiny_shards).split("test")


def test_missing_path_names_the_nearest(tiny_shards: Path) -> None:
    error = failure(tiny_shards.with_name("tiny-shard"))
    assert error.exit_code == Exit.USAGE
    assert error.hint is not None
    assert str(tiny_shards) in error.hint


def test_a_file_and_a_url_are_refused(tiny_shards: Path) -> None:
    assert failure(tiny_shards / "manifest.json").exit_code == Exit.USAGE
    assert failure("s3://bucket/shards").exit_code == Exit.USAGE


def test_unknown_bundled_name() -> None:
    error = failure("bundled:nothing")
    assert error.exit_code == Exit.USAGE
    assert "no such bundled dataset" in error.message


def test_no_manifest(class_folders: Path, tmp_path: Path) -> None:
    error = failure(class_folders)
    assert error.exit_code == Exit.DATA
    assert error.hint is not None
    assert f"vitpt shard {class_folders}" in error.hint
    (tmp_path / "begun" / ".vitpt-work").mkdir(parents=True)
    assert "not finished" in failure(tmp_path / "begun").message


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b"null", b'{"format": "other"}'])
def test_broken_manifest(copied: Path, content: bytes) -> None:
    (copied / "manifest.json").write_bytes(content)
    assert failure(copied).exit_code == Exit.DATA


@pytest.mark.parametrize("key", ["splits", "dataset_id", "num_classes", "version"])
def test_manifest_without_a_key(copied: Path, key: str) -> None:
    change_manifest(copied, lambda manifest: manifest.pop(key))
    assert failure(copied).exit_code == Exit.DATA


def test_newer_version_says_what_reads_it(copied: Path) -> None:
    change_manifest(copied, lambda manifest: manifest.update(version=2, written_by="vitpt 9.1.0"))
    error = failure(copied)
    assert error.exit_code == Exit.DATA
    assert "version 2" in error.message
    assert error.hint is not None
    assert "vitpt 9.1.0" in error.hint


def test_missing_and_wrong_sized_shards(copied: Path) -> None:
    path = copied / "train-000001.tar"
    with path.open("ab") as file:
        file.write(b"x")
    error = failure(copied)
    assert error.exit_code == Exit.DATA
    assert "train-000001.tar" in error.message
    path.unlink()
    error = failure(copied)
    assert error.exit_code == Exit.DATA
    assert "train-000001.tar: shard missing" in error.message


@pytest.mark.parametrize("name", ["label.npy", "name_off.npy", "names.bin"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "other"])
def test_damaged_index(copied: Path, name: str, damage: str) -> None:
    path = copied / "val.index" / name
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "other":
        np.save(path.with_suffix(".npy"), np.zeros(3, np.float32))
        path.with_suffix(".npy").rename(path)
    else:
        path.write_bytes(b"" if damage == "empty" else data[:-5])
    error = failure(copied)
    assert error.exit_code == Exit.DATA
    assert name in error.message


def test_damaged_class_list(copied: Path) -> None:
    (copied / "classes.txt").write_text("cat\ndog\n")
    assert "2 lines" in failure(copied).message
    (copied / "classes.txt").write_text("cat\ndog\ncat\n")
    assert "two classes of one name" in failure(copied).message
    (copied / "classes.txt").unlink()
    assert failure(copied).exit_code == Exit.DATA


def test_shard_outside_the_folder_is_refused(copied: Path) -> None:
    def move(manifest: dict[str, Any]) -> None:
        manifest["splits"]["train"]["shards"][0]["file"] = "../train-000000.tar"

    change_manifest(copied, move)
    assert failure(copied).exit_code == Exit.DATA


def test_further_files_do_no_harm(copied: Path) -> None:
    (copied / "LICENSE.txt").write_text("free")
    assert open_dataset(copied).split("train").num_samples == 60


@pytest.mark.parametrize(
    ("column", "values"), [("label", [3, -2]), ("shard", [99]), ("offset", [2**63]), ("orient", [0, 9])]
)
def test_an_index_that_points_nowhere(copied: Path, column: str, values: list[int]) -> None:
    path = copied / "train.index" / f"{column}.npy"
    right = np.load(path)
    for value in values:
        wrong = right.copy()
        wrong[4] = value
        np.save(path, wrong)
        with pytest.raises(VitptError, match=f"{column}.npy: damaged index file .holds {value}, expected") as caught:
            open_dataset(copied)
        assert caught.value.exit_code == Exit.DATA
