"""What one rank reads in one micro-batch: samples, views and draws, as integer arrays. Pure; no byte is read here.

Loader, digest and `vitpt data stream` all work on plans, so what is checked is what is trained on.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from vitpt.dataset import Split
from vitpt.recipe.schema import Data, EvalCrop
from vitpt.stream.order import BlockOrder, GlobalOrder, Slots, make_slots, rows_in_use, rows_of
from vitpt.stream.views import View, evaluation_view, training_view

Int64 = npt.NDArray[np.int64]
DrawsOfSeed = Callable[[int, Int64, Int64], dict[str, npt.NDArray[np.integer]]]
"""(seed, visits, ids) -> named integer arrays, one row a sample: an objective's random choices."""
Draws = Callable[[Int64, Int64], dict[str, npt.NDArray[np.integer]]]
"""The same with the seed bound: (visits, ids)."""
Views = Callable[[Int64, Int64, Int64], tuple[View, ...]]
"""(ids, visits, rows) -> the views of these samples."""

_T = TypeVar("_T", bound=np.generic)


class Order(Protocol):
    """Deals samples to positions."""

    @property
    def num_samples(self) -> int:
        """Samples in use."""
        ...

    def deal(self, positions: Int64) -> tuple[Int64, Int64]:
        """(ids, visits) at positions; -1 for empty slots."""
        ...


@dataclass(frozen=True)
class Plan:
    """One micro-batch of one rank: one row a slot; rows with id -1 are empty slots.

    Attributes:
        positions: (m,) int64 in the endless run, -1 empty.
        ids: (m,) int64 sample ids, -1 empty.
        visits: (m,) int64, how often the sample was dealt before.
        views: one a picture of each sample.
        draws: the objective's random choices, integer arrays (m, ...).
    """

    positions: Int64
    ids: Int64
    visits: Int64
    views: tuple[View, ...]
    draws: dict[str, npt.NDArray[np.integer]]

    @property
    def rows(self) -> Int64:
        """(m,) row of each sample in its split, -1 empty."""
        return rows_of(self.ids)


@dataclass(frozen=True)
class Planner:
    """Makes the plans of one rank: a pure function of step and micro-batch.

    Attributes:
        split: where the samples lie.
        order: deals samples to positions.
        slots: deals positions to ranks and micro-batches.
        rank: whose plans these are.
        view: the views of samples.
        draws: the objective's draws, its seed bound.
        steps: how many steps there are, or None when the run is endless.
    """

    split: Split
    order: Order
    slots: Slots
    rank: int
    view: Views
    draws: Draws
    steps: int | None = None

    def plan(self, step: int, micro: int) -> Plan:
        """The plan of one micro-batch of one step."""
        offsets = self.slots.of(self.rank, micro)
        positions = np.where(offsets < 0, np.int64(-1), step * self.slots.batch + offsets)
        ids, visits = self.order.deal(positions)
        positions = np.where(ids < 0, np.int64(-1), positions)
        filled = np.flatnonzero(ids >= 0)
        if len(filled) == len(ids):
            views = self.view(ids, visits, rows_of(ids))
        else:
            # Columns are looked up for samples only; an empty slot gets the view of nothing.
            views = self.view(ids[filled], visits[filled], rows_of(ids[filled]))
            views = tuple(_spread(view, filled, len(ids)) for view in views)
        return Plan(positions, ids, visits, views, self.draws(visits, ids))


def training_planner(
    data: Data, size: int, seed: int, split: Split, slots: Slots, rank: int, draws: DrawsOfSeed
) -> Planner:
    """The planner of a training run: endless passes in global order, random views.

    Args:
        data: the recipe's section.
        size: side of the pictures, pixels.
        seed: of the run.
        split: to train on.
        slots: of the global batch.
        rank: of this process.
        draws: (seed, visits, ids) -> the objective's draws.

    Raises:
        VitptError: no sample is left by the recipe's filters (exit 3).
    """
    rows = rows_in_use(split, data.fraction, data.labelled_only)
    order = GlobalOrder(seed, rows, split.num_samples if rows is None else len(rows))
    view = partial(_training_views, split, data, size, seed)
    return Planner(split, order, slots, rank, view, partial(draws, seed))


def evaluation_planner(
    crop: EvalCrop,
    size: int,
    seed: int,
    split: Split,
    batch: int,
    ranks: int,
    rank: int,
    draws: DrawsOfSeed,
    labelled_only: bool,
) -> Planner:
    """The planner of one evaluation: every sample once, visit 0, contiguous blocks a rank, `steps` steps of one micro-batch.

    Args:
        crop: the evaluation view.
        size: side of the pictures, pixels.
        seed: of the objective's draws.
        split: to evaluate on.
        batch: slots of a rank's micro-batch.
        ranks: number of processes.
        rank: of this process.
        draws: (seed, visits, ids) -> the objective's draws.
        labelled_only: leave out samples without a label.

    Raises:
        VitptError: no sample is left (exit 3).
    """
    rows = rows_in_use(split, 1.0, labelled_only)
    order = BlockOrder(rows, split.num_samples if rows is None else len(rows), ranks, batch)
    view = partial(_evaluation_views, split, crop, size)
    slots = make_slots(batch * ranks, ranks, batch)
    return Planner(split, order, slots, rank, view, partial(draws, seed), order.steps)


def _training_views(
    split: Split, data: Data, size: int, seed: int, ids: Int64, visits: Int64, rows: Int64
) -> tuple[View, ...]:
    width, height, orient = split.width[rows], split.height[rows], split.orient[rows]
    return (training_view(data.crop, data.flip, size, seed, ids, visits, width, height, orient),)


def _evaluation_views(
    split: Split, crop: EvalCrop, size: int, ids: Int64, visits: Int64, rows: Int64
) -> tuple[View, ...]:
    return (evaluation_view(crop, size, split.width[rows], split.height[rows], split.orient[rows]),)


def _spread(view: View, filled: Int64, slots: int) -> View:
    """The views of some slots as the views of all; the others look at one pixel of an upright image."""

    def spread(values: npt.NDArray[_T], empty: object) -> npt.NDArray[_T]:
        out = np.empty((slots, *values.shape[1:]), dtype=values.dtype)
        out[:] = empty
        out[filled] = values
        return out

    return View(
        box=spread(view.box, [0, 0, 1, 1]),
        flip=spread(view.flip, 0),
        orient=spread(view.orient, 1),
        resize=spread(view.resize, [view.size, view.size]),
        crop=spread(view.crop, [0, 0]),
        size=view.size,
        filter=view.filter,
    )
