"""From a folder to shards: contents, determinism, resuming, refusing."""

import json
import multiprocessing
import os
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from images import Silent, encode, exif, make_shards, quadrants, shard, texture, write_class_folder

from vitpt.dataset import open_dataset
from vitpt.errors import Exit, VitptError
from vitpt.image import to_rgb
from vitpt.shard.check import Advance


def tree(root: Path) -> dict[str, bytes]:
    """Content of every file below a folder."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def refused(source: Path, out: Path, reporter: Silent | None = None, **options: object) -> VitptError:
    with pytest.raises(VitptError) as raised:
        shard(source, out, reporter, **options)
    return raised.value


class Interrupting(Silent):
    """Calls `action` when `count` units of a stage are done."""

    def __init__(self, stage: str, count: int) -> None:
        super().__init__()
        self.wanted = stage
        self.left = count

    def act(self) -> None:
        raise KeyboardInterrupt

    @contextmanager
    def stage(self, description: str, total: int, unit: str) -> Iterator[Advance]:
        def advance(units: int, num_bytes: int) -> None:
            if description == self.wanted and self.left > 0:
                self.left -= units
                if self.left <= 0:
                    self.act()

        yield advance


class Killing(Interrupting):
    """Kills a worker process."""

    def act(self) -> None:
        for process in multiprocessing.active_children():
            process.kill()


def test_every_file_once_with_its_label(tiny_shards: Path, split_folders: Path) -> None:
    data = open_dataset(tiny_shards)
    for name, split in data.splits.items():
        names = [split.sample_name(row) for row in range(split.num_samples)]
        source = sorted(str(p.relative_to(split_folders)) for p in (split_folders / name).rglob("*.*"))
        assert sorted(names) == source
        assert (names == source) == (name == "val")  # val in source order, train shuffled
        members = []
        for index in range(len(split.shards)):
            with tarfile.open(split.shard_path(index), "r:") as file:
                members += [(m.name, file.extractfile(m).read()) for m in file]  # type: ignore[union-attr]
        assert len(members) == 2 * split.num_samples
        for row in range(split.num_samples):
            (cls_name, label), (image_name, payload) = members[2 * row : 2 * row + 2]
            assert cls_name == f"{row:09d}.cls"
            assert data.classes[int(label)] == names[row].split("/")[1]
            assert image_name == f"{row:09d}{Path(names[row]).suffix}"
            assert payload == (split_folders / names[row]).read_bytes()


def test_sizes_in_the_index_are_those_of_the_pixels(tiny_shards: Path, split_folders: Path) -> None:
    train = open_dataset(tiny_shards).split("train")
    for row in range(0, 60, 7):
        pixels = to_rgb((split_folders / train.sample_name(row)).read_bytes())
        assert (int(train.height[row]), int(train.width[row])) == pixels.shape[:2]


def test_first_training_samples_mix_the_classes(tmp_path: Path) -> None:
    payload = encode(quadrants(8, 8))
    for number in range(1000):
        path = tmp_path / "source" / f"class{number // 100}" / f"{number % 100:02d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(payload)
    train = open_dataset(make_shards(tmp_path / "source", tmp_path / "out", jobs=2)).split("train")
    assert len(np.unique(train.label[:100])) == 10


def test_same_bytes_for_any_number_of_jobs_place_and_listing_order(
    split_folders: Path, tiny_shards: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "elsewhere"
    for path in sorted(split_folders.rglob("*.*"), reverse=True):
        (copy / path.relative_to(split_folders)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy / path.relative_to(split_folders))
    assert tree(make_shards(copy, tmp_path / "out", samples_per_shard=16, jobs=2)) == tree(tiny_shards)


def test_identity_ignores_shard_size_but_not_seed_or_content(
    split_folders: Path, tiny_shards: Path, tmp_path: Path
) -> None:
    one = open_dataset(tiny_shards)
    other = open_dataset(make_shards(split_folders, tmp_path / "a", samples_per_shard=7))
    assert len(other.split("train").shards) == 9
    assert other.dataset_id == one.dataset_id
    assert open_dataset(make_shards(split_folders, tmp_path / "b", seed=1)).dataset_id != one.dataset_id
    changed = Path(shutil.copytree(split_folders, tmp_path / "changed"))
    (changed / "val" / "cat" / "cat_000.jpg").write_bytes(encode(texture(9)))
    third = open_dataset(make_shards(changed, tmp_path / "c"))
    assert third.split("train").split_id == one.split("train").split_id
    assert third.dataset_id != one.dataset_id


def test_awkward_names_and_equal_base_names(tmp_path: Path) -> None:
    names = [
        "a/IMG 2.0 (1).jpeg",
        "a/cat.v1.jpg",
        "a/cat.v2.jpg",
        "b.old/x.jpg",
        "c/cat.v1.jpg",
        "c/ü é",
        "c/" + os.fsdecode(b"\xe9.png"),
    ]
    for number, name in enumerate(names):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(encode(texture(number)))
    train = open_dataset(make_shards(tmp_path / "in", tmp_path / "out")).split("train")
    assert sorted(train.sample_name(row) for row in range(7)) == sorted(names)


def test_unlabelled(tmp_path: Path) -> None:
    write_class_folder(tmp_path / "photos", 5)
    data = open_dataset(make_shards(tmp_path / "photos", tmp_path / "out"))
    train = data.split("train")
    assert (data.classes, train.num_labelled) == ((), 0)
    assert train.label.tolist() == [-1] * 5
    with tarfile.open(train.shard_path(0), "r:") as file:
        assert file.getnames() == [f"{row:09d}.jpg" for row in range(5)]


def mixed_folder(root: Path) -> Path:
    """Two classes of 6 good images, and a file for each fate."""
    for number, name in enumerate(("cat", "dog")):
        write_class_folder(root / name, 6, seed=number)
    (root / "cat" / "turned.jpg").write_bytes(encode(quadrants(), exif=exif(6)))
    (root / "dog" / "drawing.gif").write_bytes(encode(quadrants(), "GIF"))
    (root / "dog" / "cut.jpg").write_bytes(encode(texture(1))[:-50])
    (root / "cat" / "notes.txt").write_text("nothing to see")
    (root / "cat" / ".DS_Store").write_bytes(b"x")
    return root


def test_rejects_and_repairs_are_listed_by_name(tmp_path: Path) -> None:
    out = make_shards(mixed_folder(tmp_path / "in"), tmp_path / "out", max_reject_fraction=0.2)
    lines = [json.loads(line) for line in (out / "rejects.jsonl").read_text().splitlines()]
    assert [(line["name"], line["action"], line["category"]) for line in lines] == [
        ("cat/notes.txt", "rejected", "not_an_image"),
        ("cat/turned.jpg", "repaired", "exif_orientation"),
        ("dog/cut.jpg", "rejected", "damaged"),
        ("dog/drawing.gif", "repaired", "format"),
    ]
    assert all(line["detail"] and line["split"] == "train" for line in lines)
    data = open_dataset(out)
    train = data.split("train")
    assert train.num_samples == 14
    assert data.manifest["checked"]["train"] == {
        "files": 16,
        "repaired": {"exif_orientation": 1, "format": 1},
        "rejected": {"damaged": 1, "not_an_image": 1},
    }
    assert data.manifest["source"]["ignored"] == 1
    row = [train.sample_name(row) for row in range(14)].index("cat/turned.jpg")
    assert (int(train.width[row]), int(train.height[row]), int(train.orient[row])) == (32, 48, 1)


def test_too_many_rejects_stop_before_anything_is_named_finished(tmp_path: Path) -> None:
    source = mixed_folder(tmp_path / "in")
    reporter = Silent()
    error = refused(source, tmp_path / "out", reporter)
    assert error.exit_code == Exit.DATA
    assert "2 of 16 files" in error.message
    assert [line.split(":")[1].strip() for line in reporter.lines] == ["cat/notes.txt", "dog/cut.jpg"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".vitpt-work"]
    assert error.hint is not None
    allowed = float(error.hint.split()[-1])
    assert shard(source, tmp_path / "out", max_reject_fraction=allowed).manifest["splits"]["train"]["num_samples"] == 14
    assert not (tmp_path / "out" / ".vitpt-work").exists()


def test_one_bad_file_passes_unless_none_is_allowed(tmp_path: Path) -> None:
    write_class_folder(tmp_path / "in" / "a", 5)
    (tmp_path / "in" / "a" / "bad.jpg").write_bytes(b"")
    assert "1 of 6 files" in refused(tmp_path / "in", tmp_path / "out", max_reject_fraction=0.0).message
    assert shard(tmp_path / "in", tmp_path / "out").manifest["splits"]["train"]["num_samples"] == 5


def test_nothing_usable_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "in" / "a").mkdir(parents=True)
    (tmp_path / "in" / "a" / "only.txt").write_text("text")
    error = refused(tmp_path / "in", tmp_path / "out", max_reject_fraction=1.0)
    assert error.exit_code == Exit.DATA
    assert "no usable image among 1 files" in error.message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("stage", "count"), [("checking", 1), ("writing", 1), ("writing", 40)])
def test_an_interrupted_run_goes_on(
    split_folders: Path, tiny_shards: Path, tmp_path: Path, stage: str, count: int
) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        shard(split_folders, out, Interrupting(stage, count), samples_per_shard=16, jobs=2)
    assert not multiprocessing.active_children()
    assert not [path for path in out.rglob("*") if ".tmp-" in path.name]
    assert not (out / "manifest.json").exists()
    finished = {path: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    report = shard(split_folders, out, samples_per_shard=16)
    assert tree(out) == tree(tiny_shards)
    assert report.kept_shards <= len(finished)
    if stage == "writing":
        assert report.kept_shards > 0
        assert sum(path.stat().st_mtime_ns == time for path, time in finished.items()) >= report.kept_shards


@pytest.mark.parametrize("stage", ["checking", "writing"])
def test_killed_workers_cost_nothing(split_folders: Path, tiny_shards: Path, tmp_path: Path, stage: str) -> None:
    shard(split_folders, tmp_path / "out", Killing(stage, 1), samples_per_shard=16, jobs=2)
    assert tree(tmp_path / "out") == tree(tiny_shards)


def test_shards_of_another_plan_are_written_again(split_folders: Path, tiny_shards: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        shard(split_folders, out, Interrupting("writing", 40), samples_per_shard=10, seed=3)
    assert shard(split_folders, out, samples_per_shard=16).kept_shards == 0
    assert tree(out) == tree(tiny_shards)  # and what only the first plan had is gone


@pytest.mark.parametrize("damage", ["cut", "garbage", "missing", "foreign"])
def test_a_sidecar_that_does_not_agree_is_no_proof(
    split_folders: Path, tiny_shards: Path, tmp_path: Path, damage: str
) -> None:
    out = Path(shutil.copytree(tiny_shards, tmp_path / "out"))
    (out / "manifest.json").unlink()
    (out / ".vitpt-work").mkdir()
    sidecar = out / "train.index" / "000001.json"
    if damage == "cut":
        os.truncate(out / "train-000001.tar", 10_240)
    elif damage == "garbage":
        sidecar.write_bytes(b"{")
    elif damage == "missing":
        sidecar.unlink()
    else:
        sidecar.write_text(sidecar.read_text().replace('"plan_sha256": "', '"plan_sha256": "0'))
    report = shard(split_folders, out, samples_per_shard=16)
    assert report.kept_shards == 5  # 4 and 2 shards, one of them written again
    assert tree(out) == tree(tiny_shards)


def test_a_source_that_changes_between_check_and_write(tmp_path: Path) -> None:
    write_class_folder(tmp_path / "in" / "a", 4)

    class Changing(Interrupting):
        def act(self) -> None:
            (tmp_path / "in" / "a" / "a_002.jpg").write_bytes(encode(texture(77)))

    error = refused(tmp_path / "in", tmp_path / "out", Changing("checking", 1))
    assert error.exit_code == Exit.DATA
    assert "a_002.jpg: changed" in error.message
    assert error.hint is not None
    assert "0 of 1 shards are finished" in error.hint
    assert shard(tmp_path / "in", tmp_path / "out").manifest["splits"]["train"]["num_samples"] == 4


def test_finished_shards_are_left_alone(split_folders: Path, tiny_shards: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(tiny_shards, tmp_path / "out"))
    (out / ".vitpt-work").mkdir()  # of a run that was killed at the very end
    times = {path: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    report = shard(split_folders, out, samples_per_shard=16, jobs=2)
    assert report.already_there
    assert {path: path.stat().st_mtime_ns for path in out.glob("*.tar")} == times
    assert tree(out) == tree(tiny_shards)
    assert not (out / ".vitpt-work").exists()


def test_finished_shards_of_something_else_are_refused(
    split_folders: Path, tiny_shards: Path, class_folders: Path, tmp_path: Path
) -> None:
    out = Path(shutil.copytree(tiny_shards, tmp_path / "out"))
    before = tree(out)
    error = refused(split_folders, out, samples_per_shard=8)
    assert error.exit_code == Exit.USAGE
    assert "--samples-per-shard 16, but now it is 8" in error.message
    assert "--seed 0, but now it is 1" in refused(split_folders, out, samples_per_shard=16, seed=1).message
    assert "other files" in refused(class_folders, out, samples_per_shard=16).message
    changed = Path(shutil.copytree(split_folders, tmp_path / "changed"))
    os.utime(changed / "val" / "cat" / "cat_000.jpg", (4e9, 4e9))
    assert "are newer" in refused(changed, out, samples_per_shard=16).message
    assert tree(out) == before


def test_overwrite_replaces_ours_and_leaves_what_is_not(class_folders: Path, tiny_shards: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(tiny_shards, tmp_path / "out"))
    (out / "LICENSE.txt").write_text("free")
    shard(class_folders, out, overwrite=True)
    assert (out / "LICENSE.txt").read_text() == "free"
    (out / "LICENSE.txt").unlink()
    assert tree(out) == tree(make_shards(class_folders, tmp_path / "fresh"))


def test_foreign_folders_are_never_touched(class_folders: Path, tmp_path: Path) -> None:
    out = tmp_path / "home"
    out.mkdir()
    (out / "thesis.tex").write_text("do not lose")
    for overwrite in (False, True):
        error = refused(class_folders, out, overwrite=overwrite)
        assert error.exit_code == Exit.USAGE
        assert "thesis.tex" in error.message
    assert tree(out) == {"thesis.tex": b"do not lose"}


def test_target_inside_the_source(class_folders: Path) -> None:
    for out in (class_folders, class_folders / "out", class_folders / ".." / class_folders.name / "cat"):
        assert "source folder" in refused(class_folders, out).message


def test_second_writer_is_kept_out(class_folders: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    class Second(Interrupting):
        def act(self) -> None:
            self.error = refused(class_folders, out)

    first = Second("checking", 1)
    shard(class_folders, out, first)
    assert "another `vitpt shard` is writing here" in first.error.message
    assert open_dataset(out).split("train").num_samples == 12


def test_temporary_files_of_a_killed_run_are_removed(class_folders: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / ".vitpt-work").mkdir(parents=True)
    (out / "train.index").mkdir()
    left = [out / ".train-000000.tar.tmp-999-0", out / "train.index" / ".label.npy.tmp-999-1"]
    for path in left:
        path.write_bytes(b"half")
    shard(class_folders, out)
    assert not any(path.exists() for path in left)


def test_a_broken_link_is_one_rejected_file(class_folders: Path, tmp_path: Path) -> None:
    (class_folders / "cat" / "cat_000.jpg").unlink()
    (class_folders / "cat" / "cat_000.jpg").symlink_to("nowhere")
    data = open_dataset(make_shards(class_folders, tmp_path / "out"))
    assert data.split("train").num_samples == 11
    assert json.loads((tmp_path / "out" / "rejects.jsonl").read_text())["category"] == "unreadable"
