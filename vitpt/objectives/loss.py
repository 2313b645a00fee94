"""What an objective returns, and the weighted sums it is made of."""

from typing import NamedTuple

import torch
from torch import Tensor


class Loss(NamedTuple):
    """Sums over one micro-batch; means are taken by whoever adds them up.

    Args:
        sum: scalar float32, the weighted sum of the loss terms; carries the gradient.
        count: scalar float32, the summed weights times the loss terms per sample.
        metrics: per name a float32 tensor (2,): weighted sum and weighted count.
    """

    sum: Tensor
    count: Tensor  # type: ignore[assignment]  # shadows tuple.count, which nobody needs here
    metrics: dict[str, Tensor]


def weighted_sum(terms: Tensor, weights: Tensor) -> Tensor:
    """Sum of terms times weights; a term of weight 0 counts nothing, even where it is not finite.

    Shapes: terms (B,) or (B, n), weights (B,); returns a float32 scalar.
    """
    per_term = weights if terms.ndim == 1 else weights[:, None]
    return torch.where(per_term > 0, terms.float() * per_term, 0.0).sum()
