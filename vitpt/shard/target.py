"""The folder that shards are written to: whose it is, what state it is in, and what must go before writing."""

import re
import shutil
from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from vitpt import dataset, fsio
from vitpt.errors import VitptError
from vitpt.shard.sources import SPLITS

State = Literal["new", "unfinished", "finished"]
OURS = re.compile(
    rf"(manifest\.json|classes\.txt|_info\.json|rejects\.jsonl|({'|'.join(SPLITS)})-\d{{6}}\.(tar|idx)|({'|'.join(SPLITS)})\.index)"
)
OURS_IN_INDEX = re.compile(r"(\w+\.npy|names\.bin|\d{6}\.json)")
LOCK = "lock"


def examine(out: Path, source: Path) -> State:
    """State of the target folder.

    Raises:
        VitptError: it lies inside the source, is a file, or holds something that `vitpt shard` did not write (exit 2).
    """
    inner, outer = out.resolve(), source.resolve()
    if inner == outer or outer in inner.parents:
        raise VitptError(
            f"{out}: the shards cannot be written into the source folder {source}", hint="name another folder as OUT"
        )
    if not out.exists():
        return "new"
    if not out.is_dir():
        raise VitptError(f"{out}: a file, but OUT must be a new or empty folder")
    with fsio.writing(out):
        there = sorted(entry.name for entry in out.iterdir())
    if dataset.MANIFEST in there and dataset.read_manifest(out):
        return "finished"
    if dataset.WORK in there:
        return "unfinished"
    others = [name for name in there if name != ".DS_Store"]
    if others:
        shown = ", ".join(ascii(name)[1:-1] for name in others[:3]) + (", ..." if len(others) > 3 else "")
        raise VitptError(
            f"{out}: not empty and not written by `vitpt shard` (holds {shown})", hint="name a new folder as OUT"
        )
    return "new"


@contextmanager
def locked(out: Path) -> Iterator[Path]:
    """Create the target with its work folder and keep other writers out; yields the work folder.

    A work folder that this call has made and nothing was put into is removed on the way out, and so is a target that stays empty.

    Raises:
        VitptError: another process writes to it, or it cannot be created (exit 2 or 4).
    """
    made = not out.exists()
    work = out / dataset.WORK
    with fsio.locked(work / LOCK, f"{out}: another `vitpt shard` is writing here"):
        try:
            yield work
        finally:
            _leave(out, work, made)


def _leave(out: Path, work: Path, made: bool) -> None:
    """Remove the work folder if nothing is kept in it for the next run."""
    with suppress(OSError):
        if [entry.name for entry in work.iterdir()] == [LOCK]:
            shutil.rmtree(work)
            if made:
                out.rmdir()


def clear_work(work: Path) -> None:
    """Forget what earlier calls have found out about the source."""
    for path in work.iterdir():
        if path.name != LOCK:
            path.unlink()


def remove_stale(out: Path) -> None:
    """Remove what killed processes left behind under temporary names."""
    fsio.remove_temporary_files(out)
    for folder in (out / dataset.WORK, *out.glob("*.index")):
        if folder.is_dir():
            fsio.remove_temporary_files(folder)


def clear(out: Path, keep: Set[str] = frozenset()) -> None:
    """Remove what `vitpt shard` wrote, except the names in `keep` (relative to `out`); the manifest goes first."""
    if dataset.MANIFEST not in keep:
        (out / dataset.MANIFEST).unlink(missing_ok=True)
    for entry in sorted(out.iterdir()):
        if not OURS.fullmatch(entry.name):
            continue
        if not entry.is_dir():
            if entry.name not in keep:
                entry.unlink()
            continue
        for inner in sorted(entry.iterdir()):
            if OURS_IN_INDEX.fullmatch(inner.name) and f"{entry.name}/{inner.name}" not in keep:
                inner.unlink()
        with suppress(OSError):  # somebody else's file may be in it
            entry.rmdir()
