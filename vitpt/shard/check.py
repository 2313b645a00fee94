"""Stage 2, after listing: decode every file once, in parallel, and remember the outcomes so that a killed job goes on."""

import errno
import json
import zlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitpt import fsio
from vitpt.shard.inspect import Outcome, inspect
from vitpt.shard.sources import Files
from vitpt.shard.workers import check_stop, run_all

CHUNK_FILES = 128
MAX_FILE_BYTES = 1 << 30
EXTENSIONS = ("", "jpg", "png", "webp")
LIBRARIES = ("numpy", "pillow", "simplejpeg")
CHECK_VERSION = 1  # raised when an outcome may change

OUTCOME = np.dtype(
    [("extension", "u1"), ("length", "u4"), ("crc32", "u4"), ("width", "u4"), ("height", "u4"), ("repaired", "?")]
)
Advance = Callable[[int, int], None]  # (files done, bytes done)


class Note(NamedTuple):
    """Why a file was not taken as it is."""

    action: str
    category: str
    detail: str


@dataclass(frozen=True, eq=False)
class Checked:
    """Outcome of the check of a split's files.

    Attributes:
        rows: OUTCOME (n,); `extension` is an index into EXTENSIONS, 0 for a rejected file.
        notes: by row, for files that were repaired or rejected.
    """

    rows: np.ndarray
    notes: dict[int, Note] = field(default_factory=dict)

    @property
    def kept(self) -> np.ndarray:
        """bool (n,): goes into a shard."""
        return self.rows["extension"] > 0


class Chunk(NamedTuple):
    """Some files for one task."""

    root: Path
    names: list[str]
    sizes: list[int]


Raw = tuple[int, int, int, int, int, str, str, str]  # extension, length, crc32, width, height, action, category, detail


def check_files(root: Path, splits: dict[str, Files], work: Path, jobs: int, advance: Advance) -> dict[str, Checked]:
    """Decode every file and say what becomes of it.

    Results are kept in `work`, one file for every CHUNK_FILES images, and used again where name, size, time and library versions agree.

    Raises:
        VitptError: `work` cannot be written.
    """
    chunks = [(split, start) for split, files in splits.items() for start in range(0, len(files.names), CHUNK_FILES)]
    results: dict[int, Checked] = {}
    missing: list[int] = []
    for number, (split, start) in enumerate(chunks):
        known = _read_results(_result_path(work, number), _chunk_key(splits[split], start))
        if known is None:
            missing.append(number)
        else:
            results[number] = _unpack(known)
            _advance(advance, splits[split], start)
    tasks = [_chunk(root, *_of(splits, chunks[number])) for number in missing]
    with closing(run_all(check_chunk, tasks, jobs, _one_by_one)) as finished:
        for task, rows in finished:
            number = missing[task]
            files, start = _of(splits, chunks[number])
            results[number] = _unpack(rows)
            stored = {"key": _chunk_key(files, start), "rows": rows}
            fsio.write_json(_result_path(work, number), stored, canonical=True)
            _advance(advance, files, start)
    return {split: _join([results[n] for n, (of, _) in enumerate(chunks) if of == split]) for split in splits}


def check_chunk(chunk: Chunk) -> list[Raw]:
    """Check some files; runs in a worker process."""
    rows: list[Raw] = []
    for name, size in zip(chunk.names, chunk.sizes, strict=True):
        check_stop()
        outcome, payload = check_file(chunk.root / name, size)
        extension = EXTENSIONS.index(outcome.extension)
        crc32 = zlib.crc32(payload) if extension else 0
        note = (outcome.action, outcome.category, outcome.detail)
        rows.append((extension, len(payload), crc32, outcome.width, outcome.height, *note))
    return rows


def check_file(path: Path, size: int) -> tuple[Outcome, bytes]:
    """Read and check one file; `size` -1 stands for something that is not a regular file."""
    if size < 0:
        return _rejected("unreadable", "missing, or a broken link" if not path.exists() else "not a regular file")
    if size > MAX_FILE_BYTES:
        return _rejected("too_large", f"{fsio.size_text(size)}: more than {fsio.size_text(MAX_FILE_BYTES)}")
    try:
        payload = path.read_bytes()
    except OSError as err:
        if err.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):  # our trouble, not the file's
            raise
        return _rejected("unreadable", str(err.strerror))
    return inspect(payload)


def library_versions() -> dict[str, str]:
    """Versions of the libraries that decide what becomes of a file."""
    return {name: version(name) for name in LIBRARIES}


def _rejected(category: str, detail: str) -> tuple[Outcome, bytes]:
    return Outcome("reject", category, detail, "", 0, 0), b""


def _chunk(root: Path, files: Files, start: int) -> Chunk:
    end = start + CHUNK_FILES
    return Chunk(root, files.names[start:end], files.sizes[start:end].tolist())


def _one_by_one(chunk: Chunk) -> list[Raw]:
    """A process died in this chunk: every file alone, and the one that does it again is rejected."""
    tasks = [Chunk(chunk.root, [name], [size]) for name, size in zip(chunk.names, chunk.sizes, strict=True)]
    with closing(run_all(check_chunk, tasks, 1, _died)) as finished:
        rows = dict(finished)
    return [rows[index][0] for index in range(len(tasks))]


def _died(chunk: Chunk) -> list[Raw]:
    return [(0, 0, 0, 0, 0, "reject", "decoder_died", "the decoder's process died on this file")]


def _chunk_key(files: Files, start: int) -> str:
    """Hash of everything that the outcomes of a chunk depend on."""
    part = slice(start, start + CHUNK_FILES)
    listed = [files.names[part], files.sizes[part].tolist(), files.mtimes[part].tolist()]
    return fsio.sha256_bytes(fsio.canonical_json([CHECK_VERSION, library_versions(), listed]))


def _result_path(work: Path, number: int) -> Path:
    return work / f"check-{number:06d}.json"


def _read_results(path: Path, key: str) -> list[Raw] | None:
    try:
        stored: dict[str, Any] = json.loads(path.read_bytes())
        return [tuple(row) for row in stored["rows"]] if stored["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # absent or of no use: checked again


def _advance(advance: Advance, files: Files, start: int) -> None:
    part = files.sizes[start : start + CHUNK_FILES]
    advance(len(part), int(part.clip(0).sum()))


def _of(splits: dict[str, Files], chunk: tuple[str, int]) -> tuple[Files, int]:
    return splits[chunk[0]], chunk[1]


def _unpack(raw: list[Raw]) -> Checked:
    rows = np.array([(*row[:5], row[5] == "repair") for row in raw], OUTCOME)
    return Checked(rows, {index: Note(*row[5:]) for index, row in enumerate(raw) if row[5] != "keep"})


def _join(parts: list[Checked]) -> Checked:
    notes, start = {}, 0
    for part in parts:
        notes.update({start + row: note for row, note in part.notes.items()})
        start += len(part.rows)
    return Checked(np.concatenate([part.rows for part in parts]), notes)
