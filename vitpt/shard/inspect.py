"""Is this file fit for a shard? Keep its bytes, repair it, or reject it.

An image whose bytes are kept is one on which every decoder agrees: 8-bit grey or RGB, upright, one frame, whole. Anything else that
can be read is converted to 8-bit RGB and encoded again, and every such file is listed.
"""

import io
import struct
from typing import Literal, NamedTuple

import simplejpeg
from PIL import Image

from vitpt.image import Header, ImageError, png_chunks, read_header, to_rgb, turned_size

JPEG_QUALITY = 95
JPEG_MAX_SIDE = 65_500
HUFFMAN_SOF = (0xC0, 0xC1, 0xC2)  # baseline, extended and progressive, Huffman-coded
STANDALONE_MARKERS = (0x01, *range(0xD0, 0xD9))
CATEGORIES = {
    "exif_orientation": "turned upright",
    "cmyk": "CMYK to RGB",
    "jpeg_rgb": "stored without the YCbCr transform",
    "jpeg_coding": "arithmetic, lossless or without Huffman tables",
    "jpeg_sampling": "unusual chroma subsampling",
    "16_bit": "16 bits a channel to 8",
    "bit_depth": "1, 2 or 4 bits a pixel to 8",
    "palette": "palette to RGB",
    "alpha": "transparency on white",
    "animation": "first frame taken",
    "format": "a format that not every decoder reads",
}


class Outcome(NamedTuple):
    """What becomes of one file.

    Attributes:
        action: "keep", "repair" or "reject".
        category: why it is not kept as it is; empty for "keep".
        detail: more about it, one line.
        extension: of the payload in the shard: "jpg", "png" or "webp"; empty for "reject".
        width: pixels of the payload in the shard, upright.
        height: likewise.
    """

    action: Literal["keep", "repair", "reject"]
    category: str
    detail: str
    extension: str
    width: int
    height: int


class JpegFrame(NamedTuple):
    """What the markers before the first scan of a JPEG say."""

    sof: int  # marker of the frame header
    component_ids: bytes
    jfif: bool
    adobe_transform: int | None
    huffman_tables: bool


def inspect(payload: bytes) -> tuple[Outcome, bytes]:
    """Check a file's bytes by decoding all of it; returns the outcome and the payload for the shard (empty when rejected)."""
    try:
        header = read_header(payload)
        reasons = _repairs(payload, header)
        if not reasons:
            width, height = header.width, header.height
            return Outcome("keep", "", "", "jpg" if header.format == "jpeg" else header.format, width, height), payload
        extension, data = _encode(payload, header)
    except ImageError as err:
        return Outcome("reject", err.category, err.reason, "", 0, 0), b""
    width, height = turned_size(header.width, header.height, header.orientation)
    detail = ", ".join(
        f"{CATEGORIES[reason]} ({header.format})" if reason == "format" else CATEGORIES[reason] for reason in reasons
    )
    return Outcome("repair", reasons[0], f"{detail}; encoded again as {extension}", extension, width, height), data


def _repairs(payload: bytes, header: Header) -> list[str]:
    """Categories of what must be repaired; decodes the file strictly when nothing must be."""
    reasons = ["exif_orientation"] if header.orientation != 1 else []
    if header.format == "jpeg":
        return reasons + _jpeg_repairs(payload, header)
    if header.format == "png":
        reasons += _png_repairs(payload, header)
    elif header.format == "webp":
        reasons += (["animation"] if header.animated else []) + (["alpha"] if header.mode != "RGB" else [])
    else:
        reasons.append("format")
    if not reasons:
        to_rgb(payload)
    return reasons


def _jpeg_repairs(payload: bytes, header: Header) -> list[str]:
    frame = jpeg_frame(payload)
    reasons = []
    if len(frame.component_ids) == 4:
        reasons.append("cmyk")
    elif _stores_rgb(frame):
        reasons.append("jpeg_rgb")
    if frame.sof not in HUFFMAN_SOF or not frame.huffman_tables:
        reasons.append("jpeg_coding")
    try:
        # the strictest of the decoders: what the others pass with a warning (a damaged scan, a false height) is an error here
        simplejpeg.decode_jpeg(payload, colorspace={1: "GRAY", 4: "CMYK"}.get(len(frame.component_ids), "RGB"))
    except ValueError as err:
        if "subsampling" not in str(err):
            raise ImageError(" ".join(str(err).split())) from err
        reasons.append("jpeg_sampling")
    return reasons


def _stores_rgb(frame: JpegFrame) -> bool:
    """Whether the samples are RGB: without a JFIF marker the Adobe marker, or else the component ids, may say so."""
    if len(frame.component_ids) != 3 or frame.jfif:
        return False
    return frame.adobe_transform == 0 or (frame.adobe_transform is None and frame.component_ids == b"RGB")


def jpeg_frame(payload: bytes) -> JpegFrame:
    """Walk the markers of a JPEG up to its first scan.

    Raises:
        ImageError: no frame header before the first scan.
    """
    sof, ids, jfif, adobe, tables = 0, b"", False, None, False
    position = 2
    try:
        while True:
            if payload[position] != 0xFF:
                raise ImageError("damaged markers")
            marker = payload[position + 1]
            position += 1 if marker == 0xFF else 2  # fill bytes
            if marker == 0xFF or marker in STANDALONE_MARKERS:
                continue
            if marker in (0xDA, 0xD9):
                break
            (length,) = struct.unpack_from(">H", payload, position)
            body = payload[position + 2 : position + length]
            if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
                sof, ids = marker, body[6::3][: body[5]]
            elif marker == 0xC4:
                tables = True
            elif marker == 0xE0 and body.startswith(b"JFIF\0"):
                jfif = True
            elif marker == 0xEE and body.startswith(b"Adobe") and len(body) >= 12:
                adobe = body[11]
            position += length
    except (IndexError, struct.error) as err:
        raise ImageError("cut off before the picture begins") from err
    if not sof:
        raise ImageError("no frame header")
    return JpegFrame(sof, ids, jfif, adobe, tables)


def _png_repairs(payload: bytes, header: Header) -> list[str]:
    depth, colour = payload[24], payload[25]
    reasons = []
    if depth == 16:
        reasons.append("16_bit")
    if colour == 3:
        reasons.append("palette")
    elif depth < 8:
        reasons.append("bit_depth")
    if colour in (4, 6) or any(kind == b"tRNS" for kind, _, _ in png_chunks(payload)):
        reasons.append("alpha")
    if header.animated:
        reasons.append("animation")
    return reasons


def _encode(payload: bytes, header: Header) -> tuple[str, bytes]:
    """(extension, bytes) of the repaired image: lossy sources as JPEG, lossless ones as PNG."""
    pixels = to_rgb(payload)
    lossy = header.format in ("jpeg", "avif") or (header.format == "webp" and b"VP8L" not in payload[:64])
    out = io.BytesIO()
    image = Image.fromarray(pixels)
    if lossy and max(image.size) <= JPEG_MAX_SIDE:
        image.save(out, "JPEG", quality=JPEG_QUALITY, subsampling=0)  # 4:4:4: nothing more is lost in colour
        return "jpg", out.getvalue()
    image.save(out, "PNG")
    return "png", out.getvalue()
