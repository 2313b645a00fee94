"""What a run will cost: the printed plan, and the micro-batch that fits."""

import os

import torch
import torch.distributed as dist
from accelerate import Accelerator

from vitpt.errors import Exit, VitptError
from vitpt.fsio import size_text
from vitpt.models.variants import macs
from vitpt.objectives import Task
from vitpt.objectives.mpp import num_corrupted, num_outputs
from vitpt.train.job import Job

CPU_MICRO_BATCH = 64


def largest_share(batch: int, ranks: int) -> int:
    """Samples of a global batch that one process has to run."""
    return -(-batch // ranks)


def choose_micro_batch_size(task: Task, batch: int, ranks: int, accelerator: Accelerator) -> int:
    """The micro-batch for `auto`: the process's share, halved until a trial step fits; the same on all processes.

    On CPUs at most 64 samples.
    """
    size = largest_share(batch, ranks)
    if accelerator.device.type != "cuda":
        return min(size, CPU_MICRO_BATCH)
    while not _fits(task, size, accelerator):
        if size == 1:
            raise VitptError(
                "a single image does not fit into the GPU's memory with this model",
                hint="take a smaller model or resolution",
                exit_code=Exit.ENVIRONMENT,
            )
        size = -(-size // 2)
    if ranks > 1:
        tensor = torch.tensor([size], device=accelerator.device)
        dist.all_reduce(tensor, dist.ReduceOp.MIN)
        size = int(tensor.item())
    return size


def _fits(task: Task, size: int, accelerator: Accelerator) -> bool:
    """Whether forward and backward of one micro-batch fit beside the gradients and the optimizer's two moments."""
    device = accelerator.device
    config = task.backbone.config
    height, width = config.image_size
    try:
        task.to(device)
        moments = torch.empty(2 * sum(p.numel() for p in task.parameters()), device=device)
        ids = torch.zeros(size, dtype=torch.int64).numpy()
        draws = {name: torch.from_numpy(values).to(device) for name, values in task.draws(0, ids, ids).items()}
        images = torch.zeros(size, height, width, 3, dtype=torch.uint8, device=device)
        labels, weights = torch.zeros(size, dtype=torch.int64, device=device), torch.ones(size, device=device)
        with accelerator.autocast():
            loss = task(images, labels, weights, draws)
        loss.sum.backward()
        del moments
    except torch.OutOfMemoryError:
        return False
    finally:
        for parameter in task.parameters():
            parameter.grad = None
        torch.cuda.empty_cache()
    return True


def require_memory(job: Job) -> None:
    """Refuse a model that this machine cannot hold, before the system ends the process without a word.

    Raises:
        VitptError: exit 4.
    """
    if not hasattr(os, "sysconf"):
        return
    # on a CPU gradients and the optimizer's two moments lie beside the weights
    copies = 1 if torch.accelerator.is_available() else 4
    needed = 4 * copies * backbone_parameters(job)
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        raise VitptError(
            f"a model of {backbone_parameters(job) / 1e6:,.0f} M parameters needs {size_text(needed)} of memory, "
            f"this machine has {size_text(there)}",
            hint="take a smaller model",
            exit_code=Exit.ENVIRONMENT,
        )


def plan_rows(job: Job, *, ranks: int = 1) -> list[tuple[str, str]]:
    """The plan of a run as (what, how much) rows, for people."""
    recipe, model = job.recipe, job.model
    batch = recipe.train.global_batch_size
    images = job.steps * batch
    one = forward_macs(job)
    parameters = backbone_parameters(job)
    rows = [
        ("run", f"{job.folder} ({job.command})"),
        (
            "data",
            f"{recipe.data.path} {job.split.name}: {job.num_samples:,} samples, {len(job.dataset.classes)} classes",
        ),
        (
            "model",
            f"{model.width} wide, {model.depth} deep, {model.heads} heads, patch {model.patch}, {model.res} px: {parameters / 1e6:.2f} M parameters",
        ),
        ("objective", recipe.objective.kind),
        ("steps", f"{job.steps:,} of {batch:,} images = {images / job.num_samples:.1f} epochs"),
        ("compute", f"{one / 1e9:.3f} GMAC an image forward, {6 * one * images / 1e18:.3g} exaFLOPs in all"),
        ("checkpoint", f"{size_text(parameters * 12)} each, {recipe.save.keep_last} and the best one kept"),
    ]
    if batch > job.num_samples:
        rows.append(("note", f"a batch of {batch} holds some of the {job.num_samples} samples more than once"))
    if ranks > 1:
        rows.append(("processes", str(ranks)))
    return rows


def forward_macs(job: Job) -> int:
    """Multiply-adds of one forward pass of one image, head included."""
    objective = job.recipe.objective
    if objective.kind == "supervised":
        return macs(job.model, num_classes=job.num_classes or 0, representation=objective.representation)
    corrupted = num_corrupted(job.model.num_patches, objective.corrupt)
    return macs(job.model, predictions=corrupted * num_outputs(objective, job.model.patch))


def backbone_parameters(job: Job) -> int:
    """Parameters of the backbone, without a head (paper section 3.1)."""
    c = job.model
    positions = (c.num_patches + c.num_prefix) * c.width if c.pos_embed == "learned" else 0
    block = 4 * c.width + 4 * (c.width**2 + c.width) + 2 * c.width * c.mlp + c.mlp + c.width
    return c.patch**2 * 3 * c.width + c.width + c.depth * block + 2 * c.width + c.num_prefix * c.width + positions
