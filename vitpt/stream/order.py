"""Which sample is dealt at which position, and which slots of a rank hold which rows of the global batch. Pure functions."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vitpt.dataset import Split
from vitpt.draws import Purpose, permutation_key, permute
from vitpt.errors import Exit, VitptError

Int64 = npt.NDArray[np.int64]

EMPTY = -1
"""Position, id and row of an empty slot."""

SOURCE_SHIFT = 48  # sample id = source << 48 | row
_ROW_MASK = (1 << SOURCE_SHIFT) - 1
_FRACTION_SEED = 0  # fractions do not depend on the run's seed: runs with different seeds see the same samples


def rows_of(ids: Int64) -> Int64:
    """The row in its split of each sample id; empty slots stay -1."""
    return np.where(ids < 0, EMPTY, ids & _ROW_MASK)


@dataclass(frozen=True)
class GlobalOrder:
    """Pass after pass over all samples in use, each pass in its own random order and every sample exactly once in it.

    Attributes:
        seed: of the run.
        rows: rows of the split in use, or None for all of them.
        num_samples: N, how many samples are in use.
        source: which of several data sets this is.
    """

    seed: int
    rows: Int64 | None
    num_samples: int
    source: int = 0

    def deal(self, positions: Int64) -> tuple[Int64, Int64]:
        """Sample ids and visits (how often each sample was dealt before) at positions of the endless run.

        Shapes: positions (n,) int64, -1 for an empty slot; returns ids (n,) (-1 where empty) and visits (n,) (0 where empty).
        """
        ids = np.full(len(positions), EMPTY, dtype=np.int64)
        filled = positions >= 0
        visits = np.where(filled, positions // self.num_samples, 0)
        for visit in np.unique(visits[filled]):
            here = np.flatnonzero(filled & (visits == visit))
            key = permutation_key(self.seed, Purpose.ORDER, int(visit))
            index = permute(positions[here] % self.num_samples, self.num_samples, key)
            ids[here] = index if self.rows is None else self.rows[index]
        return np.where(filled, ids | self.source << SOURCE_SHIFT, EMPTY), visits


@dataclass(frozen=True)
class BlockOrder:
    """Every sample once, visit 0: rank r has the r-th contiguous block of rows, cut into steps of `size` slots.

    Position p is slot p mod size of rank p // size mod ranks in step p // (size * ranks).
    """

    rows: Int64 | None
    num_samples: int
    ranks: int
    size: int

    @property
    def steps(self) -> int:
        """Steps every rank runs; the last ones may hold empty slots."""
        return -(-self._block // self.size)

    @property
    def _block(self) -> int:
        return -(-self.num_samples // self.ranks)

    def deal(self, positions: Int64) -> tuple[Int64, Int64]:
        """Sample ids and visits (all 0) at positions; -1 past a rank's block. Shapes as `GlobalOrder.deal`."""
        step, slot = positions // (self.size * self.ranks), positions % self.size
        in_block = step * self.size + slot
        index = positions // self.size % self.ranks * self._block + in_block
        filled = (positions >= 0) & (in_block < self._block) & (index < self.num_samples)
        index = np.where(filled, index, 0)
        ids = index if self.rows is None else self.rows[index]
        return np.where(filled, ids, EMPTY), np.zeros(len(positions), dtype=np.int64)


def rows_in_use(split: Split, fraction: float, labelled_only: bool) -> Int64 | None:
    """The rows of a split that a run uses, in ascending order; None means all of them.

    A fraction is a prefix of one fixed permutation of the split, so a smaller fraction is contained in a larger one.

    Raises:
        VitptError: no row is left (exit 3).
    """
    if labelled_only and split.num_labelled < split.num_samples:
        rows = np.flatnonzero(np.asarray(split.label) >= 0)
    elif fraction >= 1 and split.num_samples > 0:
        return None
    else:
        rows = np.arange(split.num_samples, dtype=np.int64)
    if len(rows) == 0:
        wanted = "labelled samples" if labelled_only else "samples"
        raise VitptError(f"split {split.name!r} has no {wanted}", exit_code=Exit.DATA)
    if fraction < 1:
        places = permute(rows, split.num_samples, permutation_key(_FRACTION_SEED, Purpose.FRACTION))
        keep = max(1, round(fraction * len(rows)))
        rows = rows[np.argsort(places)[:keep]]  # places are distinct: the order does not depend on the sort
    return np.sort(rows)


@dataclass(frozen=True)
class Slots:
    """How the rows of a global batch lie in the ranks' micro-batches.

    Every rank runs `micros` micro-batches of `size` slots, so shapes are constant and collectives match. A rank's rows are
    contiguous; the surplus slots, all at the end, are empty.
    """

    batch: int
    ranks: int
    micros: int
    size: int

    def of(self, rank: int, micro: int) -> Int64:
        """Rows of the global batch in each slot: (size,) in [0, batch), -1 where the slot is empty."""
        rows = (rank * self.micros + micro) * self.size + np.arange(self.size, dtype=np.int64)
        return np.where(rows < self.batch, rows, EMPTY)


def make_slots(batch: int, ranks: int, micro_batch_size: int) -> Slots:
    """The slots with the fewest micro-batches of at most `micro_batch_size` slots.

    Raises:
        ValueError: a number is below 1.
    """
    if min(batch, ranks, micro_batch_size) < 1:
        raise ValueError(f"batch {batch}, ranks {ranks} and micro_batch_size {micro_batch_size} must all be at least 1")
    micros = -(-batch // (ranks * micro_batch_size))
    return Slots(batch, ranks, micros, size=-(-batch // (ranks * micros)))
