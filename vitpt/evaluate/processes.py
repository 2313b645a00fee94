"""The processes of a command: device, precision and group, by Accelerate."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs, LoggerType

from vitpt.errors import Exit, VitptError
from vitpt.fsio import nearest

COLLECTIVE_TIMEOUT = timedelta(minutes=10)  # rank 0 may be writing a checkpoint meanwhile


def make_accelerator(
    precision: Literal["auto", "fp32", "bf16"] = "auto", trackers: tuple[str, ...] = (), folder: Path | None = None
) -> Accelerator:
    """Join the processes that a launcher started, or be the only one.

    Args:
        precision: of the matrix products; auto is bf16 on CUDA, fp32 elsewhere.
        trackers: names of Accelerate's trackers.
        folder: where trackers may write.

    Raises:
        VitptError: a tracker is unknown (exit 2) or not installed (exit 4); the launcher started more processes than were
            joined (exit 4).
    """
    _check_trackers(trackers)
    if precision == "auto":
        precision = "bf16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "fp32"
    # a ViT has no buffers to broadcast; the bucket view saves one copy of the gradients
    ddp = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
    accelerator = Accelerator(
        # without it several processes on CPUs would each train alone
        cpu=not torch.accelerator.is_available(),
        mixed_precision="bf16" if precision == "bf16" else "no",
        kwargs_handlers=[ddp, InitProcessGroupKwargs(timeout=COLLECTIVE_TIMEOUT)],
        log_with=list(trackers) or None,
        project_dir=str(folder) if trackers else None,
    )
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != accelerator.num_processes:
        raise VitptError(
            f"the launcher started {started} processes, but {accelerator.num_processes} joined",
            hint="start with torchrun --nproc_per_node N -m vitpt ...",
            exit_code=Exit.ENVIRONMENT,
        )
    return accelerator


def _check_trackers(trackers: tuple[str, ...]) -> None:
    """Accelerate leaves out a tracker that is not installed without a word."""
    known = [kind.value for kind in LoggerType if kind != LoggerType.ALL]
    available = {kind.value for kind in get_available_trackers()} if trackers else set()
    for name in trackers:
        if name not in known:
            near = nearest(name, known)
            hint = f"did you mean {near}?" if near else f"known are {', '.join(known)}"
            raise VitptError(f"log.trackers: unknown tracker {name!r}", hint=hint)
        if name not in available:
            raise VitptError(
                f"log.trackers: {name} is not installed", hint=f"pip install {name}", exit_code=Exit.ENVIRONMENT
            )
