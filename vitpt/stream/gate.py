"""What may enter a decoder. Every payload's header is parsed first: a bad header or window can end the process inside one.

nvImageCodec's parser is the one that DALI uses, so what it accepts is safe for both; without it Pillow reads the header.
Formats whose meaning decoders see differently (CMYK, palettes, alpha, 16 bit) or that some do not know are converted on the CPU.
"""

import importlib
import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vitpt.image import MAX_PIXELS, PNG_SIGNATURE, ImageError, read_header, to_rgb

UInt8 = npt.NDArray[np.uint8]
Payload = bytes | memoryview

JPEG_START = b"\xff\xd8\xff"


class BadImageError(Exception):
    """A payload that cannot be shown to a decoder, or that a decoder could not read."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Admitted:
    """A payload that passed.

    Attributes:
        stream: nvImageCodec's CodeStream over the payload; None without nvImageCodec or when converted.
        pixels: (H, W, 3) uint8 as stored, when the payload had to be converted; else None.
    """

    stream: Any
    pixels: UInt8 | None


class Decoded(NamedTuple):
    """What came of a group of payloads.

    Attributes:
        bad: (row, reason) of each that could not be decoded.
        converted: how many had to be converted from an unusual format.
    """

    bad: list[tuple[int, str]]
    converted: int


def nvimgcodec() -> Any:
    """The nvImageCodec module, or None where it is not installed (it has no build for macOS)."""
    # It prints coloured lines for every bad image; each is reported as a bad sample anyway. Read when it is first imported.
    os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")
    try:
        module: Any = importlib.import_module("nvidia.nvimgcodec")
    except ImportError:
        return None
    return module if hasattr(module, "CodeStream") else None  # on macOS the package may be an empty placeholder


def admit(payload: Payload, width: int, height: int, codec: Any) -> Admitted:
    """Check a payload against the size that the index says; convert it where decoders may disagree on it.

    Args:
        payload: the image file. Must stay unchanged while the result is in use.
        width: stored width by the index, pixels.
        height: stored height by the index, pixels.
        codec: what `nvimgcodec()` returned.

    Raises:
        BadImageError: with the reason.
    """
    head = bytes(memoryview(payload)[:32])
    if not _plain(payload, head):
        return Admitted(None, _converted(payload, width, height))
    if codec is None:
        return _admit_by_pillow(payload, width, height)
    try:
        stream = codec.CodeStream(payload)
        found = (int(stream.width), int(stream.height))
        channels, eight_bit = int(stream.num_channels), np.dtype(stream.dtype) == np.uint8
    except (RuntimeError, TypeError, ValueError) as err:
        raise BadImageError("damaged or unsupported header") from err
    _check_size(found, width, height)
    if channels not in (1, 3) or not eight_bit:
        return Admitted(None, _converted(payload, width, height))
    return Admitted(stream, None)


def as_ppm(pixels: UInt8) -> UInt8:
    """Pixels as the simplest lossless file that decoders know: (H, W, 3) uint8 -> bytes as (n,) uint8."""
    header = f"P6\n{pixels.shape[1]} {pixels.shape[0]}\n255\n".encode()
    return np.concatenate([np.frombuffer(header, np.uint8), pixels.reshape(-1)])


def _plain(payload: Payload, head: bytes) -> bool:
    """Whether every decoder sees the same pixels, as far as the first bytes tell."""
    if head.startswith(JPEG_START):
        return True
    if head.startswith(PNG_SIGNATURE):  # 8-bit grey or RGB without a transparent colour
        start = bytes(memoryview(payload)[:65536])
        return head[24:26] in (b"\x08\x00", b"\x08\x02") and b"tRNS" not in start.split(b"IDAT")[0]
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":  # bit 1 of the extended header: animated
        return not (head[12:16] == b"VP8X" and len(head) > 20 and head[20] & 2)
    return False


def _admit_by_pillow(payload: Payload, width: int, height: int) -> Admitted:
    try:
        header = read_header(bytes(payload))
    except ImageError as err:
        raise BadImageError(err.reason) from err
    _check_size((header.width, header.height), width, height)
    if header.mode not in ("RGB", "L"):
        return Admitted(None, _converted(payload, width, height))
    return Admitted(None, None)


def _converted(payload: Payload, width: int, height: int) -> UInt8:
    """The pixels as stored. The size is checked before they are decoded."""
    data = bytes(payload)
    try:
        header = read_header(data)
        _check_size((header.width, header.height), width, height)
        pixels: UInt8 = to_rgb(data, apply_orientation=False)
    except ImageError as err:
        raise BadImageError(err.reason) from err
    _check_size((pixels.shape[1], pixels.shape[0]), width, height)
    return pixels


def _check_size(found: tuple[int, int], width: int, height: int) -> None:
    if found != (width, height):
        raise BadImageError(f"header says {found[0]}x{found[1]}, the index {width}x{height}")
    if not 1 <= width * height <= MAX_PIXELS:
        raise BadImageError(f"{width}x{height}: more than {MAX_PIXELS:,} pixels or none")
