"""Evaluation of a checkpoint on its own, outside a run."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from vitpt import checkpoint
from vitpt.dataset import Split, open_dataset
from vitpt.errors import Exit, VitptError
from vitpt.evaluate.processes import make_accelerator
from vitpt.evaluate.run import Evaluation, evaluate, means
from vitpt.fsio import nearest
from vitpt.models.variants import ViTConfig
from vitpt.objectives import Task, build_task
from vitpt.recipe import schema
from vitpt.stream.loader import Loader
from vitpt.stream.plan import evaluation_planner


def load_task(folder: Path) -> tuple[Task, dict[str, Any]]:
    """The task of a checkpoint with its weights (the moving average, if the run kept one), and its config.json."""
    config = checkpoint.read_model_config(folder)
    section = TypeAdapter[Any](schema.Supervised | schema.Mpp).validate_python(config["objective"])
    pixels, tensors = config["pixels"], checkpoint.load_weights(folder)
    # a converted .npz knows how many classes it has, but not their names
    head = tensors.get("objective.head.bias") if section.kind == "supervised" else None
    num_classes = None if head is None else len(head)
    model = ViTConfig.from_dict(config["model"], str(folder / "config.json"))
    task = build_task(model, section, num_classes, tuple(pixels["mean"]), tuple(pixels["std"]))
    checkpoint.load_into(dict(task.named_parameters()), tensors, str(folder))
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
    if (checkpoint.read_config(folder)["objective"] or {}).get("kind") != "supervised":
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

    accelerator = make_accelerator()
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
    num_classes = len(task.objective.head.bias)
    table = _class_table(dataset.classes, config["classes"], num_classes, dataset.root)
    task.to(accelerator.device)
    reduce = accelerator.reduce if accelerator.num_processes > 1 else _same
    result = evaluate(task, loader, planner.steps or 0, reduce, advance=advance, relabel=table.to(accelerator.device))
    if result is None:
        raise RuntimeError("an evaluation that nobody stops was abandoned")
    return {"checkpoint": str(folder), "data": data, **_counted(split, result)}


def _counted(split: Split, result: Evaluation) -> dict[str, Any]:
    """What an evaluation gave; nothing is no result."""
    if not result.samples:
        raise VitptError(
            f"{split.root}: none of the {result.bad} samples of split {split.name!r} could be read",
            hint="the shards are damaged: copy or write this dataset again",
            exit_code=Exit.DATA,
        )
    return {
        "split": split.name,
        "samples": result.samples,
        "unlabelled": split.num_samples - split.num_labelled,
        "bad": result.bad,
        **means(result.totals),
    }


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _class_table(names: Sequence[str], known: Sequence[str] | None, num_classes: int, root: Path) -> torch.Tensor:
    """The model's class of each label of the data, matched by name; by number where the model has no names."""
    if known is None:
        if len(names) != num_classes:
            raise VitptError(
                f"{root}: {len(names)} classes, but the model has {num_classes}, without names to match",
                hint="convert from a checkpoint that has class names",
                exit_code=Exit.DATA,
            )
        return torch.arange(num_classes)
    position = {name: index for index, name in enumerate(known)}
    unknown = [name for name in names if name not in position]
    if unknown:
        near = nearest(unknown[0], known)
        others = f" ({len(unknown)} of {len(names)} are not)" if len(unknown) > 1 else ""
        raise VitptError(
            f"{root}: class {unknown[0]!r} is not among the {len(known)} classes of the model{others}",
            hint=f"nearest: {near!r}" if near else f"the model knows {', '.join(map(repr, list(known)[:3]))}, ...",
            exit_code=Exit.DATA,
        )
    twice = [name for name in names if known.count(name) > 1]
    if twice:
        raise VitptError(f"{root}: the model has more than one class called {twice[0]!r}", exit_code=Exit.DATA)
    return torch.tensor([position[name] for name in names], dtype=torch.int64)
