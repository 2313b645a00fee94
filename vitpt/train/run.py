"""A run in memory: its state, its parts, and how it is saved."""

import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from vitpt import __version__, checkpoint
from vitpt.evaluate.run import Meter
from vitpt.objectives import Task
from vitpt.stream.loader import Loader
from vitpt.stream.order import Slots
from vitpt.train.ema import Ema
from vitpt.train.job import Job
from vitpt.train.metrics import BadSamples, DigestsFile, MetricsFile
from vitpt.train.optim import state_tensors


@dataclass
class State:
    """What a checkpoint says about how far a run is.

    Attributes:
        step: optimizer updates done.
        data_digest: sum mod 2^64 of the digests of all steps done.
        best: {metric, value, step} of the best evaluation, or None.
        totals: [sum, count] of the metrics since the last log line.
        pending: the record of this step, when its evaluation was abandoned by a signal.
    """

    step: int = 0
    data_digest: int = 0
    best: dict[str, Any] | None = None
    totals: dict[str, list[float]] = field(default_factory=dict)
    pending: dict[str, Any] | None = None

    @property
    def recorded(self) -> int:
        """The last step whose record is final."""
        return self.step - 1 if self.pending is not None else self.step


@dataclass
class Run:
    """Everything a step needs. `task` is the prepared module, `module` the same without wrappers."""

    job: Job
    accelerator: Accelerator
    cpu_group: dist.ProcessGroup | None
    slots: Slots
    task: nn.Module
    module: Task
    optimizer: Optimizer
    ema: Ema | None
    loader: Loader
    eval_loader: Loader | None
    eval_steps: int
    state: State
    meter: Meter
    metrics: MetricsFile | None
    digests: DigestsFile | None
    bad: BadSamples
    precision: str
    converted: int = 0  # samples that came in an unusual format, over all processes since this start

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return int(self.accelerator.num_processes)

    @property
    def rank(self) -> int:
        """This process."""
        return int(self.accelerator.process_index)

    @property
    def main(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    def reduce(self, tensor: Tensor) -> Tensor:
        """Sum over all processes, on the device."""
        return self.accelerator.reduce(tensor, "sum") if self.ranks > 1 else tensor

    def agree(self, flags: list[int]) -> list[int]:
        """The largest value of each flag over all processes; never touches the device."""
        if self.cpu_group is None:
            return flags
        tensor = torch.tensor(flags, dtype=torch.int64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.cpu_group)
        return tensor.tolist()

    def gather(self, items: list[Any]) -> list[Any]:
        """The items of all processes, in the order of the ranks."""
        if self.cpu_group is None:
            return items
        gathered: list[Any] = [None] * self.ranks
        dist.all_gather_object(gathered, items, group=self.cpu_group)
        return [item for part in gathered for item in part]

    def sum(self, numbers: list[int]) -> list[int]:
        """Sums mod 2^64 over all processes."""
        if self.cpu_group is None:
            return [number % 2**64 for number in numbers]
        tensor = torch.from_numpy(np.array(numbers, np.uint64).view(np.int64))
        dist.all_reduce(tensor, dist.ReduceOp.SUM, group=self.cpu_group)  # wraps, as unsigned would
        return [int(value) for value in tensor.numpy().view(np.uint64)]

    def save(self) -> Path | None:
        """Write a checkpoint of the current state; only rank 0 writes, the others go on."""
        totals = self.meter.totals(self.reduce)
        if not self.main:
            return None
        job, recipe = self.job, self.job.recipe
        tensors: dict[str, checkpoint.Tensors] = {
            checkpoint.MODEL: self.module.state_dict(),
            checkpoint.OPTIMIZER: state_tensors(self.optimizer, self.module),
        }
        if self.ema is not None:
            tensors[checkpoint.EMA] = self.ema.average
        state = {
            **asdict(self.state),
            "data_digest": f"{self.state.data_digest:016x}",
            "totals": totals,
            "samples_seen": self.state.step * recipe.train.global_batch_size,
            "global_batch_size": recipe.train.global_batch_size,
            "seed": recipe.seed,
            "order": job.data["order"],
            "recipe_hash": job.recipe_hash,
            "data_hash": job.data_hash,
            "versions": versions(self),
        }
        folder = checkpoint.save(job.checkpoints, self.state.step, tensors, state, checkpoint_config(job))
        if self.state.best is not None and self.state.best["step"] == self.state.step:
            checkpoint.point(job.checkpoints, "BEST", folder.name)
        checkpoint.prune(job.checkpoints, recipe.save.keep_last)
        return folder


def checkpoint_config(job: Job) -> dict[str, Any]:
    """config.json of the job's checkpoints: the model, its objective, its classes, and how it wants its pixels."""
    recipe = job.recipe
    crop = recipe.eval.crop.model_dump() if recipe.eval else {"kind": "squash"}
    return {
        "model": job.model.to_dict(),
        "objective": recipe.objective.model_dump(mode="json"),
        "classes": list(job.dataset.classes) if job.num_classes else None,
        "pixels": {
            "res": job.model.res,
            "mean": list(recipe.data.mean),
            "std": list(recipe.data.std),
            "crop": crop,
            "interpolation": "bilinear",
        },
    }


def versions(run: Run) -> dict[str, Any]:
    """What the last bits of the weights depend on."""
    return {
        "vitpt": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ranks": run.ranks,
        "micro_batch_size": run.slots.size,
        "micros": run.slots.micros,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "device": run.accelerator.device.type,
        "precision": run.precision,
        "decoder": run.loader.decoder_name,
    }
