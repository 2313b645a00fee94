"""Splits and images made by code: what tests of the stream read."""

import io
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitpt.dataset import Shard, Split
from vitpt.image import read_header, turned_size
from vitpt.recipe.schema import RandomResizedCrop
from vitpt.stream.views import Stored, View, stored, training_view


def photo(width: int, height: int, seed: int) -> Image.Image:
    """A picture with smooth areas, edges and some noise, as photos have."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    pixels = np.asarray(coarse).astype(np.int16)
    y, x = np.mgrid[0:height, 0:width]
    pixels[(x // 23 + y // 17) % 5 == 0] += 40
    pixels += rng.integers(-6, 7, pixels.shape, dtype=np.int16)
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "JPEG", orientation: int = 1, **options: object) -> bytes:
    """The file's bytes, with an EXIF orientation when it is not 1."""
    out = io.BytesIO()
    if orientation != 1:
        exif = Image.Exif()
        exif[0x0112] = orientation
        options["exif"] = exif
    image.save(out, kind, **({"quality": 90} | options if kind == "JPEG" else options))
    return out.getvalue()


def make_split(
    folder: Path,
    payloads: list[bytes],
    labels: list[int] | None = None,
    sizes: dict[int, tuple[int, int]] | None = None,
    shard_samples: int = 7,
    name: str = "train",
) -> Split:
    """A split over payloads, good or not; `sizes` gives the upright (width, height) of those without a readable header."""
    folder.mkdir(parents=True, exist_ok=True)
    columns = {key: [] for key in ("shard", "offset", "length", "width", "height", "orient", "crc32")}
    files: list[bytearray] = []
    for row, payload in enumerate(payloads):
        if row % shard_samples == 0:
            files.append(bytearray(b"#" * 512))
        if sizes and row in sizes:
            (width, height), orient = sizes[row], 1
        else:
            header = read_header(payload)
            orient = header.orientation
            width, height = turned_size(header.width, header.height, orient)
        values = (len(files) - 1, len(files[-1]), len(payload), width, height, orient, zlib.crc32(payload))
        for column, value in zip(columns.values(), values, strict=True):
            column.append(value)
        files[-1] += payload
    shards = []
    for i, data in enumerate(files):
        (folder / f"{name}-{i:06d}.tar").write_bytes(data)
        shards.append(Shard(f"{name}-{i:06d}.tar", len(data), shard_samples, ""))
    names = [f"class/photo {row}.jpg".encode() for row in range(len(payloads))]
    given = labels if labels is not None else [row % 3 for row in range(len(payloads))]
    types = {"offset": "<u8", "orient": "|u1"}
    return Split(
        name=name,
        split_id="0" * 64,
        num_samples=len(payloads),
        num_labelled=sum(label >= 0 for label in given),
        root=folder,
        shards=tuple(shards),
        label=np.array(given, "<i4"),
        name_off=np.cumsum([0, *map(len, names)]).astype("<u8"),
        names=np.frombuffer(b"".join(names), np.uint8),
        **{key: np.array(values, types.get(key, "<u4")) for key, values in columns.items()},
    )


def photos(count: int, seed: int = 0) -> list[bytes]:
    """JPEGs of several sizes and subsamplings."""
    rng = np.random.default_rng(seed)
    out = []
    for i in range(count):
        width, height = (int(side) for side in rng.integers(20, 160, 2))
        out.append(encoded(photo(width, height, seed * 1000 + i), subsampling=(0, 2)[i % 2]))
    return out


def no_draws(seed: int, visits: np.ndarray, ids: np.ndarray) -> dict[str, np.ndarray]:
    """The draws of an objective that has none."""
    return {}


def shared_data(name: str) -> Path:
    """A file of the development data beside the repository; skips the test where it is absent."""
    path = Path(__file__).parents[3] / "shared" / "data" / name
    if not path.exists():
        pytest.skip(f"{path} is absent: development data are not part of the repository")
    return path


def training_views(split: Split, rows: list[int], size: int, seed: int = 0) -> Stored:
    """Training views of some rows (area 5 % to 100 %, both flips) in stored pixels."""
    ids = np.array(rows)
    columns = split.width[ids], split.height[ids], split.orient[ids]
    view = training_view(RandomResizedCrop(), "both", size, seed, ids, np.zeros_like(ids), *columns)
    return stored_sizes(split, ids, view)


def stored_sizes(split: Split, ids: np.ndarray, view: View) -> Stored:
    """A view in stored pixels."""
    lying = split.orient[ids] >= 5
    width, height = split.width[ids], split.height[ids]
    return stored(view, np.where(lying, height, width), np.where(lying, width, height))


def in_child(code, *arguments):
    """Run code in a process of its own: a decoder may end it. Its output is part of a failure's message."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
