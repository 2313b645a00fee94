"""Reference values and the small models they belong to; `oracles.json` says how each value was made."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitpt.models.variants import ViTConfig
from vitpt.models.vit import VisionTransformer

ORACLES: dict[str, Any] = json.loads((Path(__file__).parent / "oracles.json").read_text())


def formula(
    shape: tuple[int, ...], amplitude: float, frequency: float, phase: float = 0.0, offset: float = 0.0
) -> Tensor:
    """The array S of the oracles, float64: element i in C order is offset + amplitude * sin(frequency * i + phase)."""
    values = offset + amplitude * np.sin(frequency * np.arange(np.prod(shape)) + phase)
    return torch.from_numpy(values).reshape(shape)


def tiny_weights() -> dict[str, Tensor]:
    """Parameters of `tiny_vit`, timm's names, with the head."""
    weights = {}
    for k, (name, shape) in enumerate(ORACLES["tiny_vit"]["order"]):
        is_norm = "norm" in name and name.endswith("weight")
        weights[name] = formula(tuple(shape), 0.3, 0.37, k, 1.0 if is_norm else 0.0)
    return weights


def tiny_images() -> Tensor:
    """(2, 8, 12, 3) float64, channels last."""
    return formula((2, 3, 8, 12), 1, 0.1).permute(0, 2, 3, 1).contiguous()


def tiny_vit(**options: Any) -> VisionTransformer:
    """`tiny_vit` in float64, filled by formula, without dropout."""
    config = ViTConfig(**{"width": 8, "depth": 2, "heads": 2, "mlp": 16, "patch": 4, "res": (8, 12), **options})
    model = VisionTransformer(config).double().eval()
    weights = {name: value for name, value in tiny_weights().items() if not name.startswith("head.")}
    if config.pool == "gap":
        del weights["cls_token"]
        weights["pos_embed"] = weights["pos_embed"][:, 1:]
    model.load_state_dict(weights)
    return model
