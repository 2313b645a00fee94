"""Listing a source folder: layouts, labels, what is ignored and what is refused."""

import os
from pathlib import Path

import numpy as np
import pytest

from vitpt.errors import Exit, VitptError
from vitpt.shard.sources import list_source


def touch(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return root


def refused(root: Path, val_fraction: float | None = None) -> VitptError:
    with pytest.raises(VitptError) as raised:
        list_source(root, val_fraction)
    assert "\n" not in raised.value.message
    return raised.value


def test_class_folders_are_labelled_in_byte_order(tmp_path: Path) -> None:
    root = touch(tmp_path, "b/1.jpg", "a-b/2.jpg", "a/z.jpg", "a/10.jpg", "a/9.jpg", "B/x.png", "10/q.jpg", "é/e.jpg")
    listing = list_source(root)
    assert listing.layout == "classes"
    assert listing.classes == ("10", "B", "a", "a-b", "b", "é")
    files = listing.splits["train"]
    assert files.names == ["10/q.jpg", "B/x.png", "a/10.jpg", "a/9.jpg", "a/z.jpg", "a-b/2.jpg", "b/1.jpg", "é/e.jpg"]
    assert files.labels.tolist() == [0, 1, 2, 2, 2, 3, 4, 5]
    assert files.sizes.tolist() == [len(name.encode()) for name in files.names]


def test_splits_share_the_class_list(tmp_path: Path) -> None:
    touch(tmp_path, "train/1/a.jpg", "train/10/a.jpg", "train/2/a.jpg", "train/a/a.jpg", "test/2/t.jpg")
    touch(tmp_path, "val/a/v.jpg", "val/1/v.jpg")
    (tmp_path / "val" / "2").mkdir()  # an empty folder, and 10 is missing: a stays 3
    listing = list_source(tmp_path)
    assert listing.layout == "splits"
    assert listing.classes == ("1", "10", "2", "a")
    assert list(listing.splits) == ["train", "val", "test"]
    assert listing.splits["val"].labels.tolist() == [0, 3]
    assert listing.splits["test"].labels.tolist() == [2]
    assert listing.empty == ["val/2"]


def test_an_empty_training_class_keeps_its_label(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.jpg", "c/1.jpg")
    (tmp_path / "b").mkdir()
    listing = list_source(tmp_path)
    assert listing.classes == ("a", "b", "c")
    assert listing.splits["train"].labels.tolist() == [0, 2]


def test_classes_may_be_called_like_a_split(tmp_path: Path) -> None:
    listing = list_source(touch(tmp_path, "train/1.jpg", "car/1.jpg"))
    assert listing.layout == "classes"
    assert listing.classes == ("car", "train")


def test_folder_without_classes_is_unlabelled(tmp_path: Path) -> None:
    listing = list_source(touch(tmp_path, "b.jpg", "a.jpg"))
    assert (listing.layout, listing.classes) == ("flat", ())
    assert listing.splits["train"].names == ["a.jpg", "b.jpg"]
    assert listing.splits["train"].labels.tolist() == [-1, -1]


def test_unlabelled_training_with_labelled_validation(tmp_path: Path) -> None:
    listing = list_source(touch(tmp_path, "train/1.jpg", "val/cat/2.jpg"))
    assert listing.classes == ("cat",)
    assert listing.splits["train"].labels.tolist() == [-1]
    assert listing.splits["val"].labels.tolist() == [0]


def test_system_files_are_ignored_and_named(tmp_path: Path) -> None:
    junk = ["a/.DS_Store", "a/._1.jpg", "a/Thumbs.db", "__MACOSX/a/1.jpg", ".cache/x.jpg", "README.md", "labels.csv"]
    listing = list_source(touch(tmp_path, "a/1.jpg", *junk))
    assert listing.splits["train"].names == ["a/1.jpg"]
    wanted = [".cache", "README.md", "__MACOSX", "a/.DS_Store", "a/._1.jpg", "a/Thumbs.db", "labels.csv"]
    assert listing.ignored == wanted
    flat = list_source(touch(tmp_path / "flat", "1.jpg", ".DS_Store"))
    assert flat.ignored == [".DS_Store"]


def test_links_are_followed_and_special_files_marked(tmp_path: Path) -> None:
    touch(tmp_path / "elsewhere", "cat/1.jpg")
    root = tmp_path / "root"
    root.mkdir()
    (root / "cat").symlink_to(tmp_path / "elsewhere" / "cat")
    (root / "cat" / "2.jpg").symlink_to(tmp_path / "nowhere.jpg")
    os.mkfifo(root / "cat" / "3.jpg")
    files = list_source(root).splits["train"]
    assert files.names == ["cat/1.jpg", "cat/2.jpg", "cat/3.jpg"]
    assert files.sizes.tolist() == [9, -1, -1]


def test_names_that_are_not_utf8_are_kept(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / os.fsdecode(b"caf\xe9.jpg")).write_bytes(b"x")
    assert os.fsencode(list_source(tmp_path).splits["train"].names[0]) == b"a/caf\xe9.jpg"


def test_class_unknown_to_training(tmp_path: Path) -> None:
    error = refused(touch(tmp_path, "train/cat/1.jpg", "train/dog/1.jpg", "val/cats/1.jpg"))
    assert error.exit_code == Exit.DATA
    assert "'cats'" in error.message
    assert error.hint == "nearest: 'cat'"


@pytest.mark.parametrize("name", [b"\xff", b"a\nb", b"\x1b[31m"])
def test_class_names_must_fit_a_line_of_text(tmp_path: Path, name: bytes) -> None:
    touch(tmp_path, f"{os.fsdecode(name)}/1.jpg") if name != b"\xff" else None
    folder = tmp_path / os.fsdecode(name)
    folder.mkdir(exist_ok=True)
    (folder / "1.jpg").write_bytes(b"x")
    assert refused(tmp_path).exit_code == Exit.DATA


def test_missing_empty_file_and_nested(tmp_path: Path) -> None:
    touch(tmp_path, "photos/a/1.jpg", "deep/a/b/1.jpg", "valid/train/a/1.jpg", "valid/valid/a/1.jpg")
    error = refused(tmp_path / "photo")
    assert (error.exit_code, error.hint) == (Exit.USAGE, f"did you mean {tmp_path / 'photos'}?")
    assert refused(tmp_path / "photos" / "a" / "1.jpg").exit_code == Exit.USAGE
    (tmp_path / "empty" / "a").mkdir(parents=True)
    assert refused(tmp_path / "empty").exit_code == Exit.DATA
    error = refused(tmp_path / "deep")
    assert error.exit_code == Exit.USAGE
    assert "deep/a/b" in error.message
    assert "a folder where a file was expected" in refused(tmp_path / "valid").message


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_folder(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.jpg")
    (tmp_path / "a").chmod(0)
    try:
        assert refused(tmp_path).exit_code == Exit.USAGE
    finally:
        (tmp_path / "a").chmod(0o755)


def test_validation_fraction(tmp_path: Path) -> None:
    root = touch(tmp_path, *(f"{c}/{i}.jpg" for c, n in (("a", 20), ("b", 3), ("c", 1)) for i in range(n)))
    listing = list_source(root, 0.1)
    train, val = listing.splits["train"], listing.splits["val"]
    # 2 of 20, at least 1 of 3, never the only one
    assert np.bincount(val.labels, minlength=3).tolist() == [2, 1, 0]
    assert sorted(train.names + val.names) == sorted(list_source(root).splits["train"].names)
    assert set(val.names) < set(list_source(root, 0.5).splits["val"].names)
    assert list_source(root, 0.1).splits["val"].names == val.names


def test_validation_fraction_where_it_makes_no_sense(tmp_path: Path) -> None:
    touch(tmp_path, "split/train/a/1.jpg", "single/a/1.jpg")
    assert refused(tmp_path / "split", 0.1).exit_code == Exit.USAGE
    assert refused(tmp_path / "single", 0.1).exit_code == Exit.DATA


def test_listing_hash_sees_names_sizes_labels_but_not_places(tmp_path: Path) -> None:
    one = list_source(touch(tmp_path / "one", "a/1.jpg", "b/2.jpg"))
    two = list_source(touch(tmp_path / "two", "b/2.jpg", "a/1.jpg"))
    assert one.sha256() == two.sha256()
    (tmp_path / "two" / "a" / "1.jpg").write_bytes(b"longer than before")
    assert list_source(tmp_path / "two").sha256() != one.sha256()
    touch(tmp_path / "one", "0/0.jpg")
    assert list_source(tmp_path / "one").sha256() != one.sha256()
