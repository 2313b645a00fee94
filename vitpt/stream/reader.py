"""memoryviews of samples: positional reads at the index's offsets into buffers that are used again."""

import errno
import os
import threading
import zlib
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from vitpt.dataset import Split

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

Int64 = npt.NDArray[np.int64]
CrcPolicy = Literal["first", "always", "never"]

# Out of files or memory is the machine's trouble, not the sample's.
_FATAL = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class Arena:
    """Memory for one group of payloads; grows to the largest group and is then used again."""

    def __init__(self) -> None:
        self._memory = np.empty(0, dtype=np.uint8)

    def take(self, lengths: Sequence[int]) -> list[memoryview]:
        """Buffers of these lengths, in bytes. What an earlier call returned is overwritten."""
        total = sum(lengths)
        if total > len(self._memory):
            self._memory = np.empty(total + total // 4, dtype=np.uint8)
        ends = np.cumsum(lengths)
        return [self._memory[end - length : end].data for end, length in zip(ends, lengths, strict=True)]


class Reader:
    """Reads payloads of one split. May be used by several threads at once.

    Args:
        split: where the samples lie.
        crc: `first` checks the crc32 of samples that were not dealt before, `always` of all, `never` of none.
    """

    def __init__(self, split: Split, crc: CrcPolicy) -> None:
        self._split = split
        self._crc = crc
        self._lock = threading.Lock()
        self._files: dict[int, int] = {}  # shard -> file descriptor
        self._most_files = _descriptor_budget()
        self._closed = False

    def read(self, rows: Int64, visits: Int64, arena: Arena) -> list[memoryview | str | None]:
        """The payloads of rows, valid until the arena is used again.

        Shapes: rows (n,), -1 for an empty slot; visits (n,).

        Returns:
            For each row the bytes, or why there are none (a string), or None for an empty slot.

        Raises:
            OSError: the process is out of file descriptors or memory.
        """
        filled = rows >= 0
        safe = np.where(filled, rows, 0)
        split = self._split
        shards, offsets, lengths, sums = (
            column[safe].tolist() for column in (split.shard, split.offset, split.length, split.crc32)
        )
        check = filled & (visits == 0) if self._crc == "first" else filled & (self._crc == "always")
        buffers = arena.take([length if there else 0 for length, there in zip(lengths, filled, strict=True)])
        out: list[memoryview | str | None] = []
        for i, buffer in enumerate(buffers):
            reason = self._fill(shards[i], offsets[i], buffer) if filled[i] else None
            if reason is None and check[i] and zlib.crc32(buffer) != sums[i]:
                reason = "crc32 differs from the index"
            out.append(None if not filled[i] else buffer if reason is None else reason)
        return out

    def close(self) -> None:
        """Close all files. No read may be going on."""
        with self._lock:
            self._closed = True
            for file in self._files.values():
                os.close(file)
            self._files.clear()

    def _fill(self, shard: int, offset: int, buffer: memoryview) -> str | None:
        """Read one payload; returns why it could not be read."""
        try:
            file, kept = self._open(shard)
            try:
                done = 0
                while done < len(buffer):
                    count = _read_into(file, buffer[done:], offset + done)
                    if count == 0:
                        return f"short read: {done} of {len(buffer)} bytes"
                    done += count
            finally:
                if not kept:
                    os.close(file)
        except OSError as err:
            if err.errno in _FATAL:
                raise
            return f"cannot be read: {err.strerror}"
        return None

    def _open(self, shard: int) -> tuple[int, bool]:
        """A descriptor of the shard, and whether it is kept. Beyond the budget files are opened for one read."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the reader is closed")
            file = self._files.get(shard)
            if file is None:
                file = os.open(self._split.shard_path(shard), os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
                if len(self._files) >= self._most_files:
                    return file, False
                self._files[shard] = file
        return file, True


def _read_into(file: int, buffer: memoryview, offset: int) -> int:
    """Read at an offset; returns the number of bytes."""
    if hasattr(os, "preadv"):
        return os.preadv(file, [buffer], offset)
    data = os.pread(file, len(buffer), offset)
    buffer[: len(data)] = data
    return len(data)


def _descriptor_budget() -> int:
    """How many shards are kept open: half of the descriptors that the process may have."""
    if resource is None:
        return 256
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 65536 if soft == resource.RLIM_INFINITY else max(16, min(65536, soft // 2))
