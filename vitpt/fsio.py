"""Files: atomic writes, hashes, free space, and where the shipped recipes and shards lie."""

import difflib
import errno
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal

from vitpt.errors import Exit, VitptError

CHUNK_BYTES = 1 << 20
TEMP_MARK = ".tmp-"  # temporary files are called ".<final name>.tmp-<pid>-<n>"
NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
NO_PERMISSION = {errno.EACCES, errno.EPERM}
WRONG_PATH = {errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP}

_temp_numbers = itertools.count()


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path` that takes its name when the block ends without an error.

    The data are flushed to the disk before the rename and the folder after it, so a file under its final name is always whole.
    The temporary file is removed on any error, Ctrl-C included.

    Raises:
        VitptError: the disk is full or read-only (exit 4), or the folder may not be written (exit 2).
    """
    path = Path(path)
    temp = path.with_name(f".{path.name}{TEMP_MARK}{os.getpid()}-{next(_temp_numbers)}")
    with writing(path):
        try:
            with temp.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temp.replace(path)
        except BaseException:
            with suppress(OSError):
                temp.unlink(missing_ok=True)
            raise
        fsync_folder(path.parent)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the system's refusals to write below or at `path` into one line for the user."""
    try:
        yield
    except OSError as err:
        if err.errno in NO_SPACE:
            raise VitptError(f"{path}: no space left on the disk", exit_code=Exit.ENVIRONMENT) from err
        if err.errno == errno.EROFS:
            raise VitptError(f"{path}: the file system is read-only", exit_code=Exit.ENVIRONMENT) from err
        if err.errno in NO_PERMISSION:
            raise VitptError(f"{path}: no permission to write here", exit_code=Exit.USAGE) from err
        if err.errno in WRONG_PATH:
            raise VitptError(f"{path}: cannot be written ({err.strerror})", exit_code=Exit.USAGE) from err
        raise


@contextmanager
def locked(path: Path, busy: str) -> Iterator[None]:
    """Hold the lock of a file, which is made with its folder, while inside.

    The system lets go of it when the process ends, however it ends; the file stays. Where the file system has no locks, this does
    nothing.

    Args:
        path: the file; it holds the process id and host of the last holder.
        busy: message when another process holds the lock; who it is comes after it.

    Raises:
        VitptError: another process holds it, or the file cannot be written (exit 2 or 4).
    """
    handle = _open_locked(path, busy)
    try:
        with suppress(OSError):  # a full disk: the lock holds all the same
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        os.close(handle)


def _open_locked(path: Path, busy: str) -> int:
    while True:
        make_folder(path.parent)
        with writing(path):
            try:
                handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            except FileNotFoundError:  # the last holder has just removed the folder
                continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(handle, 256, 0).decode(errors="replace") or "another process"
            os.close(handle)
            raise VitptError(f"{busy} ({holder})") from None
        except OSError:
            return handle
        with suppress(OSError):
            if os.path.samestat(os.fstat(handle), path.stat()):
                return handle
        os.close(handle)  # the last holder removed the file between the two calls


def make_folder(path: Path) -> None:
    """Create a folder and its parents; an existing folder is fine.

    Raises:
        VitptError: it cannot be written, or a file is in its way (exit 2); disk full or read-only (exit 4).
    """
    with writing(path):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as err:
            raise VitptError(f"{path}: a file is in the way of this folder") from err
        except OSError as err:
            if err.errno not in (errno.ENOENT, errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP):
                raise
            raise VitptError(f"{path}: this folder cannot be created ({err.strerror})") from err


def write_bytes(path: Path, data: bytes) -> None:
    """Write a whole file atomically."""
    with atomic_write(path) as file:
        file.write(data)


def write_json(path: Path, obj: Any, *, canonical: bool = False) -> None:
    """Write one JSON document atomically: canonical, or indented for people, with a final newline."""
    write_bytes(path, canonical_json(obj) if canonical else encode_json(obj, indent=2) + b"\n")


def canonical_json(obj: Any) -> bytes:
    """JSON with sorted keys and no spaces, in UTF-8: equal objects give equal bytes."""
    return encode_json(obj, sort_keys=True, separators=(",", ":"))


def encode_json(obj: Any, **options: Any) -> bytes:
    """JSON in UTF-8; bytes of file names that are not UTF-8 (lone surrogates) become JSON escapes."""
    # backslashreplace writes a lone surrogate as \udcff, which is just how JSON spells it
    return json.dumps(obj, ensure_ascii=False, allow_nan=False, **options).encode("utf-8", "backslashreplace")


def parse_json(data: bytes) -> Any:
    """The inverse of `encode_json`.

    Raises:
        ValueError: not JSON in UTF-8, or nested too deeply to be ours.
    """
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def sha256_file(path: Path) -> str:
    """Hexadecimal sha256 of a file's bytes."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_bytes(data: bytes) -> str:
    """Hexadecimal sha256 of bytes."""
    return hashlib.sha256(data).hexdigest()


def fsync_folder(path: Path) -> None:
    """Make the names in a folder durable; a file system without this call is left alone."""
    with suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove_temporary_files(folder: Path) -> int:
    """Remove what a killed process left of `atomic_write` in this folder; returns how many files that were."""
    stale = [entry for entry in folder.iterdir() if entry.name.startswith(".") and TEMP_MARK in entry.name]
    for path in stale:
        path.unlink(missing_ok=True)
    return len(stale)


def publish_folder(temporary: Path, final: Path) -> None:
    """Give a finished folder its final name, durably.

    Raises:
        VitptError: somebody else has taken the name meanwhile (exit 2).
    """
    fsync_folder(temporary)
    try:
        temporary.rename(final)
    except OSError as err:
        if err.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise VitptError(f"{final} exists already", hint="give a new name, or remove it first") from None
    fsync_folder(final.parent)


def require_free_space(folder: Path, needed_bytes: int, what: str) -> None:
    """Check before writing that the disk under `folder` (which need not exist yet) has room.

    Raises:
        VitptError: less than `needed_bytes` are free (exit 4).
    """
    existing = Path(folder).absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        raise VitptError(
            f"{folder}: {what} needs {size_text(needed_bytes)}, but only {size_text(free)} are free on this disk",
            exit_code=Exit.ENVIRONMENT,
        )


def size_text(num_bytes: float) -> str:
    """A number of bytes for people: 1.5 GB (powers of 1000)."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """The choice most like `name`, or None when nothing is near."""
    found = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.5)
    return found[0] if found else None


def missing_path(path: Path, what: str) -> VitptError:
    """The error for a path that does not exist: names the first missing part and the nearest name beside it."""
    path = Path(path)
    missing = path.absolute()
    while not missing.parent.exists():
        missing = missing.parent
    with suppress(OSError):
        near = nearest(missing.name, (entry.name for entry in missing.parent.iterdir()))
        if near is not None:
            # shown the way the user wrote it: relative stays relative
            start = path
            for _ in range(len(path.absolute().parts) - len(missing.parts)):
                start = start.parent
            return VitptError(f"{path}: no such {what}", hint=f"did you mean {start.parent / near}?")
    return VitptError(f"{path}: no such {what}")


def shipped(kind: Literal["recipes", "shards"]) -> Path:
    """Folder of the recipes or bundled shards that come with vitpt: in the package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "_shipped" / kind
    return inside if inside.is_dir() else package.parent / kind
