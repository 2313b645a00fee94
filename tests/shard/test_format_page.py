"""docs/data-format.md is true: its reader reads, its header table and its identities hold."""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vitpt.dataset import COLUMNS, open_dataset
from vitpt.shard.inspect import CATEGORIES

PAGE = Path(__file__).parents[2] / "docs" / "data-format.md"


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text()


def test_the_reader_on_the_page(page: str, tiny_shards: Path, split_folders: Path) -> None:
    found = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert found
    scope: dict[str, Any] = {}
    exec(found[1], scope)
    read_sample: Callable[..., tuple[bytes, int]] = scope["read_sample"]
    for split in open_dataset(tiny_shards).splits.values():
        for row in range(split.num_samples):
            image, label = read_sample(tiny_shards, split.name, row)
            assert image == (split_folders / split.sample_name(row)).read_bytes()
            assert label == split.label[row]


def test_the_header_on_the_page(page: str, tiny_shards: Path) -> None:
    header = (tiny_shards / "train-000000.tar").read_bytes()[:512]
    rows = re.findall(r"^\| (\d+) \| (\d+) \| ([a-z, ]+) \| (.*) \|$", page, re.MULTILINE)
    assert sum(int(size) for _, size, _, _ in rows) == 512
    for offset, size, name, content in rows:
        value = header[int(offset) : int(offset) + int(size)]
        literal = re.match(r"`([^`]*)`", content)
        if literal:
            assert value.startswith(literal[1].encode()), name
        if content == "NUL":
            assert value == bytes(int(size))


def test_identities_by_the_page(tiny_shards: Path) -> None:
    manifest = json.loads((tiny_shards / "manifest.json").read_bytes())
    for name, entry in manifest["splits"].items():
        digest = hashlib.sha256()
        for column in ("length", "crc32", "label", "width", "height", "orient"):
            path = tiny_shards / f"{name}.index" / f"{column}.npy"
            assert path.stat().st_size == 128 + np.load(path).nbytes
            digest.update(path.read_bytes()[128:])
        assert digest.hexdigest() == entry["split_id"]
        for file, sha256 in entry["columns"].items():
            assert hashlib.sha256((tiny_shards / f"{name}.index" / file).read_bytes()).hexdigest() == sha256
        for shard in entry["shards"]:
            assert hashlib.sha256((tiny_shards / shard["file"]).read_bytes()).hexdigest() == shard["sha256"]
    classes = (tiny_shards / "classes.txt").read_text().splitlines()
    splits = {name: entry["split_id"] for name, entry in manifest["splits"].items()}
    text = json.dumps({"classes": classes, "splits": splits, "version": 1}, sort_keys=True, separators=(",", ":"))
    assert hashlib.sha256(text.encode()).hexdigest() == manifest["dataset_id"]


def test_every_column_key_and_category_is_on_the_page(page: str, tiny_shards: Path) -> None:
    manifest = json.loads((tiny_shards / "manifest.json").read_bytes())
    keys = [
        *manifest,
        *manifest["splits"]["train"],
        *manifest["source"],
        *manifest["options"],
        *manifest["checked"]["train"],
    ]
    for word in [*keys, *(f"{name}.npy" for name in COLUMNS), *CATEGORIES]:
        assert f"`{word}`" in page, word


def test_the_index_of_dali_on_the_page(page: str, tiny_shards: Path) -> None:
    lines = (tiny_shards / "train-000000.idx").read_text().splitlines()
    line = next(line for line in lines if line.endswith(".jpg"))
    assert re.sub(r"\d+", "0", line) in re.sub(r"\d+", "0", page)
