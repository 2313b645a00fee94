"""Stage 3: which sample gets which id and lies in which shard. Everything but the images' bytes is known after it."""

import os
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vitpt import dataset, draws, fsio
from vitpt.shard import tar
from vitpt.shard.check import EXTENSIONS, Checked
from vitpt.shard.sources import Files

MAX_SAMPLES = 10**9  # ids have nine digits


@dataclass(frozen=True, eq=False)
class SplitPlan:
    """The samples of one split in the order of their ids.

    Attributes:
        name: of the split.
        files: name, label, size of each sample's source file.
        rows: check.OUTCOME (n,).
        samples_per_shard: of every shard but the last.
        shuffled: whether the order is the seeded one; else source order.
    """

    name: str
    files: Files
    rows: np.ndarray
    samples_per_shard: int
    shuffled: bool

    @property
    def num_samples(self) -> int:
        """Samples in all shards."""
        return len(self.rows)

    @property
    def num_shards(self) -> int:
        """Number of tar files."""
        return -(-self.num_samples // self.samples_per_shard)

    def shard_rows(self, index: int) -> slice:
        """The ids in one shard."""
        start = index * self.samples_per_shard
        return slice(start, min(start + self.samples_per_shard, self.num_samples))

    def shard_file(self, index: int) -> str:
        """Name of one tar file."""
        return f"{self.name}-{index:06d}.tar"

    @cached_property
    def columns(self) -> dict[str, np.ndarray]:
        """The index columns of the format, one row a sample (`name_off` one more)."""
        num_samples = self.num_samples
        offset = np.zeros(num_samples, np.uint64)
        for index in range(self.num_shards):
            part = self.shard_rows(index)
            offset[part] = tar.layout(self.files.labels[part], self.rows["length"][part])[0]
        name_lengths = [len(os.fsencode(name)) for name in self.files.names]
        values = {
            "shard": np.arange(num_samples) // self.samples_per_shard,
            "offset": offset,
            "length": self.rows["length"],
            "label": self.files.labels,
            "width": self.rows["width"],
            "height": self.rows["height"],
            "orient": np.ones(num_samples),
            "crc32": self.rows["crc32"],
            "name_off": np.concatenate([[0], np.cumsum(name_lengths)]),
        }
        return {name: values[name].astype(kind) for name, kind in dataset.COLUMNS.items()}

    @cached_property
    def names(self) -> bytes:
        """Content of names.bin."""
        return b"".join(os.fsencode(name) for name in self.files.names)

    @cached_property
    def split_id(self) -> str:
        """Identity of the split's content."""
        return dataset.split_id(self.columns)

    def shard_bytes(self, index: int) -> int:
        """Size of one tar file."""
        part = self.shard_rows(index)
        return tar.layout(self.files.labels[part], self.rows["length"][part])[1]

    @cached_property
    def plan_hash(self) -> str:
        """Hash of everything that decides the bytes of this split's shards."""
        extensions = fsio.sha256_bytes(self.rows["extension"].tobytes())
        return fsio.sha256_bytes(
            fsio.canonical_json(
                [
                    dataset.VERSION,
                    self.name,
                    self.samples_per_shard,
                    self.split_id,
                    extensions,
                    fsio.sha256_bytes(self.names),
                ]
            )
        )


def plan_split(name: str, files: Files, checked: Checked, samples_per_shard: int, seed: int) -> SplitPlan | None:
    """Drop the rejected files and put the rest in order: seeded for "train", source order for the others; None if none is left.

    Sequential readers of the training shards then see mixed classes.
    """
    kept = np.flatnonzero(checked.kept)
    shuffled = name == "train"
    if not len(kept):
        return None
    if shuffled:
        key = draws.permutation_key(seed, draws.Purpose.WRITE)
        kept = kept[draws.permute(np.arange(len(kept)), len(kept), key)]
    return SplitPlan(name, files.take(kept), checked.rows[kept], samples_per_shard, shuffled)


def extension_names(rows: np.ndarray) -> list[str]:
    """File extension of each sample."""
    return [EXTENSIONS[number] for number in rows["extension"].tolist()]
