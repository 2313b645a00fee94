"""A model between two file formats: read from or written to a vitpt checkpoint, and checked by its own outputs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitpt import checkpoint
from vitpt.errors import Exit, VitptError
from vitpt.models.posembed import sincos2d
from vitpt.models.variants import ViTConfig
from vitpt.models.vit import VisionTransformer

TOLERANCE = 1e-4
"""Largest difference of a conversion, relative to the largest output (at least 1); float32 leaves about 1e-6."""

HALF = (0.5, 0.5, 0.5)

Reference = Callable[[Tensor], tuple[Tensor, Tensor | None]]
"""Normalised images (B, H, W, 3) float32 -> pooled features (B, D) and logits (B, K), computed from a file alone."""


@dataclass(frozen=True)
class Weights:
    """A model in memory.

    Args:
        config: what the backbone computes.
        backbone: its tensors, float32, timm's names.
        head: `head.weight` and `head.bias`, perhaps `representation.*`; empty without a classification head.
        objective: the recipe section the head belongs to; None without a head.
        classes: class names in the order of the labels, if known.
        pixels: how the model wants its images: res, mean, std, crop, interpolation.
        notes: what did not come along, one sentence each.
    """

    config: ViTConfig
    backbone: dict[str, Tensor]
    head: dict[str, Tensor]
    objective: dict[str, Any] | None
    classes: list[str] | None
    pixels: dict[str, Any]
    notes: tuple[str, ...] = field(default=())

    def noting(self, *notes: str) -> "Weights":
        """The same model with more notes."""
        return replace(self, notes=(*self.notes, *notes))

    def without_head(self) -> "Weights":
        """The backbone alone."""
        if not self.head:
            return self
        return replace(self, head={}, objective=None, classes=None).noting("the classification head is left out")

    @property
    def num_classes(self) -> int:
        """Classes of the head; 0 without one."""
        return len(self.head.get("head.bias", ())) if self.head else 0


def read_native(folder: Path) -> Weights:
    """Read a checkpoint folder; of a model without a classification head only the backbone.

    Raises:
        VitptError: exit 3 when the folder is damaged.
    """
    described = checkpoint.read_model_config(folder)
    tensors = checkpoint.load_weights(folder)
    backbone, head = (_with_prefix(tensors, prefix) for prefix in ("backbone.", "objective."))
    weights = Weights(
        config=ViTConfig.from_dict(described["model"], str(folder / "config.json")),
        backbone=backbone,
        head=head,
        objective=described["objective"],
        classes=described["classes"],
        pixels=described["pixels"],
    )
    kind = (weights.objective or {}).get("kind")
    if kind != "supervised":
        weights = replace(weights, head={}, objective=None, classes=None)
        if kind is not None:
            weights = weights.noting(f"only the backbone is written: the head of the {kind} objective has no classes")
    elif weights.num_classes and weights.objective and weights.objective.get("loss") == "sigmoid":
        weights = weights.noting("the head was trained with a sigmoid: its logits are of independent classes")
    if checkpoint.weights_file(folder).stem == checkpoint.EMA:
        weights = weights.noting("the weights are the moving average that the run kept")
    if weights.config.dropout or weights.config.drop_path:
        weights = weights.noting("dropout and stochastic depth are settings of training and are left out")
    return weights


def write_native(weights: Weights, folder: Path) -> None:
    """Write a checkpoint folder that holds only a model."""
    tensors = {f"backbone.{name}": value for name, value in weights.backbone.items()}
    tensors |= {f"objective.{name}": value for name, value in weights.head.items()}
    described = {
        "model": weights.config.to_dict(),
        "objective": weights.objective,
        "classes": weights.classes,
        "pixels": weights.pixels,
    }
    checkpoint.write_model(folder, tensors, described)


def position_table(weights: Weights) -> Tensor:
    """The positions as a learned table, (1, prefix + N, D): exact for fixed ones and for none (zeros)."""
    config = weights.config
    if config.pos_embed == "learned":
        return weights.backbone["pos_embed"]
    table = torch.zeros(1, config.num_prefix + config.num_patches, config.width)
    if config.pos_embed == "sincos2d":
        table[:, config.num_prefix :] = sincos2d(config.grid, config.width)
    return table


def require_float32(tensors: Mapping[str, Any], path: Path) -> None:
    """Refuse what would not survive the way there and back unchanged.

    Raises:
        VitptError: exit 3, naming the first array of another type.
    """
    for name, value in tensors.items():
        if str(value.dtype).removeprefix("torch.") != "float32":
            raise VitptError(f"{path}: {name} is {value.dtype}, expected float32", exit_code=Exit.DATA)


def largest_difference(weights: Weights, reference: Reference, path: Path) -> float:
    """Largest absolute difference of features and logits on two random images: this package's model against a file.

    Args:
        weights: the model.
        reference: an independent computation from the file alone.
        path: that file, for messages.

    Raises:
        VitptError: exit 3 when tensors are missing, superfluous or of another shape, or when the outputs differ.
    """
    model = _build(weights, path)
    images = torch.rand(2, *weights.config.image_size, 3, generator=torch.Generator().manual_seed(0))
    images = (images - torch.tensor(weights.pixels["mean"])) / torch.tensor(weights.pixels["std"])
    with torch.no_grad():
        ours = [model(images)]
        if weights.head:
            ours.append(_logits(weights, ours[0]))
        theirs = [output for output in reference(images) if output is not None]
    if len(ours) != len(theirs):
        raise VitptError(f"{path}: has a classification head on one side only", exit_code=Exit.DATA)
    largest = 0.0
    for own, other in zip(ours, theirs, strict=True):
        difference = (own.double() - other.double()).abs().max().item()
        # written so that NaN fails too
        if not difference <= TOLERANCE * max(1.0, other.abs().max().item()):
            raise VitptError(
                f"{path}: the converted model computes something else (difference {difference:.3g}); nothing was written",
                hint="the weights may not be finite; else please report this",
                exit_code=Exit.DATA,
            )
        largest = max(largest, difference)
    return largest


def _build(weights: Weights, path: Path) -> nn.Module:
    with torch.device("meta"):
        model = VisionTransformer(weights.config)
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()} | _head_shapes(weights)
    found = {name: tuple(value.shape) for name, value in {**weights.backbone, **weights.head}.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise VitptError(
                f"{path}: tensor {name}: found {found.get(name, 'none')}, expected {expected.get(name, 'none')}",
                hint="only plain Vision Transformers can be converted",
                exit_code=Exit.DATA,
            )
    if weights.config.pos_embed == "sincos2d":
        model.pos_embed = sincos2d(weights.config.grid, weights.config.width)
    model.load_state_dict(weights.backbone, assign=True)
    return model.eval()


def _head_shapes(weights: Weights) -> dict[str, tuple[int, ...]]:
    """The shapes that a head must have."""
    width = weights.config.width
    shapes: dict[str, tuple[int, ...]] = {}
    if weights.head:
        shapes |= {"head.weight": (weights.num_classes, width), "head.bias": (weights.num_classes,)}
    if any(name.startswith("representation.") for name in weights.head):
        shapes |= {"representation.weight": (width, width), "representation.bias": (width,)}
    return shapes


def _logits(weights: Weights, features: Tensor) -> Tensor:
    head = weights.head
    if "representation.weight" in head:
        features = torch.tanh(F.linear(features, head["representation.weight"], head["representation.bias"]))
    return F.linear(features, head["head.weight"], head["head.bias"])


def _with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
