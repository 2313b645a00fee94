"""One pass over a split: every sample once, sums and counts over all processes."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitpt.objectives.loss import Loss
from vitpt.stream.loader import Loader


class Meter:
    """Weighted sums of an objective's metrics, kept on the device until they are read."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # MPS has no float64
        self.dtype = torch.float32 if device.type == "mps" else torch.float64
        self.sums: dict[str, Tensor] = {}

    def add(self, loss: Loss) -> None:
        """Add the [sum, count] pairs of one micro-batch; no synchronisation with the host."""
        for name, pair in loss.metrics.items():
            pair = pair.detach().to(self.dtype)
            self.sums[name] = self.sums[name] + pair if name in self.sums else pair

    def load(self, totals: dict[str, list[float]]) -> None:
        """Start from totals read earlier."""
        self.sums = {name: torch.tensor(pair, dtype=self.dtype, device=self.device) for name, pair in totals.items()}

    def totals(self, reduce: Callable[[Tensor], Tensor]) -> dict[str, list[float]]:
        """[sum, count] of each metric over all processes.

        Args:
            reduce: sum of a tensor over all processes. All of them call this with the same metrics.
        """
        if not self.sums:
            return {}
        names = sorted(self.sums)
        table = reduce(torch.stack([self.sums[name] for name in names])).cpu().tolist()
        return dict(zip(names, table, strict=True))


class Evaluation(NamedTuple):
    """What one pass over a split gave, over all processes.

    Attributes:
        totals: [sum, count] of each metric.
        samples: samples that counted, each once.
        bad: samples that could not be read or decoded.
    """

    totals: dict[str, list[float]]
    samples: int
    bad: int


def means(totals: dict[str, list[float]]) -> dict[str, float]:
    """Mean of each metric; a metric that counted nothing is left out."""
    return {name: total / count for name, (total, count) in totals.items() if count}


@torch.no_grad()
def evaluate(
    task: nn.Module,
    loader: Loader,
    steps: int,
    reduce: Callable[[Tensor], Tensor],
    stopped: Callable[[], bool] = lambda: False,
    advance: Callable[[], None] = lambda: None,
    relabel: Tensor | None = None,
) -> Evaluation | None:
    """Run the task in eval mode over all samples of the loader's planner.

    Args:
        task: the (prepared) task; its training mode is put back afterwards.
        loader: this process's share of the split, `steps` micro-batches.
        steps: micro-batches per process, the same on all.
        reduce: sum over all processes.
        stopped: asked before each micro-batch, on all processes alike; True abandons the evaluation.
        advance: called after each micro-batch.
        relabel: (labels of the data,) int64, the model's class of each label of the data; None when they are the same.

    Returns:
        The sums and counts; None when abandoned.
    """
    training = task.training
    task.eval()
    meter = Meter(loader.device)
    filled = bad = 0
    try:
        with loader.batches(0, steps) as batches:
            for batch in batches:
                if stopped():
                    return None
                labels = batch.labels
                if relabel is not None:
                    labels = torch.where(labels >= 0, relabel[labels.clamp(min=0)], labels)
                meter.add(task(batch.images[0], labels, batch.weights, batch.draws))
                filled += int((batch.plan.ids >= 0).sum())
                bad += len(batch.bad)
                advance()
    finally:
        task.train(training)
    filled, bad = reduce(torch.tensor([filled, bad], device=loader.device)).tolist()
    return Evaluation(meter.totals(reduce), filled - bad, bad)
