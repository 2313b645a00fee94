"""Copies of a dataset with something taken away: labels, or the readability of images."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vitpt.dataset import open_dataset


def changed_copy(
    shards: Path, target: Path, split: str, *, unlabelled: Sequence[int] = (), damaged: Sequence[int] = ()
) -> Path:
    """Copy a dataset; in one split take the label from some rows and flip a bit in the images of others."""
    shutil.copytree(shards, target)
    opened = open_dataset(target).split(split)
    for row in damaged:
        path = opened.shard_path(int(opened.shard[row]))
        content = bytearray(path.read_bytes())
        content[int(opened.offset[row]) + int(opened.length[row]) // 2] ^= 4
        path.write_bytes(content)
    labels = np.array(opened.label)
    labels[list(unlabelled)] = -1
    np.save(target / f"{split}.index/label.npy", labels)
    manifest = json.loads((target / "manifest.json").read_bytes())
    manifest["splits"][split]["num_labelled"] = int((labels >= 0).sum())
    (target / "manifest.json").write_text(json.dumps(manifest))
    return target
