"""Small checkpoints with weights that make every part of the model matter."""

from pathlib import Path
from typing import Any

import torch

from vitpt import checkpoint
from vitpt.models.variants import ViTConfig
from vitpt.objectives import Task, build_task
from vitpt.recipe import schema

torch.set_num_threads(1)
SIZES = {"width": 12, "depth": 2, "heads": 3, "mlp": 20, "patch": 4, "res": 16}
CLASSES = ["ant", "bee", "cat", "dog", "eel"]


def write_checkpoint(
    folder: Path,
    section: schema.Supervised | schema.Mpp | None = None,
    *,
    pixels: dict[str, Any] | None = None,
    **options: Any,
) -> Task:
    """Write a native folder and return its model in evaluation mode."""
    section = section or schema.Supervised()
    config = ViTConfig(**{**SIZES, **options})
    task = build_task(config, section, len(CLASSES))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in task.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    described = {
        "model": config.to_dict(),
        "objective": section.model_dump(),
        "classes": CLASSES,
        "pixels": {
            "res": config.image_size[0],
            "mean": [0.5, 0.5, 0.5],
            "std": [0.5, 0.5, 0.5],
            "crop": {"kind": "squash"},
            "interpolation": "bilinear",
            **(pixels or {}),
        },
    }
    checkpoint.write_model(folder, task.state_dict(), described)
    return task.eval()
