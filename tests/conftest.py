"""Being here puts this folder on the import path of all tests (`oracles.py`)."""

from pathlib import Path

import pytest
from images import make_shards, write_class_folder, write_splits

CLASSES = ("cat", "dog", "eel")


@pytest.fixture
def class_folders(tmp_path: Path) -> Path:
    """A folder of three class folders with four JPEG images each."""
    root = tmp_path / "photos"
    for number, name in enumerate(CLASSES):
        write_class_folder(root / name, 4, seed=number)
    return root


@pytest.fixture(scope="session")
def split_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """{train,val}/<class>/<file>: 3 classes, 20 and 7 images each, 40x32 to 64x64 pixels; not to be changed."""
    return write_splits(tmp_path_factory.mktemp("source") / "tiny")


@pytest.fixture(scope="session")
def tiny_shards(split_folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of `split_folders`, 16 samples each; not to be changed."""
    return make_shards(split_folders, tmp_path_factory.mktemp("shards") / "tiny-shards", samples_per_shard=16)
