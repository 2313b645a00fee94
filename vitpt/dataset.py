"""The contract between writing and reading shards: open a dataset, its splits and their memory-mapped columns.

The files and their bytes are described in docs/data-format.md.
"""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from vitpt import fsio
from vitpt.errors import Exit, VitptError

FORMAT = "vitpt-shards"
VERSION = 1
MANIFEST = "manifest.json"
CLASSES = "classes.txt"
WORK = ".vitpt-work"  # present while a dataset is being written
BUNDLED = "bundled:"
NAMES = "names.bin"
COLUMNS: dict[str, str] = {
    "shard": "<u4",
    "offset": "<u8",
    "length": "<u4",
    "label": "<i4",
    "width": "<u4",
    "height": "<u4",
    "orient": "|u1",
    "crc32": "<u4",
    "name_off": "<u8",
}
CONTENT_COLUMNS = (
    "length",
    "crc32",
    "label",
    "width",
    "height",
    "orient",
)  # what split_id is taken over, in this order


@dataclass(frozen=True)
class Shard:
    """One tar file of a split.

    Attributes:
        file: its name in the dataset's folder.
        bytes: its size.
        samples: number of samples in it.
        sha256: hexadecimal, over the whole file.
    """

    file: str
    bytes: int
    samples: int
    sha256: str


@dataclass(frozen=True, eq=False)
class Split:
    """The samples of one split; a sample's id is its row in the columns.

    The columns are memory-mapped arrays of shape (num_samples,): opening looks once for numbers that point nowhere; otherwise pages
    are read when touched.

    Attributes:
        name: "train", "val" or "test".
        split_id: sha256 over the columns that define the content.
        num_samples: rows.
        num_labelled: rows with a label.
        root: the dataset's folder.
        shards: the tar files; `shard` is an index into them.
        shard: uint32, which tar.
        offset: uint64, byte offset of the image in the tar.
        length: uint32, bytes of the image.
        label: int32, line number in classes.txt, -1 for none.
        width: uint32, pixels, upright.
        height: uint32, pixels, upright.
        orient: uint8, EXIF orientation of the stored pixels, 1..8.
        crc32: uint32, of the image's bytes.
        name_off: uint64 (num_samples + 1,), where each name starts in `names`.
        names: uint8, the original relative paths, one after the other.
    """

    name: str
    split_id: str
    num_samples: int
    num_labelled: int
    root: Path
    shards: tuple[Shard, ...]
    shard: np.ndarray
    offset: np.ndarray
    length: np.ndarray
    label: np.ndarray
    width: np.ndarray
    height: np.ndarray
    orient: np.ndarray
    crc32: np.ndarray
    name_off: np.ndarray
    names: np.ndarray

    def key(self, row: int) -> str:
        """The sample's name inside the tar, without extension."""
        return key(row)

    def sample_name(self, row: int) -> str:
        """The original path of a sample, relative to the source folder."""
        start, end = int(self.name_off[row]), int(self.name_off[row + 1])
        return bytes(self.names[start:end]).decode("utf-8", "surrogateescape")

    def shard_path(self, index: int) -> Path:
        """Path of the tar with this index."""
        return self.root / self.shards[index].file


@dataclass(frozen=True, eq=False)
class Dataset:
    """An opened dataset.

    Attributes:
        root: its folder.
        dataset_id: sha256 over version, classes and split ids: independent of shard size, machine and path.
        classes: class names; the position is the label. Empty when nothing is labelled.
        splits: by name, in the order train, val, test.
        manifest: the whole manifest.
    """

    root: Path
    dataset_id: str
    classes: tuple[str, ...]
    splits: dict[str, Split]
    manifest: dict[str, Any]

    def split(self, name: str) -> Split:
        """The split of this name.

        Raises:
            VitptError: there is none (exit 2).
        """
        if name not in self.splits:
            raise VitptError(f"{self.root}: no split {name!r}; there is {', '.join(self.splits)}")
        return self.splits[name]


def key(row: int) -> str:
    """A sample's name inside the tar: nine decimal digits."""
    return f"{row:09d}"


def write_array(path: Path, array: np.ndarray) -> None:
    """Write a .npy file (format version 1.0) atomically; numpy's own writing does not say that the disk is full."""
    with fsio.atomic_write(path) as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        file.write(array.tobytes())


def index_folder(root: Path, split: str) -> Path:
    """Folder of a split's columns, names and sidecars."""
    return root / f"{split}.index"


def split_id(columns: dict[str, np.ndarray]) -> str:
    """Identity of a split: sha256 over the bytes of the content columns."""
    return fsio.sha256_bytes(b"".join(columns[name].astype(COLUMNS[name]).tobytes() for name in CONTENT_COLUMNS))


def dataset_id(classes: tuple[str, ...], split_ids: dict[str, str]) -> str:
    """Identity of a dataset: sha256 over version, class names and split ids in canonical JSON."""
    return fsio.sha256_bytes(fsio.canonical_json({"version": VERSION, "classes": list(classes), "splits": split_ids}))


def open_dataset(path: str | Path) -> Dataset:
    """Open the shards at `path` (or `bundled:NAME`) and check that every file is there with its size.

    Raises:
        VitptError: no such path (exit 2); no, damaged or too new manifest, missing or wrong-sized shard or column (exit 3).
    """
    root = _locate(path)
    manifest = read_manifest(root)
    try:
        splits = {name: _open_split(root, name, entry) for name, entry in manifest["splits"].items()}
        classes = _read_classes(root, manifest)
        for split in splits.values():
            _check_values(split, len(classes))
        identity = str(manifest["dataset_id"])
    except (KeyError, TypeError, AttributeError, ValueError) as err:
        raise _damaged(root / MANIFEST, f"damaged manifest ({type(err).__name__}: {err})") from err
    return Dataset(root, identity, classes, splits, manifest)


def read_manifest(root: Path) -> dict[str, Any]:
    """The manifest of a finished dataset.

    Raises:
        VitptError: there is none, it is damaged, or a newer vitpt wrote it (exit 3).
    """
    path = root / MANIFEST
    try:
        manifest = fsio.parse_json(path.read_bytes())
    except FileNotFoundError:
        raise _no_manifest(root) from None
    except OSError as err:
        raise VitptError(f"{path}: {err.strerror}", exit_code=Exit.DATA) from err
    except ValueError as err:
        raise _damaged(path, f"not readable as JSON ({err})") from err
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise VitptError(f"{path}: not a manifest of vitpt shards (no format: {FORMAT!r})", exit_code=Exit.DATA)
    version = manifest.get("version")
    if not isinstance(version, int) or version < 1:
        raise _damaged(path, f"damaged manifest (version {version!r})")
    if version > VERSION:
        raise VitptError(
            f"{path}: format version {version}, but this vitpt reads up to version {VERSION}",
            hint=f"written by {manifest.get('written_by', 'a newer vitpt')}: upgrade vitpt to read it",
            exit_code=Exit.DATA,
        )
    return manifest


def _locate(path: str | Path) -> Path:
    text = str(path)
    if text.startswith(BUNDLED):
        folder = fsio.shipped("shards")
        name = text.removeprefix(BUNDLED)
        there = sorted(entry.parent.name for entry in folder.glob(f"*/{MANIFEST}"))
        if name not in there:
            raise VitptError(
                f"{text}: no such bundled dataset; there is {', '.join(BUNDLED + n for n in there) or 'none'}"
            )
        return folder / name
    if "://" in text:
        raise VitptError(
            f"{text}: object stores cannot be read by this version of vitpt", hint="copy the shards to a local folder"
        )
    root = Path(path)
    try:
        found = root.exists()
    except OSError as err:
        raise VitptError(f"{root}: {err.strerror}") from err
    if not found:
        raise fsio.missing_path(root, "dataset folder")
    if not root.is_dir():
        raise VitptError(f"{root}: a file, but a dataset is the folder that `vitpt shard` wrote")
    return root


def _no_manifest(root: Path) -> VitptError:
    if (root / WORK).is_dir():
        return VitptError(
            f"{root}: `vitpt shard` has not finished writing this dataset",
            hint="run the same `vitpt shard` command again to finish it",
            exit_code=Exit.DATA,
        )
    return VitptError(
        f"{root}: no {MANIFEST}, so these are no vitpt shards",
        hint=f"if this is a folder of images, write shards with: vitpt shard {shlex.quote(str(root))}",
        exit_code=Exit.DATA,
    )


def _open_split(root: Path, name: str, entry: dict[str, Any]) -> Split:
    shards = tuple(Shard(s["file"], int(s["bytes"]), int(s["samples"]), s["sha256"]) for s in entry["shards"])
    for shard in shards:
        _check_shard(root, shard)
    rows = int(entry["num_samples"])
    if rows != sum(shard.samples for shard in shards):
        raise _damaged(
            root / MANIFEST, f"split {name}: {rows} samples, but its shards add up to {sum(s.samples for s in shards)}"
        )
    folder = index_folder(root, name)
    columns = {column: _map_column(folder / f"{column}.npy", column, rows) for column in COLUMNS}
    return Split(
        name=name,
        split_id=str(entry["split_id"]),
        num_samples=rows,
        num_labelled=int(entry["num_labelled"]),
        root=root,
        shards=shards,
        names=_map_names(folder / NAMES, int(columns["name_off"][-1])),
        **columns,
    )


def _check_shard(root: Path, shard: Shard) -> None:
    if Path(shard.file).name != shard.file:
        raise _damaged(root / MANIFEST, f"shard {shard.file!r} is not a plain file name")
    path = root / shard.file
    try:
        size = path.stat().st_size
    except OSError as err:
        raise _damaged(path, f"shard missing ({err.strerror})") from err
    if size != shard.bytes:
        raise _damaged(path, f"{size} bytes, but the manifest says {shard.bytes}")


def _map_column(path: Path, column: str, rows: int) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as err:
        raise _damaged(path, f"index file missing or unreadable ({err.strerror or err})") from err
    except (ValueError, EOFError) as err:
        raise _damaged(path, f"damaged index file ({' '.join(str(err).split())})") from err
    expected = (rows + 1,) if column == "name_off" else (rows,)
    if array.dtype != np.dtype(COLUMNS[column]) or array.shape != expected:
        raise _damaged(path, f"holds {array.dtype} {array.shape}, expected {np.dtype(COLUMNS[column])} {expected}")
    return cast(np.ndarray, array)


def _check_values(split: Split, num_classes: int) -> None:
    """Refuse numbers that point outside of what there is; anything else in a column costs its sample only."""
    if not split.num_samples:
        return
    largest_shard = max(shard.bytes for shard in split.shards)
    for column, low, high in (
        ("shard", 0, len(split.shards) - 1),
        ("offset", 0, largest_shard),
        ("label", -1, num_classes - 1),
        ("orient", 1, 8),
    ):
        values = getattr(split, column)
        for value in (int(values.min()), int(values.max())):
            if not low <= value <= high:
                path = index_folder(split.root, split.name) / f"{column}.npy"
                raise _damaged(path, f"damaged index file (holds {value}, expected {low} to {high})")


def _map_names(path: Path, size: int) -> np.ndarray:
    try:
        found = path.stat().st_size
    except OSError as err:
        raise _damaged(path, f"index file missing or unreadable ({err.strerror})") from err
    if found != size:
        raise _damaged(path, f"{found} bytes, but the index says {size}")
    return np.memmap(path, np.uint8, "r") if size else np.zeros(0, np.uint8)


def _read_classes(root: Path, manifest: dict[str, Any]) -> tuple[str, ...]:
    path = root / CLASSES
    try:
        data = path.read_bytes()
    except OSError as err:
        raise _damaged(path, f"class list missing or unreadable ({err.strerror})") from err
    classes = tuple(data.decode("utf-8").split("\n")[:-1])
    if len(classes) != int(manifest["num_classes"]):
        raise _damaged(path, f"{len(classes)} lines, but the manifest says {manifest['num_classes']} classes")
    if len(set(classes)) != len(classes):
        raise _damaged(path, "two classes of one name")
    return classes


def _damaged(path: Path, what: str) -> VitptError:
    return VitptError(f"{path}: {what}", hint="copy or write this dataset again", exit_code=Exit.DATA)
