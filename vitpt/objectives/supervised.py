"""Classification: softmax or sigmoid cross-entropy on one vector per image.

Letters in shapes: B images, D width, K classes.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitpt.errors import VitptError
from vitpt.models.variants import ViTConfig
from vitpt.models.vit import VisionTransformer, fill_lecun_normal
from vitpt.objectives.loss import Loss, weighted_sum
from vitpt.recipe import schema


class Supervised(nn.Module):
    """A linear head on the pooled features, with an optional tanh layer before it (paper section 3.1).

    The head starts at zero and its bias at `head_bias`, so the loss of step 0 is known.
    """

    units = 1  # loss terms per sample

    def __init__(self, section: schema.Supervised, config: ViTConfig, num_classes: int | None) -> None:
        super().__init__()
        if not num_classes:
            raise VitptError("objective.kind: supervised needs labelled data with class names, found no classes")
        self.section = section
        self.num_classes = num_classes
        self.representation = nn.Linear(config.width, config.width) if section.representation else None
        self.head = nn.Linear(config.width, num_classes)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Initialise every parameter from a CPU generator."""
        if self.representation is not None:
            fill_lecun_normal(self.representation.weight, generator)
            self.representation.bias.zero_()
        self.head.weight.zero_()
        self.head.bias.fill_(self.section.head_bias)

    def draws(
        self, seed: int, visits: npt.NDArray[np.int64], ids: npt.NDArray[np.int64]
    ) -> dict[str, npt.NDArray[np.integer]]:
        """Classification draws nothing."""
        return {}

    def targets(self, images: Tensor, labels: Tensor, draws: dict[str, Tensor]) -> dict[str, Tensor]:
        """The labels, (B,) int64; -1 means none."""
        return {"labels": labels}

    def logits(self, features: Tensor) -> Tensor:
        """(B, D) -> (B, K)."""
        if self.representation is not None:
            features = torch.tanh(self.representation(features))
        return self.head(features)  # type: ignore[no-any-return]

    def forward(
        self,
        backbone: VisionTransformer,
        inputs: Tensor,
        targets: dict[str, Tensor],
        draws: dict[str, Tensor],
        weights: Tensor,
        drop_path: Tensor | None = None,
    ) -> Loss:
        """Loss of normalised images (B, H, W, 3) with weights (B,); an unlabelled row weighs nothing."""
        features = backbone.pool(backbone.encode(backbone.embed(inputs), drop_path=drop_path))
        logits = self.logits(features).float()
        labels = targets["labels"]
        weights = weights * (labels >= 0)
        labels = labels.clamp(min=0)
        total, count = weighted_sum(self._losses(logits, labels), weights), weights.sum()
        metrics = {"loss": torch.stack([total.detach(), count])}
        ranks = label_ranks(logits.detach(), labels)
        for k in (1,) if self.training else (1, 5):
            metrics[f"top{k}"] = torch.stack([weighted_sum(ranks < k, weights), count])
        return Loss(total, count, metrics)

    def _losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """(B, K) float32, (B,) -> (B,)."""
        smoothing = self.section.label_smoothing
        if self.section.loss == "softmax":
            return F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
        # softplus(z) - t z, since the usual form z - t z - log sigmoid(z) loses two digits at the initial bias of -10
        own = logits.gather(1, labels[:, None])[:, 0]
        reward = (1 - smoothing) * own + smoothing * logits.mean(dim=1)
        return F.softplus(logits).sum(dim=1) - reward


def label_ranks(logits: Tensor, labels: Tensor) -> Tensor:
    """Rank of the label's logit, 0 the largest: (B, K), (B,) -> (B,) int64; hit at k if the rank is below k.

    Of equal logits the first class wins, as in argmax; a label whose logit is not finite has rank K.
    """
    own = logits.gather(1, labels[:, None])
    earlier = torch.arange(logits.shape[1], device=logits.device) < labels[:, None]
    ahead = (logits > own) | ((logits == own) & earlier)
    return torch.where(own[:, 0].isfinite(), ahead.sum(dim=1), logits.shape[1])
