"""What is kept, repaired and rejected."""

import io
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from images import encode, exif, quadrants, texture
from PIL import Image

from vitpt.image import read_header, to_rgb
from vitpt.shard.check import check_file
from vitpt.shard.inspect import Outcome, inspect, jpeg_frame

RGB = quadrants()
IMAGE = Image.fromarray(RGB)
CORNERS = Path(__file__).parents[3] / "shared" / "data" / "corner_images"
JPEG = encode(texture(5, 96, 64), "JPEG")


def animation(kind: str) -> bytes:
    return encode(IMAGE, kind, save_all=True, append_images=[Image.fromarray(texture(1))])


KEPT: dict[str, tuple[bytes, str]] = {
    "baseline": (encode(RGB, "JPEG"), "jpg"),
    "4:4:4": (encode(RGB, "JPEG", subsampling=0), "jpg"),
    "progressive": (encode(RGB, "JPEG", progressive=True), "jpg"),
    "grey jpeg": (encode(IMAGE.convert("L"), "JPEG"), "jpg"),
    "exif without a turn": (encode(RGB, "JPEG", exif=exif(1)), "jpg"),
    "bytes after the end": (encode(RGB, "JPEG") + bytes(4096), "jpg"),
    "rgb png": (encode(RGB, "PNG"), "png"),
    "grey png": (encode(IMAGE.convert("L"), "PNG"), "png"),
    "webp": (encode(RGB, "WEBP"), "webp"),
    "one pixel": (encode(RGB[:1, :1], "JPEG"), "jpg"),
}

REPAIRED: dict[str, tuple[bytes, str, str]] = {
    **{f"orientation {o}": (encode(RGB, "JPEG", exif=exif(o)), "exif_orientation", "jpg") for o in range(2, 9)},
    "turned png": (encode(RGB, "PNG", exif=exif(6)), "exif_orientation", "png"),
    "cmyk jpeg": (encode(IMAGE.convert("CMYK"), "JPEG"), "cmyk", "jpg"),
    "16-bit grey": (
        encode(Image.fromarray(np.arange(1024, dtype=np.uint16).reshape(32, 32) * 64), "PNG"),
        "16_bit",
        "png",
    ),
    "palette": (encode(IMAGE.quantize(4), "PNG"), "palette", "png"),
    "one bit": (encode(IMAGE.convert("1"), "PNG"), "bit_depth", "png"),
    "rgba png": (encode(IMAGE.convert("RGBA"), "PNG"), "alpha", "png"),
    "grey and alpha": (encode(IMAGE.convert("LA"), "PNG"), "alpha", "png"),
    "colour key": (encode(RGB, "PNG", transparency=(1, 2, 3)), "alpha", "png"),
    "rgba webp": (encode(np.dstack([RGB, RGB[:, :, 0]]), "WEBP", lossless=True), "alpha", "png"),
    "animated webp": (animation("WEBP"), "animation", "jpg"),
    "animated png": (animation("PNG"), "animation", "png"),
    "gif": (encode(RGB, "GIF"), "format", "png"),
    "animated gif": (animation("GIF"), "format", "png"),
    "bmp": (encode(RGB, "BMP"), "format", "png"),
    "tiff": (encode(RGB, "TIFF"), "format", "png"),
    "ppm": (encode(RGB, "PPM"), "format", "png"),
}


def without_segment(payload: bytes, marker: int) -> bytes:
    """Cut every segment with this marker out of a JPEG."""
    out, position = payload[:2], 2
    while payload[position + 1] != 0xDA:
        (length,) = struct.unpack_from(">H", payload, position + 2)
        segment = payload[position : position + 2 + length]
        out += b"" if segment[1] == marker else segment
        position += 2 + length
    return out + payload[position:]


def sof_changed(payload: bytes, height: int, width: int) -> bytes:
    position = payload.index(b"\xff\xc0") + 5
    return payload[:position] + struct.pack(">HH", height, width) + payload[position + 4 :]


def scan_damaged(payload: bytes) -> bytes:
    start = payload.index(b"\xff\xda") + 60
    return payload[:start] + bytes(120) + payload[start + 120 :]


REJECTED: dict[str, tuple[bytes, str]] = {
    "no bytes": (b"", "not_an_image"),
    "zeros": (bytes(4096), "not_an_image"),
    "text": (b"just words\n", "not_an_image"),
    "noise before the picture": (b"0123456789abcdef" + JPEG, "not_an_image"),
    "jpeg cut in the header": (JPEG[:180], "damaged"),
    "jpeg cut in the scan": (JPEG[: len(JPEG) * 9 // 10], "damaged"),
    "jpeg without its last byte": (JPEG[:-1], "damaged"),
    "jpeg taller than its data": (sof_changed(JPEG, 640, 96), "damaged"),
    "jpeg with a height of 0": (sof_changed(JPEG, 0, 96), "damaged"),
    "jpeg with a damaged scan": (scan_damaged(JPEG), "damaged"),
    "jpeg without quantisation": (without_segment(JPEG, 0xDB), "damaged"),
    "huge jpeg": (sof_changed(JPEG, 65_500, 65_500), "too_large"),
    "markers only": (b"\xff\xd8\xff\xd9", "damaged"),
    "png cut": (encode(texture(2), "PNG")[:-200], "damaged"),
    "png without its end": (encode(texture(2), "PNG")[:-12], "damaged"),
    "webp cut": (encode(texture(2), "WEBP")[:200], "damaged"),
    "float tiff": (encode(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF"), "unsupported"),
}


@pytest.mark.parametrize("case", KEPT)
def test_kept(case: str) -> None:
    payload, extension = KEPT[case]
    header = read_header(payload)
    assert inspect(payload) == (Outcome("keep", "", "", extension, header.width, header.height), payload)


@pytest.mark.parametrize("case", REPAIRED)
def test_repaired(case: str) -> None:
    payload, category, extension = REPAIRED[case]
    outcome, repaired = inspect(payload)
    assert (outcome.action, outcome.category, outcome.extension) == ("repair", category, extension)
    assert outcome.detail
    # what comes out is what went in, and needs no second repair
    wanted, found = to_rgb(payload), to_rgb(repaired)
    assert (outcome.height, outcome.width) == wanted.shape[:2] == found.shape[:2]
    assert np.abs(wanted.astype(int) - found).max() <= (0 if extension == "png" else 24)
    assert np.abs(wanted.astype(int) - found).mean() <= (0 if extension == "png" else 2)
    again, same = inspect(repaired)
    assert (again.action, again.extension, same) == ("keep", extension, repaired)
    with Image.open(io.BytesIO(repaired)) as image:
        assert image.mode == "RGB"
        assert not image.getexif()


def test_repaired_jpeg_keeps_full_colour() -> None:
    _, repaired = inspect(encode(RGB, "JPEG", exif=exif(3)))
    frame = repaired.index(b"\xff\xc0")
    assert repaired[frame + 11] == 0x11  # luma sampled 1x1: 4:4:4


@pytest.mark.parametrize("case", REJECTED)
def test_rejected(case: str) -> None:
    payload, category = REJECTED[case]
    outcome, data = inspect(payload)
    assert (outcome.action, outcome.category, outcome.extension, data) == ("reject", category, "", b"")
    assert outcome.detail
    assert "\n" not in outcome.detail


def test_jpeg_without_huffman_tables_or_with_rgb_is_encoded_again() -> None:
    outcome, repaired = inspect(without_segment(JPEG, 0xC4))  # libjpeg supplies the usual tables
    assert (outcome.action, outcome.category) == ("repair", "jpeg_coding")
    assert np.abs(to_rgb(repaired).astype(int) - to_rgb(JPEG)).max() < 40
    rgb = encode(RGB, "JPEG", keep_rgb=True)
    outcome, repaired = inspect(rgb)
    assert (outcome.action, outcome.category) == ("repair", "jpeg_rgb")
    assert np.abs(to_rgb(repaired).astype(int) - RGB).max() < 40


def test_jpeg_frame() -> None:
    frame = jpeg_frame(encode(RGB, "JPEG", progressive=True))
    assert (frame.sof, frame.component_ids, frame.jfif, frame.huffman_tables) == (0xC2, b"\x01\x02\x03", True, True)
    filled = JPEG[:2] + b"\xff\xff" + JPEG[2:]  # fill bytes before a marker are legal
    assert jpeg_frame(filled) == jpeg_frame(JPEG)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert check_file(tmp_path / "absent.jpg", -1)[0].detail == "missing, or a broken link"
    assert check_file(tmp_path, -1)[0].detail == "not a regular file"
    assert check_file(tmp_path / "gone.jpg", 5)[0].category == "unreadable"
    assert check_file(tmp_path / "huge.tiff", 1 << 40)[0].category == "too_large"


def pixels_of(case: dict[str, Any], payload: bytes) -> list[str]:
    pixels = to_rgb(payload)
    wrong = ["size"] if case.get("size") and list(pixels.shape[1::-1]) != case["size"] else []
    for x, y, colour in case.get("probes") or []:
        if np.abs(pixels[y, x].astype(int) - colour).max() > case["tol"]:
            wrong.append(f"pixel {x},{y}")
    return wrong


@pytest.mark.skipif(not CORNERS.is_dir(), reason="the collection of corner images is not beside this checkout")
def test_corner_images() -> None:
    wrong: list[str] = []
    for case in json.loads(CORNERS.with_suffix(".json").read_text()):
        outcome, payload = inspect((CORNERS / case["file"]).read_bytes())
        wanted = {case["expect"], *case.get("accept", [])}
        if "PNG content" in case["what"] or "WebP content" in case["what"]:
            wanted.add("keep")  # under the extension that fits the bytes
        if outcome.action not in wanted:
            wrong.append(f"{case['file']}: {outcome}")
        elif payload:
            wrong += [f"{case['file']}: {what}" for what in pixels_of(case, payload)]
    assert not wrong
