"""Other people's readers get every sample of our shards: webdataset, timm and DALI, each in a process of its own."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from images import encode, exif, make_shards, quadrants, texture
from PIL import Image

from vitpt.dataset import Split, open_dataset

WEBDATASET = """
import json, sys, zlib
import webdataset
rows = []
for sample in webdataset.WebDataset(json.loads(sys.argv[1]), shardshuffle=False):
    (extension,) = {"jpg", "png", "webp"} & set(sample)
    rows.append([sample["__key__"], int(sample["cls"]), extension, zlib.crc32(sample[extension])])
print(json.dumps(rows))
"""

TIMM = """
import json, sys
from timm.data import create_dataset
found = []
for root, split in json.loads(sys.argv[1]):
    data = create_dataset("wds/", root, split=split, is_training=False)
    found.append([len(data), [[label, *image.size] for image, label in data]])
print(json.dumps(found))
"""

DALI = """
import json, sys, zlib
import numpy as np
from nvidia.dali import fn, pipeline_def
paths = json.loads(sys.argv[1])

@pipeline_def(batch_size=32, num_threads=1, device_id=None)
def graph():
    images, labels = fn.readers.webdataset(
        paths=paths, index_paths=[path.replace(".tar", ".idx") for path in paths], ext=["jpg;png;webp", "cls"],
        missing_component_behavior="error", name="reader",
    )
    pixels = fn.decoders.image(images, device="cpu", output_type=0, adjust_orientation=False)
    return images, labels, pixels

pipeline = graph()
pipeline.build()
total = pipeline.epoch_size("reader")
rows = []
while len(rows) < total:
    images, labels, pixels = pipeline.run()
    for i in range(min(32, total - len(rows))):
        data = bytes(np.asarray(images[i]))
        shown = np.ascontiguousarray(np.asarray(pixels[i]))
        rows.append([int(bytes(np.asarray(labels[i]))), zlib.crc32(data), list(shown.shape), zlib.crc32(shown)])
print(json.dumps(rows))
"""


def run(script: str, argument: object) -> object:
    command = [sys.executable, "-W", "ignore", "-c", script, json.dumps(argument)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def paths(split: Split) -> list[str]:
    return [str(split.shard_path(index)) for index in range(len(split.shards))]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards with all three extensions, grey images and repaired ones: 2 classes, 40 images, 16 a shard."""
    root = tmp_path_factory.mktemp("readers")
    grey = Image.fromarray(texture(3)).convert("L")
    special = [
        ("cmyk.jpg", encode(Image.fromarray(quadrants()).convert("CMYK"))),
        ("turned.jpg", encode(quadrants(), exif=exif(6))),
        ("grey.jpg", encode(grey)),
        ("grey.png", encode(grey, "PNG")),
        ("small.webp", encode(texture(4), "WEBP")),
        ("drawing.gif", encode(quadrants(), "GIF")),
        ("clear.png", encode(Image.fromarray(quadrants()).convert("RGBA"), "PNG")),
        ("progressive.jpg", encode(texture(5), progressive=True)),
    ]
    for label, name in enumerate(("odd", "plain")):
        (root / "in" / name).mkdir(parents=True)
        files = special if label == 0 else [(f"{i}.jpg", encode(texture(i, 40 + i, 50))) for i in range(32)]
        for file, data in files:
            (root / "in" / name / file).write_bytes(data)
    return make_shards(root / "in", root / "out", samples_per_shard=16)


def test_webdataset(shards: Path, tiny_shards: Path) -> None:
    splits = [open_dataset(shards).split("train"), open_dataset(tiny_shards).split("val")]
    rows = run(WEBDATASET, [path for split in splits for path in paths(split)])
    assert isinstance(rows, list)
    wanted = [(split, row) for split in splits for row in range(split.num_samples)]
    assert [row[:2] for row in rows] == [[split.key(i), int(split.label[i])] for split, i in wanted]
    assert [row[3] for row in rows] == [int(split.crc32[i]) for split, i in wanted]


@pytest.mark.skipif(find_spec("timm") is None, reason="timm is not installed")
def test_timm(shards: Path, tiny_shards: Path) -> None:
    wanted = []
    for root, name in ((shards, "train"), (tiny_shards, "val")):
        split = open_dataset(root).split(name)
        columns = (split.label.tolist(), split.width.tolist(), split.height.tolist())
        wanted.append([split.num_samples, [list(row) for row in zip(*columns, strict=True)]])
    # timm asks for `validation` by default
    assert run(TIMM, [[str(shards), "train"], [str(tiny_shards), "validation"]]) == wanted


@pytest.mark.skipif(find_spec("nvidia.dali") is None, reason="DALI has no wheel for this platform")
def test_dali_reads_and_decodes_every_sample(shards: Path) -> None:
    import zlib

    from vitpt.image import to_rgb

    split = open_dataset(shards).split("train")
    rows = run(DALI, paths(split))
    assert isinstance(rows, list)
    assert [row[:2] for row in rows] == [
        [a, b] for a, b in zip(split.label.tolist(), split.crc32.tolist(), strict=True)
    ]
    for row in range(split.num_samples):
        assert rows[row][2] == [split.height[row], split.width[row], 3]
        with split.shard_path(int(split.shard[row])).open("rb") as file:
            file.seek(int(split.offset[row]))
            pixels = to_rgb(file.read(int(split.length[row])))
        assert rows[row][3] == zlib.crc32(pixels), split.sample_name(row)
