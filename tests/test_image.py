"""Headers, conversion to 8-bit RGB, and what is refused."""

import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from images import encode, exif, quadrants, texture
from PIL import Image, ImageOps

from vitpt.image import MAX_PIXELS, ImageError, check_png, read_header, to_rgb, turn, turned_size

UPRIGHT = quadrants()
CORNERS = Path(__file__).parents[2] / "shared" / "data" / "corner_images"


def close(payload: bytes, tolerance: int = 3) -> bool:
    pixels = to_rgb(payload)
    return pixels.shape == UPRIGHT.shape and int(np.abs(pixels.astype(int) - UPRIGHT).max()) <= tolerance


def stored_for(orientation: int) -> np.ndarray:
    """Pixels that Pillow's own exif_transpose makes upright."""
    for code in range(1, 9):
        pixels = turn(UPRIGHT, code)
        image = Image.open(io.BytesIO(encode(pixels, "PNG", exif=exif(orientation))))
        if np.array_equal(np.asarray(ImageOps.exif_transpose(image)), UPRIGHT):
            return pixels
    raise AssertionError(orientation)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("JPEG", "jpeg"),
        ("PNG", "png"),
        ("WEBP", "webp"),
        ("GIF", "gif"),
        ("BMP", "bmp"),
        ("TIFF", "tiff"),
        ("PPM", "ppm"),
    ],
)
def test_header_and_pixels_of_each_format(kind: str, name: str) -> None:
    options: dict[str, Any] = {"subsampling": 0, "quality": 100} if kind == "JPEG" else {}
    payload = encode(UPRIGHT, kind, **options | ({"lossless": True} if kind == "WEBP" else {}))
    header = read_header(payload)
    assert (header.format, header.width, header.height, header.orientation, header.animated) == (name, 48, 32, 1, False)
    assert close(payload)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_orientation(orientation: int, kind: str) -> None:
    stored = stored_for(orientation)
    payload = encode(stored, kind, exif=exif(orientation))
    header = read_header(payload)
    assert header.orientation == orientation
    assert (header.height, header.width) == stored.shape[:2]
    assert turned_size(header.width, header.height, orientation) == (48, 32)
    assert np.array_equal(to_rgb(payload), UPRIGHT)
    assert np.array_equal(to_rgb(payload, apply_orientation=False), stored)


@pytest.mark.parametrize("block", [exif(9), exif(0), b"Exif\0\0nonsense", b"Exif\0\0", b""])
def test_invalid_orientation_counts_as_upright(block: bytes) -> None:
    assert read_header(encode(UPRIGHT, "JPEG", exif=block)).orientation == 1


def test_orientation_behind_the_pixels_of_a_png() -> None:
    payload = encode(UPRIGHT, "PNG")
    block = exif(6).removeprefix(b"Exif\0\0")
    chunk = struct.pack(">I4s", len(block), b"eXIf") + block + struct.pack(">I", zlib.crc32(b"eXIf" + block))
    assert read_header(payload[:-12] + chunk + payload[-12:]).orientation == 6


def test_cmyk_palette_and_bits() -> None:
    image = Image.fromarray(UPRIGHT)
    assert close(encode(image.convert("CMYK"), "JPEG", quality=100, subsampling=0), 8)
    assert close(encode(image.convert("CMYK"), "TIFF"))
    assert close(encode(image.quantize(4), "PNG"))
    black_white = np.zeros((8, 8), bool)
    black_white[:, 4:] = True
    pixels = to_rgb(encode(Image.fromarray(black_white), "PNG"))
    assert pixels[0, 0].tolist() == [0, 0, 0]
    assert pixels[0, 7].tolist() == [255, 255, 255]


def test_16_bit_is_shifted_not_clipped() -> None:
    grey = np.array([[0, 255, 256, 0x1234, 0xFFFF]], np.uint16)
    assert to_rgb(encode(Image.fromarray(grey), "PNG"))[0, :, 0].tolist() == [0, 0, 1, 0x12, 255]
    assert to_rgb(encode(Image.fromarray(grey), "TIFF"))[0, :, 1].tolist() == [0, 0, 1, 0x12, 255]


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_alpha_goes_on_white(kind: str) -> None:
    pixels = np.dstack([UPRIGHT, np.full(UPRIGHT.shape[:2], 255, np.uint8)])
    pixels[:, 24:, 3] = 0
    pixels[0, 0, 3] = 128
    rgb = to_rgb(encode(pixels, kind, **({"lossless": True, "exact": True} if kind == "WEBP" else {})))
    assert np.array_equal(rgb[1:, :24], UPRIGHT[1:, :24])
    assert (rgb[:, 24:] == 255).all()
    half = np.round(255 + (UPRIGHT[0, 0].astype(float) - 255) * 128 / 255)
    assert np.abs(rgb[0, 0] - half).max() <= 1


def test_colour_key_counts_as_transparent() -> None:
    rgb = to_rgb(encode(UPRIGHT, "PNG", transparency=(210, 58, 50)))
    assert (rgb[:16, :24] == 255).all()
    assert np.array_equal(rgb[16:], UPRIGHT[16:])


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_first_frame_of_an_animation(kind: str) -> None:
    frames = [Image.fromarray(texture(seed)) for seed in (1, 2)]
    options: dict[str, Any] = {"save_all": True, "append_images": frames}
    payload = encode(Image.fromarray(UPRIGHT), kind, **options | ({"lossless": True} if kind == "WEBP" else {}))
    assert read_header(payload).animated
    assert close(payload)


def refused(payload: bytes) -> str:
    with pytest.raises(ImageError) as raised:
        to_rgb(payload)
    assert raised.value.reason
    assert "\n" not in raised.value.reason
    return raised.value.category


@pytest.mark.parametrize("payload", [b"", b"\0" * 4096, b"hello", b"<html>404</html>", b"%!PS-Adobe-3.0 EPSF-3.0\n"])
def test_what_is_no_image(payload: bytes) -> None:
    assert refused(payload) == "not_an_image"


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_truncated_files(kind: str, share: float) -> None:
    payload = encode(texture(3), kind)
    refused(payload[: int(share * len(payload))])


def test_floats_have_no_8_bit_meaning() -> None:
    assert refused(encode(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF")) == "unsupported"


def ihdr(payload: bytes, width: int, height: int) -> bytes:
    head = b"IHDR" + struct.pack(">II", width, height) + payload[24:29]
    return payload[:12] + head + struct.pack(">I", zlib.crc32(head)) + payload[33:]


def test_size_limit_comes_before_memory() -> None:
    payload = encode(UPRIGHT, "PNG")
    assert refused(ihdr(payload, 60_000, 60_000)) == "too_large"
    assert refused(ihdr(payload, MAX_PIXELS + 1, 1)) == "too_large"
    jpeg = bytearray(encode(UPRIGHT, "JPEG"))
    sof = jpeg.index(b"\xff\xc0")
    jpeg[sof + 5 : sof + 9] = struct.pack(">HH", 65_500, 65_500)
    assert refused(bytes(jpeg)) == "too_large"


def test_png_checks_go_beyond_pillow() -> None:
    payload = encode(texture(1), "PNG")
    check_png(payload)
    check_png(payload)
    data = payload.index(b"IDAT")
    flipped = bytearray(payload)
    flipped[data + 20] ^= 1
    assert refused(bytes(flipped)) == "damaged"
    assert refused(payload[:-12]) == "damaged"  # no IEND
    taller = ihdr(payload, 48, 64)  # the data hold half of the rows: Pillow shows the rest black
    Image.open(io.BytesIO(taller)).load()
    assert refused(taller) == "damaged"
    assert refused(ihdr(payload, 48, 16)) == "damaged"


@pytest.mark.parametrize("colours", ["RGB", "L", "RGBA", "LA", "P", "1", "I;16"])
@pytest.mark.parametrize("size", [(1, 1), (3, 2), (5, 9), (48, 32)])
def test_png_row_counts_hold_for_all_kinds(colours: str, size: tuple[int, int]) -> None:
    image = Image.new(colours, size)
    check_png(encode(image, "PNG"))


@pytest.mark.skipif(not CORNERS.is_dir(), reason="the collection of corner images is not beside this checkout")
def test_corner_images() -> None:
    wrong = []
    for case in json.loads(CORNERS.with_suffix(".json").read_text()):
        wanted = {case["expect"], *case.get("accept", [])}
        try:
            pixels = to_rgb((CORNERS / case["file"]).read_bytes())
        except ImageError:
            if "reject" not in wanted:
                wrong.append(case["file"])
            continue
        if case.get("size") and list(pixels.shape[1::-1]) != case["size"]:
            wrong.append(case["file"])
        for x, y, colour in case.get("probes") or []:
            if np.abs(pixels[y, x].astype(int) - colour).max() > case["tol"]:
                wrong.append(case["file"])
    assert not wrong
