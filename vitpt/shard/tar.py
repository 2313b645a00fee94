"""The bytes of a shard: plain USTAR members, and DALI's index of them.

Nothing in a header depends on the machine, the user or the time, so equal samples give equal files.
"""

import tarfile

import numpy as np

BLOCK = 512
RECORD = 10_240
END = bytes(2 * BLOCK)


def padded(size: int) -> int:
    """Size rounded up to whole blocks."""
    return -(-size // BLOCK) * BLOCK


def member(name: str, data: bytes) -> bytes:
    """Header, data and padding of one tar member."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    info.mode = 0o644
    # mtime, uid, gid are 0 and the owner's names empty by default
    return info.tobuf(tarfile.USTAR_FORMAT) + data + bytes(padded(len(data)) - len(data))


def sample(key: str, label: int, extension: str, payload: bytes) -> bytes:
    """The members of one sample: the label first (absent for -1), then the image."""
    image = member(f"{key}.{extension}", payload)
    return image if label < 0 else member(f"{key}.cls", str(label).encode()) + image


def ending(size: int) -> bytes:
    """Two zero blocks, then zeros up to a multiple of 10,240 bytes, for a tar that has `size` bytes so far."""
    return bytes(-(size + len(END)) % RECORD) + END


def layout(labels: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, int]:
    """(uint64 offsets of the images (n,), bytes of the whole tar) of one shard with these samples, in order.

    Shapes: labels (n,) int32, lengths (n,) uint32.
    """
    before = np.where(labels >= 0, 3 * BLOCK, BLOCK).astype(np.int64)  # cls header, cls data, image header
    after = -(-lengths.astype(np.int64) // BLOCK) * BLOCK
    ends = np.cumsum(before + after)
    size = int(ends[-1])
    return (ends - after).astype(np.uint64), size + len(ending(size))


def dali_index(
    keys: list[str], labels: np.ndarray, extensions: list[str], lengths: np.ndarray, offsets: np.ndarray
) -> bytes:
    """DALI's index, version 1.2: per sample a line of `<extension> <offset of the data> <size> <name>` for each member."""
    lines = [f"v1.2 {len(keys)}"]
    rows = zip(keys, labels.tolist(), extensions, lengths.tolist(), offsets.tolist(), strict=True)
    for key, label, extension, length, offset in rows:
        fields = f"{extension} {offset} {length} {key}.{extension}"
        if label >= 0:
            fields = f"cls {offset - 2 * BLOCK} {len(str(label))} {key}.cls {fields}"
        lines.append(fields)
    return ("\n".join(lines) + "\n").encode()
