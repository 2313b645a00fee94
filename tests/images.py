"""Small images made in code, and folders of them."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitpt.shard.build import Options, Report, build
from vitpt.shard.check import Advance
from vitpt.shard.sources import list_source

# upper left, upper right, lower left, lower right: a turn or a swapped channel shows
QUADRANTS = ((210, 58, 50), (38, 166, 54), (46, 54, 190), (226, 210, 82))


def quadrants(width: int = 48, height: int = 32) -> np.ndarray:
    """(height, width, 3) uint8: four flat colours."""
    pixels = np.zeros((height, width, 3), np.uint8)
    half_height, half_width = height // 2, width // 2
    for number, colour in enumerate(QUADRANTS):
        rows = slice(half_height) if number < 2 else slice(half_height, None)
        columns = slice(half_width) if number % 2 == 0 else slice(half_width, None)
        pixels[rows, columns] = colour
    return pixels


def texture(seed: int, width: int = 48, height: int = 32) -> np.ndarray:
    """(height, width, 3) uint8: smooth random pixels, different for every seed."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (4, 6, 3), np.uint8))
    return np.asarray(small.resize((width, height), Image.Resampling.BICUBIC))


def encode(pixels: np.ndarray | Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    """Encode pixels (or a Pillow image) with Pillow's encoder `kind`."""
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    out = io.BytesIO()
    image.save(out, kind, **({"quality": 90} | options if kind in ("JPEG", "WEBP") else options))
    return out.getvalue()


def exif(orientation: int) -> bytes:
    """An EXIF block with this orientation."""
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags.tobytes()


def write_class_folder(folder: Path, count: int, seed: int = 0, kinds: tuple[str, ...] = ("JPEG",)) -> None:
    """Write `count` images of 40x32 to 64x64 pixels, in turn of the given kinds."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = np.random.default_rng(seed).integers((40, 32), (65, 65), (count, 2))
    suffix = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}
    for number, (width, height) in enumerate(sizes.tolist()):
        kind = kinds[number % len(kinds)]
        data = encode(texture(seed * 1000 + number, width, height), kind)
        (folder / f"{folder.name}_{number:03d}.{suffix[kind]}").write_bytes(data)


def write_splits(root: Path, train: int = 20, val: int = 7, classes: tuple[str, ...] = ("cat", "dog", "eel")) -> Path:
    """Write `root/{train,val}/<class>/<file>`: JPEG with a PNG and a WebP in between."""
    for number, name in enumerate(classes):
        write_class_folder(root / "train" / name, train, seed=number, kinds=("JPEG", "JPEG", "PNG", "JPEG", "WEBP"))
        write_class_folder(root / "val" / name, val, seed=100 + number, kinds=("JPEG", "PNG"))
    return root


class Silent:
    """A reporter that keeps what is said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    @contextmanager
    def stage(self, description: str, total: int, unit: str) -> Iterator[Advance]:
        yield lambda units, num_bytes: None


def shard(source: Path, out: Path, reporter: Silent | None = None, **options: Any) -> Report:
    """Write shards of `source` into `out`."""
    listing = list_source(source, options.get("val_fraction"))
    return build(listing, out, Options(**options), reporter or Silent())


def make_shards(source: Path, out: Path, **options: Any) -> Path:
    """Write shards of `source` into `out`; returns `out`."""
    shard(source, out, **options)
    return out
