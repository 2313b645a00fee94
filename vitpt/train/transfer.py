"""Weights of a checkpoint put into a model of another resolution, pooling or objective."""

from collections.abc import Mapping

import torch
from torch import Tensor

from vitpt.checkpoint import load_into
from vitpt.models.posembed import resize_pos_embed
from vitpt.models.variants import ViTConfig
from vitpt.objectives.task import Task

BACKBONE = "backbone."


def load_backbone(task: Task, tensors: Mapping[str, Tensor], old: ViTConfig, source: str) -> list[str]:
    """Start a task's backbone from a checkpoint; the objective keeps its fresh parameters.

    Positions are resized to the new grid; a class token is dropped (`gap`) or begun afresh (`tok`) as the new model wants.

    Args:
        task: initialised task.
        tensors: model tensors of the checkpoint.
        old: the checkpoint's model.
        source: name of the checkpoint for messages.

    Returns:
        One line for each thing that was changed on the way.
    """
    new = task.backbone.config
    weights = {name.removeprefix(BACKBONE): tensor for name, tensor in tensors.items() if name.startswith(BACKBONE)}
    said = []
    fresh = dict(task.backbone.named_parameters())
    positions = weights.get("pos_embed")
    if positions is not None and (old.grid != new.grid or old.pool != new.pool):
        weights["pos_embed"] = _positions(positions, fresh["pos_embed"].detach(), old, new)
    if positions is not None and old.grid != new.grid:
        said.append(
            f"position embedding resized from {old.grid[0]}x{old.grid[1]} to {new.grid[0]}x{new.grid[1]} patches"
        )
    if old.pool == "tok" and new.pool == "gap":
        del weights["cls_token"]
        said.append("class token dropped: the new model reads the mean of the patches (pool: gap)")
    if old.pool == "gap" and new.pool == "tok":
        weights["cls_token"] = fresh["cls_token"].detach()
        said.append("class token begun afresh: the checkpoint has none (pool: tok)")
    load_into(fresh, weights, source)
    return said


def _positions(positions: Tensor, fresh: Tensor, old: ViTConfig, new: ViTConfig) -> Tensor:
    """(1, N, D) or (1, N + 1, D) positions of the new model from those of the old."""
    prefix = positions[:, : old.num_prefix]
    patches = resize_pos_embed(positions[:, old.num_prefix :], old.grid, new.grid, False)
    if new.num_prefix == 0:
        return patches
    return torch.cat([prefix if old.num_prefix else fresh[:, :1], patches], dim=1)
