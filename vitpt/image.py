"""What an image file says about itself, and its pixels as 8-bit RGB.

Used at rest (every file is checked before it goes into a shard) and in flight (formats that a fast decoder does not take).
"""

import io
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image, UnidentifiedImageError

MAX_PIXELS = 2**27  # 134 million: 400 MB as RGB; larger headers are refused before memory is taken
ORIENTATION_TAG = 0x0112
# Only formats with a strict signature and a decoder inside Pillow: no EPS (starts Ghostscript), no PSD, no TGA.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colour type
# Adam7: first column, first row, column step, row step of the seven passes
PNG_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
PNG_MAX_METADATA = 16 << 20
INFLATE_STEP = 1 << 20

# Pillow warns above this and raises above twice this: within MAX_PIXELS neither happens.
Image.MAX_IMAGE_PIXELS = MAX_PIXELS


class ImageError(Exception):
    """A payload that is not a usable image.

    Args:
        reason: one line for a person.
        category: `not_an_image`, `too_large` or `damaged` or `unsupported`.
    """

    def __init__(self, reason: str, category: str = "damaged") -> None:
        super().__init__(reason)
        self.reason = reason
        self.category = category


@dataclass(frozen=True)
class Header:
    """What the header of an image file says.

    Attributes:
        format: lower-case name of the codec ("jpeg", "png", "webp", "gif", "bmp", "tiff", ...).
        width: stored columns, pixels, before any turn.
        height: stored rows, pixels, before any turn.
        orientation: EXIF orientation 1..8; 1 where it is absent or invalid.
        mode: Pillow's mode of the pixels ("RGB", "L", "CMYK", "P", "I;16", ...).
        animated: more than one frame (the further images of a camera's MPO file do not count).
    """

    format: str
    width: int
    height: int
    orientation: int
    mode: str
    animated: bool


def read_header(payload: bytes) -> Header:
    """Read format, size and orientation without decoding pixels.

    Raises:
        ImageError: not an image, damaged header, or more than MAX_PIXELS pixels.
    """
    with _open(payload) as image:
        return _header(image, payload)


def to_rgb(payload: bytes, *, apply_orientation: bool = True) -> np.ndarray:
    """Decode to 8-bit RGB, strictly: a payload with missing or damaged data is an error.

    CMYK and YCCK are converted, 16-bit values shifted right by 8, palettes applied, alpha composited on white; the first frame
    of an animation is taken.

    Returns:
        (H, W, 3) uint8, upright if `apply_orientation`, else as stored.

    Raises:
        ImageError: as `read_header`, or damaged pixels, or values without a defined 8-bit meaning (float).
    """
    with _open(payload) as image:
        header = _header(image, payload)
        if header.format == "png":
            check_png(payload)
        try:
            pixels = _rgb_pixels(image)
        except (ImageError, MemoryError):
            raise
        except (
            Exception
        ) as err:  # Pillow raises many types on bad data: OSError, ValueError, SyntaxError, struct.error, ...
            raise ImageError(_one_line(err)) from err
    if header.format == "tiff":  # Pillow has already turned it
        return pixels if apply_orientation else turn(pixels, {6: 8, 8: 6}.get(header.orientation, header.orientation))
    return turn(pixels, header.orientation) if apply_orientation else pixels


def turned_size(width: int, height: int, orientation: int) -> tuple[int, int]:
    """(width, height) after the turn that an EXIF orientation asks for."""
    return (height, width) if orientation >= 5 else (width, height)


def turn(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Make stored pixels (H, W, C) upright by their EXIF orientation."""
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    # after the transposition: 5 is done, 6 wants its columns reversed, 7 both, 8 its rows
    rows = orientation in (3, 4, 7, 8)
    columns = orientation in (2, 3, 6, 7)
    return np.ascontiguousarray(pixels[:: -1 if rows else 1, :: -1 if columns else 1])


def check_png(payload: bytes) -> None:
    """Check what Pillow lets pass: every chunk's checksum, the end chunk, and that the data hold all rows.

    Raises:
        ImageError: the first thing that is wrong.
    """
    inflate = zlib.decompressobj()
    needed, seen, ended = -1, 0, False
    for kind, data, crc in png_chunks(payload):
        if zlib.crc32(data, zlib.crc32(kind)) != crc:
            raise ImageError(f"wrong checksum of the {kind.decode('latin-1')} chunk")
        if kind == b"IHDR":
            needed = _png_raw_bytes(data)
        elif kind == b"IDAT":
            seen += _inflated_bytes(inflate, data)
            if seen > needed:
                raise ImageError("more pixel data than the header says")
        elif kind in (b"zTXt", b"iTXt", b"iCCP") and _inflates_beyond(data, PNG_MAX_METADATA):
            raise ImageError(f"the {kind.decode()} chunk unpacks to more than {PNG_MAX_METADATA >> 20} MB")
        elif kind == b"IEND":
            ended = True
            break
    if not ended:
        raise ImageError("cut off: no end chunk")
    if seen < needed or not inflate.eof:
        raise ImageError(f"cut off: {seen} of {needed} bytes of pixel data")


def png_chunks(payload: bytes) -> Iterator[tuple[bytes, bytes, int]]:
    """(type, data, checksum) of every whole chunk of a PNG, in order; stops where the file is cut."""
    position = len(PNG_SIGNATURE)
    while position + 12 <= len(payload):
        length, kind = struct.unpack_from(">I4s", payload, position)
        end = position + 8 + length
        if end + 4 > len(payload):
            return
        yield kind, payload[position + 8 : end], struct.unpack_from(">I", payload, end)[0]
        position = end + 4


def _open(payload: bytes) -> Image.Image:
    if not payload:
        raise ImageError("empty file", "not_an_image")
    try:
        return Image.open(io.BytesIO(payload), formats=FORMATS)
    except Image.DecompressionBombError as err:
        raise ImageError(f"the header claims more than {MAX_PIXELS:,} pixels", "too_large") from err
    except UnidentifiedImageError as err:
        known = payload.startswith((b"\xff\xd8\xff", PNG_SIGNATURE, b"GIF8", b"BM", b"II*\0", b"MM\0*"))
        if known or (payload[:4] == b"RIFF" and payload[8:12] == b"WEBP"):
            raise ImageError("damaged or unsupported header") from err
        raise ImageError("not an image", "not_an_image") from err
    except MemoryError:
        raise
    except Exception as err:  # see to_rgb
        raise ImageError(_one_line(err)) from err


def _header(image: Image.Image, payload: bytes) -> Header:
    name = str(image.format)
    width, height = image.size
    try:
        orientation = _orientation(image, payload)
        animated = name != "MPO" and bool(getattr(image, "is_animated", False))
    except MemoryError:
        raise
    except Exception as err:  # see to_rgb
        raise ImageError(_one_line(err)) from err
    if width < 1 or height < 1:
        raise ImageError(f"size {width} x {height}")
    if width * height > MAX_PIXELS:
        raise ImageError(f"{width} x {height}: more than {MAX_PIXELS:,} pixels", "too_large")
    if name == "TIFF":  # Pillow reports the upright size
        width, height = turned_size(width, height, orientation)
    return Header("jpeg" if name == "MPO" else name.lower(), width, height, orientation, image.mode, animated)


def _orientation(image: Image.Image, payload: bytes) -> int:
    if image.format == "TIFF":
        value = image.getexif().get(ORIENTATION_TAG)
    else:
        exif = image.info.get("exif")
        if image.format == "PNG":  # it may stand behind the pixels, where Pillow sees it only after decoding
            exif = next((data for kind, data, _ in png_chunks(payload) if kind == b"eXIf"), None)
        if not exif:
            return 1
        value = _exif_orientation(exif)
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _exif_orientation(exif: bytes) -> object:
    tags = Image.Exif()
    try:
        tags.load(exif)
        return tags.get(ORIENTATION_TAG)
    except Exception:  # an unreadable metadata block says nothing; the pixels are not touched by it
        return None


def _rgb_pixels(image: Image.Image) -> np.ndarray:
    image.load()
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
        grey = (np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    if image.mode in ("I", "F"):
        raise ImageError(
            f"pixels of type {'float' if image.mode == 'F' else '32-bit integer'} have no 8-bit meaning", "unsupported"
        )
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return np.array(Image.alpha_composite(white, image.convert("RGBA")).convert("RGB"))
    return np.array(image.convert("RGB"))


def _png_raw_bytes(ihdr: bytes) -> int:
    """Bytes of the unpacked pixel data, one filter byte a row."""
    width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", ihdr)
    bits = PNG_CHANNELS[colour] * depth
    passes = PNG_PASSES if interlaced else ((0, 0, 1, 1),)
    total = 0
    for column, row, column_step, row_step in passes:
        columns = -(-(width - column) // column_step)
        rows = -(-(height - row) // row_step)
        if columns > 0 and rows > 0:
            total += rows * (1 + (columns * bits + 7) // 8)
    return total


def _inflated_bytes(inflate: "zlib._Decompress", data: bytes) -> int:
    """How many bytes this piece unpacks to, in steps of bounded memory."""
    total = 0
    try:
        while data:
            total += len(inflate.decompress(data, INFLATE_STEP))
            data = inflate.unconsumed_tail
    except zlib.error as err:
        raise ImageError(f"damaged pixel data ({_one_line(err)})") from err
    return total


def _inflates_beyond(data: bytes, limit: int) -> bool:
    """Whether the compressed part of a metadata chunk unpacks to more than `limit` bytes."""
    start = data.find(b"\x78")  # first byte of a zlib stream
    if start < 0:
        return False
    try:
        return len(zlib.decompressobj().decompress(data[start:], limit + 1)) > limit
    except zlib.error:
        return False


def _one_line(err: Exception) -> str:
    text = " ".join(str(err).split())
    return text or type(err).__name__
