"""What there is to shard: the files of a folder of images, their splits and their labels."""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitpt import fsio
from vitpt.errors import Exit, VitptError

SPLITS = ("train", "val", "test")
JUNK = ("Thumbs.db", "desktop.ini", "__MACOSX")
LAYOUT_HINT = "expected SRC/<class>/<file>, SRC/{train,val,test}/<class>/<file>, or a folder of images without classes"


@dataclass(frozen=True, eq=False)
class Files:
    """The files of one split in source order: by class, then by name, both in byte order.

    Attributes:
        names: paths relative to the source folder, with `/`.
        labels: int32 (n,), -1 for none.
        sizes: int64 (n,), bytes; -1 for what is not a readable regular file.
        mtimes: int64 (n,), nanoseconds.
    """

    names: list[str]
    labels: np.ndarray
    sizes: np.ndarray
    mtimes: np.ndarray

    def take(self, rows: np.ndarray) -> "Files":
        """These rows, in this order."""
        return Files([self.names[row] for row in rows.tolist()], self.labels[rows], self.sizes[rows], self.mtimes[rows])


@dataclass(frozen=True, eq=False)
class Listing:
    """Everything found below a source folder.

    Attributes:
        root: the source folder.
        layout: "classes", "splits" or "flat".
        classes: class names in byte order; the position is the label.
        splits: files by split, in the order train, val, test; none is empty.
        ignored: relative names of hidden and system files, and of files beside the class folders.
        empty: class folders without a file, as relative names.
    """

    root: Path
    layout: str
    classes: tuple[str, ...]
    splits: dict[str, Files]
    ignored: list[str]
    empty: list[str]

    @property
    def num_files(self) -> int:
        """Files in all splits."""
        return sum(len(files.names) for files in self.splits.values())

    @property
    def num_bytes(self) -> int:
        """Bytes in all splits."""
        return sum(int(files.sizes.clip(0).sum()) for files in self.splits.values())

    @property
    def newest_ns(self) -> int:
        """Modification time of the newest file, nanoseconds."""
        return max(int(files.mtimes.max()) for files in self.splits.values())

    def sha256(self) -> str:
        """Hash of what was listed (split, name, label, size): the same for every copy of the folder."""
        digest = hashlib.sha256(fsio.canonical_json(list(self.classes)))
        for split, files in self.splits.items():
            for name, label, size in zip(files.names, files.labels.tolist(), files.sizes.tolist(), strict=True):
                digest.update(fsio.canonical_json([split, name, label, size]))
        return digest.hexdigest()


def list_source(root: Path, val_fraction: float | None = None) -> Listing:
    """List a folder of images.

    `val_fraction` cuts a validation split out of a folder without splits: in every class the files whose relative names have the
    smallest sha256, so the choice depends on nothing but the names.

    Raises:
        VitptError: no such folder, unreadable, or a layout that is not understood (exit 2); no file, or a class that only a
            later split has (exit 3).
    """
    check_root(root)
    folders, loose, hidden = _read_folder(root, "")
    ignored: list[str] = []
    empty: list[str] = []
    if folders and all(name in SPLITS for name in folders):
        if val_fraction is not None:
            raise VitptError(
                f"{root}: has the splits {', '.join(folders)} already, so --val-fraction has no meaning here"
            )
        layout = "splits"
        found = {name: _read_split(root, f"{name}/", ignored) for name in SPLITS if name in folders}
        ignored += hidden + loose
    else:
        layout = "classes" if folders else "flat"
        found = {"train": _read_split(root, "", ignored)}
    classes = next((tuple(by_class) for by_class, _ in found.values() if by_class), ())
    _check_classes(root, classes)
    splits: dict[str, Files] = {}
    for name, (by_class, flat) in found.items():
        empty += [f"{name}/{c}" if layout == "splits" else c for c, files in by_class.items() if not files]
        files = _to_files(root, name, classes, by_class, flat)
        if files.names:
            splits[name] = files
    if not splits:
        raise VitptError(f"{root}: no files in it", hint=LAYOUT_HINT, exit_code=Exit.DATA)
    if val_fraction is not None:
        splits = _cut_validation(root, splits["train"], val_fraction)
    return Listing(root, layout, classes, splits, sorted(ignored, key=os.fsencode), sorted(empty, key=os.fsencode))


Entry = tuple[str, int, int]  # relative name, size (-1: not a readable file), mtime in ns


def check_root(root: Path) -> None:
    """Refuse a source that is not a folder.

    Raises:
        VitptError: no such path, or a file (exit 2).
    """
    try:
        exists = root.exists()
    except OSError as err:
        raise VitptError(f"{root}: {err.strerror}") from err
    if not exists:
        raise fsio.missing_path(root, "folder")
    if not root.is_dir():
        raise VitptError(
            f"{root}: a file, but SRC must be a folder of images",
            hint="unpack an archive first" if root.suffix else None,
        )


def _scan(root: Path, prefix: str) -> Iterator[os.DirEntry[str]]:
    """The entries of a folder in byte order of their names."""
    folder = root / prefix if prefix else root
    try:
        with os.scandir(folder) as entries:
            return iter(sorted(entries, key=lambda entry: os.fsencode(entry.name)))
    except OSError as err:
        raise VitptError(f"{folder}: cannot be read ({err.strerror})") from err


def _is_junk(name: str) -> bool:
    return name.startswith(".") or name in JUNK


def _read_folder(root: Path, prefix: str) -> tuple[list[str], list[str], list[str]]:
    """(folders, files, ignored) directly below `prefix`; ignored and files as relative names."""
    folders, files, ignored = [], [], []
    for entry in _scan(root, prefix):
        if _is_junk(entry.name):
            ignored.append(prefix + entry.name)
        elif entry.is_dir():
            folders.append(entry.name)
        else:
            files.append(prefix + entry.name)
    return folders, files, ignored


def _read_split(root: Path, prefix: str, ignored: list[str]) -> tuple[dict[str, list[Entry]], list[Entry]]:
    """(entries by class, entries without a class) of one split folder; adds to `ignored` what is left out."""
    folders, loose, hidden = _read_folder(root, prefix)
    if not folders:
        return {}, _read_class(root, prefix, ignored)
    ignored += hidden + loose  # loose: a README or a table of labels beside the class folders
    return {name: _read_class(root, f"{prefix}{name}/", ignored) for name in folders}, []


def _read_class(root: Path, prefix: str, ignored: list[str]) -> list[Entry]:
    found = []
    for entry in _scan(root, prefix):
        name = prefix + entry.name
        if _is_junk(entry.name):
            ignored.append(name)
        elif entry.is_dir():
            raise VitptError(f"{root / name}: a folder where a file was expected", hint=LAYOUT_HINT)
        else:
            found.append(_stat(name, entry))
    return found


def _stat(name: str, entry: os.DirEntry[str]) -> Entry:
    try:
        # a pipe or a device is never opened: reading it could block for ever
        if not entry.is_file():
            return name, -1, 0
        status = entry.stat()
        return name, status.st_size, status.st_mtime_ns
    except OSError:
        return name, -1, 0


def _check_classes(root: Path, classes: tuple[str, ...]) -> None:
    for name in classes:
        try:
            usable = not any(ord(letter) < 32 for letter in name) and bool(name.encode("utf-8"))
        except UnicodeEncodeError:
            usable = False
        if not usable:
            raise VitptError(
                f"{root}: class folder {name!a} must have a name in UTF-8 without control characters",
                exit_code=Exit.DATA,
            )


def _to_files(
    root: Path, split: str, classes: tuple[str, ...], by_class: dict[str, list[Entry]], flat: list[Entry]
) -> Files:
    label_of = {name: label for label, name in enumerate(classes)}
    unknown = [name for name in by_class if name not in label_of]
    if unknown:
        near = fsio.nearest(unknown[0], classes)
        raise VitptError(
            f"{root / split}: class {unknown[0]!r} is not among the {len(classes)} classes of the first split"
            + (f" ({len(unknown)} such classes)" if len(unknown) > 1 else ""),
            hint=f"nearest: {near!r}" if near else None,
            exit_code=Exit.DATA,
        )
    entries = [entry for found in by_class.values() for entry in found] or flat
    labels = [label_of[name] for name, found in by_class.items() for _ in found] or [-1] * len(flat)
    return Files(
        [entry[0] for entry in entries],
        np.array(labels, np.int32),
        np.array([entry[1] for entry in entries], np.int64),
        np.array([entry[2] for entry in entries], np.int64),
    )


def _cut_validation(root: Path, files: Files, fraction: float) -> dict[str, Files]:
    """Cut `fraction` of every class (at least one file, never all) out as the validation split."""
    hashes = [hashlib.sha256(os.fsencode(name)).digest() for name in files.names]
    in_val = np.zeros(len(hashes), bool)
    for label in np.unique(files.labels):
        rows = np.flatnonzero(files.labels == label)
        count = min(max(1, int(fraction * len(rows) + 0.5)), len(rows) - 1)
        chosen = sorted(rows.tolist(), key=lambda row: hashes[row])[:count]
        in_val[chosen] = True
    if not in_val.any():
        raise VitptError(f"{root}: too few files for --val-fraction {fraction}: no class has two", exit_code=Exit.DATA)
    return {"train": files.take(np.flatnonzero(~in_val)), "val": files.take(np.flatnonzero(in_val))}
