"""A backbone and an objective as one module: what training and evaluation call."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from vitpt.draws import Purpose, words
from vitpt.models.variants import ViTConfig
from vitpt.models.vit import VisionTransformer
from vitpt.objectives.loss import Loss
from vitpt.objectives.mpp import Mpp
from vitpt.objectives.supervised import Supervised
from vitpt.recipe import schema

OBJECTIVES: dict[str, Any] = {"supervised": Supervised, "mpp": Mpp}
"""Recipe's `objective.kind` -> class."""

Triple = tuple[float, float, float]


class Task(nn.Module):
    """From uint8 images to a loss. Its state_dict has `backbone.<timm name>` and `objective.<name>` and nothing else.

    Args:
        backbone: the model.
        objective: what it is trained for.
        mean: per channel, of pixels in [0, 1].
        std: per channel, of pixels in [0, 1].
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, backbone: VisionTransformer, objective: Supervised | Mpp, mean: Triple, std: Triple) -> None:
        super().__init__()
        self.backbone = backbone
        self.objective = objective
        center, spread = (torch.tensor(values, dtype=torch.float64, device="cpu") for values in (mean, std))
        self.register_buffer("scale", (1 / (255 * spread)).float(), persistent=False)
        self.register_buffer("shift", (-center / spread).float(), persistent=False)

    def initialise(self, generator: torch.Generator) -> None:
        """Initialise all parameters from a CPU generator: the same for every device, whatever happened before."""
        self.backbone.initialise(generator)
        self.objective.initialise(generator)

    def draws(
        self, seed: int, visits: npt.NDArray[np.int64], ids: npt.NDArray[np.int64]
    ) -> dict[str, npt.NDArray[np.integer]]:
        """Random integers of each sample and visit, one row a sample: the objective's, and `drop_path` (B, 2 * depth) uint32."""
        drawn: dict[str, npt.NDArray[np.integer]] = dict(self.objective.draws(seed, visits, ids))
        config = self.backbone.config
        if config.drop_path > 0:
            drawn["drop_path"] = words(seed, visits, ids, Purpose.DROP_PATH, 2 * config.depth)
        return drawn

    def normalise(self, images: Tensor) -> Tensor:
        """(B, H, W, 3) uint8 -> float32, (pixels / 255 - mean) / std."""
        return torch.addcmul(self.shift, images.to(self.scale.dtype), self.scale)

    def forward(self, images: Tensor, labels: Tensor, weights: Tensor, draws: dict[str, Tensor]) -> Loss:
        """Loss of a micro-batch.

        Args:
            images: (B, H, W, 3) uint8.
            labels: (B,) int64; -1 means none.
            weights: (B,) float32; rows of weight 0 contribute nothing, whatever they hold.
            draws: the rows of `Task.draws` that belong to the images.
        """
        targets = self.objective.targets(images, labels, draws)
        inputs = self.normalise(images)
        return self.objective(self.backbone, inputs, targets, draws, weights, self._drop_path(draws))  # type: ignore[no-any-return]

    def predict(self, images: Tensor) -> Tensor:
        """Logits of a classifier: (B, H, W, 3) uint8 -> (B, K) float32."""
        if not isinstance(self.objective, Supervised):
            raise TypeError("only a classification objective has logits")
        return self.objective.logits(self.backbone(self.normalise(images))).float()

    def _drop_path(self, draws: dict[str, Tensor]) -> Tensor | None:
        """(B, depth, 2) uniforms while training with stochastic depth."""
        if not self.training or "drop_path" not in draws:
            return None
        upper = draws["drop_path"].to(torch.int64) >> 8
        return (upper.float() * 2.0**-24).reshape(len(upper), -1, 2)


def build_task(
    config: ViTConfig,
    section: schema.Supervised | schema.Mpp,
    num_classes: int | None,
    mean: Triple = (0.5, 0.5, 0.5),
    std: Triple = (0.5, 0.5, 0.5),
) -> Task:
    """Backbone and objective of a recipe, uninitialised: call `Task.initialise` or load weights."""
    objective = OBJECTIVES[section.kind](section, config, num_classes)
    return Task(VisionTransformer(config), objective, mean, std)
