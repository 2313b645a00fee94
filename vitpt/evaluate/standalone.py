"""Evaluation of a checkpoint on its own, outside a run."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from pydantic import TypeAdapter

from vitpt import checkpoint
from vitpt.dataset import open_dataset
from vitpt.errors import Exit, VitptError
from vitpt.evaluate.run import evaluate, means
from vitpt.fsio import nearest
from vitpt.models.variants import ViTConfig
from vitpt.objectives import Task, build_task
from vitpt.recipe import schema
from vitpt.stream.loader import Loader
from vitpt.stream.plan import evaluation_planner


def load_task(folder: Path) -> tuple[Task, dict[str, Any]]:
    """The task of a checkpoint with its weights (the moving average, if the run kept one), and its config.json."""
    config = checkpoint.read_config(folder)
    section = TypeAdapter[Any](schema.Supervised | schema.Mpp).validate_python(config["objective"])
    classes, pixels = config["classes"], config["pixels"]
    model = ViTConfig.from_dict(config["model"])
    task = build_task(model, section, len(classes) if classes else None, tuple(pixels["mean"]), tuple(pixels["std"]))
    checkpoint.load_into(dict(task.named_parameters()), checkpoint.load_weights(folder), str(folder))
    return task, config


def evaluate_checkpoint(
    path: Path,
    data: str,
    split_name: str,
    *,
    batch: int,
    decoder: str,
    say: Callable[[str], None],
    advance: Callable[[], None],
) -> dict[str, Any]:
    """Evaluate a classifier on one split.

    Args:
        path: a run, a checkpoint or a converted folder.
        data: folder of shards, or bundled:NAME.
        split_name: split to evaluate on.
        batch: images a process runs at once.
        decoder: who decodes the images.
        say: takes the line that tells what is evaluated on what.
        advance: called after each batch.

    Returns:
        checkpoint, data, split, samples (exactly counted), unlabelled, bad, and the mean of each metric.
    """
    folder = checkpoint.find(path)
    if checkpoint.read_config(folder)["objective"]["kind"] != "supervised":
        raise VitptError(
            f"{folder}: has no classification head to evaluate", hint=f"fine-tune it: vitpt finetune --from {path}"
        )
    dataset = open_dataset(data)
    split = dataset.split(split_name)
    if not split.num_labelled:
        raise VitptError(f"{dataset.root}: no sample of split {split_name!r} has a label", exit_code=Exit.DATA)
    task, config = load_task(folder)
    crop = TypeAdapter[Any](schema.EvalCrop).validate_python(config["pixels"]["crop"])
    size = task.backbone.config.image_size[0]
    say(f"evaluating {folder} on {data} {split_name} ({size} px, {crop.kind})")

    accelerator = Accelerator()
    planner = evaluation_planner(
        crop,
        size,
        0,
        split,
        batch,
        accelerator.num_processes,
        accelerator.process_index,
        task.draws,
        labelled_only=True,
    )
    loader = Loader(
        planner, split, size, decoder=decoder, threads="auto", prefetch=2, crc="always", device=accelerator.device
    )
    table = _class_table(dataset.classes, config["classes"], dataset.root)
    task.to(accelerator.device)
    reduce = accelerator.reduce if accelerator.num_processes > 1 else _same
    totals = evaluate(task, loader, planner.steps or 0, reduce, advance=advance, relabel=table.to(accelerator.device))
    values = totals or {}
    counted = round(values["top1"][1]) if "top1" in values else 0
    return {
        "checkpoint": str(folder),
        "data": data,
        "split": split_name,
        "samples": counted,
        "unlabelled": split.num_samples - split.num_labelled,
        "bad": split.num_labelled - counted,
        **means(values),
    }


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _class_table(names: Sequence[str], known: Sequence[str], root: Path) -> torch.Tensor:
    """The model's class of each label of the data, matched by name."""
    position = {name: index for index, name in enumerate(known)}
    unknown = [name for name in names if name not in position]
    if unknown:
        near = nearest(unknown[0], known)
        raise VitptError(
            f"{root}: class {unknown[0]!r} is not among the {len(known)} classes of the model"
            + (f" ({len(unknown)} of {len(names)} are not)" if len(unknown) > 1 else ""),
            hint=f"nearest: {near!r}" if near else f"the model knows {', '.join(map(repr, list(known)[:3]))}, ...",
            exit_code=Exit.DATA,
        )
    return torch.tensor([position[name] for name in names], dtype=torch.int64)
