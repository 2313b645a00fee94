"""From a checked job to a run that can step: processes, model, optimizer, data, and the state to go on from."""

import ctypes
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.optim import Optimizer

from vitpt import checkpoint
from vitpt.errors import Exit, VitptError
from vitpt.evaluate.processes import COLLECTIVE_TIMEOUT, make_accelerator
from vitpt.evaluate.run import Meter
from vitpt.fsio import make_folder, parse_json, remove_temporary_files, require_free_space, write_bytes, write_json
from vitpt.models.variants import ViTConfig
from vitpt.objectives import Task, build_task
from vitpt.recipe.load import dump_yaml
from vitpt.stream.choose import choose
from vitpt.stream.loader import Loader
from vitpt.stream.order import Slots, make_slots
from vitpt.stream.plan import evaluation_planner, training_planner
from vitpt.train.budget import choose_micro_batch_size, require_memory
from vitpt.train.ema import Ema
from vitpt.train.job import Job
from vitpt.train.metrics import BadSamples, DigestsFile, MetricsFile, Report
from vitpt.train.optim import build_optimizer, load_state
from vitpt.train.run import Run, State
from vitpt.train.transfer import load_backbone


def start(job: Job, report: Report) -> Run:
    """Build the run of a job and go on from its newest good checkpoint, if it has one."""
    recipe = job.recipe
    accelerator = _accelerator(job)
    device = accelerator.device
    if device.type == "cpu":
        keep_freed_memory()
    cpu_group = _cpu_group(accelerator)
    choose(recipe.data.decoder, device, 1)  # refused before anything is written
    if accelerator.process_index == 0:
        prepare_folder(job)
    accelerator.wait_for_everyone()

    precision = accelerator_precision(accelerator)
    require_memory(job)
    task = build_task(job.model, recipe.objective, job.num_classes, recipe.data.mean, recipe.data.std)
    task.initialise(torch.Generator().manual_seed(recipe.seed))
    if job.init is not None:
        old = ViTConfig.from_dict(job.init.config["model"], str(job.init.folder / "config.json"))
        weights = checkpoint.load_weights(job.init.folder)
        for line in load_backbone(task, weights, old, str(job.init.folder)):
            report.say(line)
    slots = _slots(job, accelerator, task)
    prepared = accelerator.prepare(task)
    optimizer = build_optimizer(recipe.optim, task)
    ema = Ema(task, recipe.ema.decay) if recipe.ema else None
    state = _restore(job, accelerator, task, optimizer, ema, report)
    main = accelerator.process_index == 0
    loader, eval_loader, eval_steps = _loaders(job, accelerator, task, slots)
    for line in _how(job, accelerator, slots, loader):
        report.say(line)
    meter = Meter(device)
    if main:
        meter.load(state.totals)
    metrics = MetricsFile(job.folder / "metrics.jsonl", state.recorded) if main else None
    if metrics is not None and metrics.damaged:
        report.say(f"{metrics.path}: {metrics.damaged} damaged lines left out")
    return Run(
        job=job,
        accelerator=accelerator,
        cpu_group=cpu_group,
        slots=slots,
        task=prepared,
        module=task,
        optimizer=optimizer,
        ema=ema,
        loader=loader,
        eval_loader=eval_loader,
        eval_steps=eval_steps,
        state=state,
        meter=meter,
        metrics=metrics,
        digests=DigestsFile(job.folder / "digests.npy", job.steps) if main else None,
        bad=BadSamples(job.folder / "bad_samples.jsonl", job.num_samples, recipe.data.max_bad_fraction),
        precision=precision,
    )


def _how(job: Job, accelerator: Accelerator, slots: Slots, loader: Loader) -> list[str]:
    """How the run goes on this machine, which decides its speed and not what it learns; one line each."""
    processes = "1 process" if slots.ranks == 1 else f"{slots.ranks} processes"
    threads = f", {torch.get_num_threads()} threads" if accelerator.device.type == "cpu" else ""
    lines = [
        f"{processes} on {accelerator.device.type}{threads}, {accelerator_precision(accelerator)}, "
        f"{slots.micros} x {slots.size} images a step each",
        f"decoder {loader.decoder_name}: {loader.decoder_why}",
    ]
    if job.model.dropout:
        lines.append(
            "dropout is seeded by process and micro-batch: with another number of them other elements are dropped"
        )
    return lines


def prepare_folder(job: Job) -> None:
    """Make the run's folder and write what describes the run, before the first step."""
    make_folder(job.checkpoints)
    checkpoint.remove_leftovers(job.checkpoints)
    remove_temporary_files(job.folder)
    write_bytes(job.folder / "recipe.yaml", dump_yaml(job.recipe).encode())
    write_json(job.folder / "data.json", job.data)
    if job.init is not None:
        write_json(job.folder / "init.json", {"checkpoint": str(job.init.folder), "sha256": job.init.sha256})


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory, so that a step on the CPU does not pay page faults for its activations each time.

    Measured on two cores, width 128, depth 4: 10 to 15 % more images a second. Elsewhere this does nothing.
    """
    if sys.platform != "linux":
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    m_trim_threshold, m_mmap_max = -1, -4
    mallopt(m_mmap_max, 0)
    mallopt(m_trim_threshold, 2**31 - 1)


def accelerator_precision(accelerator: Accelerator) -> str:
    """fp32 or bf16."""
    return "bf16" if accelerator.mixed_precision == "bf16" else "fp32"


def _accelerator(job: Job) -> Accelerator:
    recipe = job.recipe
    accelerator = make_accelerator(recipe.train.precision, recipe.log.trackers, job.folder)
    if recipe.log.trackers:
        accelerator.init_trackers(recipe.name, config={"recipe_hash": job.recipe_hash})
    return accelerator


def _cpu_group(accelerator: Accelerator) -> dist.ProcessGroup | None:
    """A group for small agreements between hosts, or None for one process."""
    if accelerator.num_processes == 1:
        return None
    group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
    return group if isinstance(group, dist.ProcessGroup) else None


def _slots(job: Job, accelerator: Accelerator, task: Task) -> Slots:
    """How the global batch lies in micro-batches: as plan.json says for this number of processes, else chosen now and kept."""
    ranks, batch = accelerator.num_processes, job.recipe.train.global_batch_size
    path = job.folder / "plan.json"
    plan = _read_plan(path)
    asked = job.recipe.train.micro_batch_size
    known = plan["micro_batch_sizes"].get(str(ranks))
    size = asked if isinstance(asked, int) else known
    if size is None:
        size = choose_micro_batch_size(task, batch, ranks, accelerator)
    slots = make_slots(batch, ranks, int(size))
    if accelerator.process_index == 0:
        plan["micro_batch_sizes"][str(ranks)] = slots.size
        write_json(path, plan)
    return slots


def _read_plan(path: Path) -> dict[str, Any]:
    """plan.json; what is not there or of no use is chosen again."""
    try:
        sizes = dict(parse_json(path.read_bytes())["micro_batch_sizes"])
    except (OSError, ValueError, KeyError, TypeError):
        sizes = {}
    return {"micro_batch_sizes": {k: size for k, size in sizes.items() if isinstance(size, int) and size >= 1}}


def _loaders(job: Job, accelerator: Accelerator, task: Task, slots: Slots) -> tuple[Loader, Loader | None, int]:
    recipe, rank, ranks = job.recipe, accelerator.process_index, accelerator.num_processes
    size = job.model.image_size[0]

    def loader(planner: Any, split: Any) -> Loader:
        return Loader(
            planner,
            split,
            size,
            decoder=recipe.data.decoder,
            threads=recipe.data.threads,
            prefetch=recipe.data.prefetch,
            crc=recipe.data.crc,
            device=accelerator.device,
        )

    training = loader(training_planner(recipe.data, size, recipe.seed, job.split, slots, rank, task.draws), job.split)
    if recipe.eval is None or job.eval_split is None:
        return training, None, 0
    planner = evaluation_planner(
        recipe.eval.crop,
        size,
        recipe.seed,
        job.eval_split,
        slots.size,
        ranks,
        rank,
        task.draws,
        job.num_classes is not None,
    )
    return training, loader(planner, job.eval_split), planner.steps or 0


def _restore(
    job: Job, accelerator: Accelerator, task: Task, optimizer: Optimizer, ema: Ema | None, report: Report
) -> State:
    """Load the newest good checkpoint into model, optimizer and average; all processes take the one that rank 0 found."""
    chosen: list[Any] = [None, []]
    if accelerator.process_index == 0:
        folder, damaged = checkpoint.latest_good(job.checkpoints)
        chosen = [None if folder is None else folder.name, damaged]
    if accelerator.num_processes > 1:
        dist.broadcast_object_list(chosen, src=0, device=accelerator.device)
    name, damaged = chosen
    for line in damaged:
        report.say(f"{line}; an older checkpoint is taken" if name else line)
    if name is None:
        if damaged:
            raise VitptError(
                f"{job.checkpoints}: no checkpoint is undamaged",
                hint="remove the run's folder to start again",
                exit_code=Exit.DATA,
            )
        _check_disk(job, task)
        return State()
    folder = job.checkpoints / name
    stored = checkpoint.verify(folder) if accelerator.process_index == 0 else checkpoint.read_state(folder)
    _check_identity(job, folder, stored)
    checkpoint.load_into(dict(task.named_parameters()), checkpoint.load_tensors(folder), str(folder))
    load_state(optimizer, task, checkpoint.load_tensors(folder, checkpoint.OPTIMIZER))
    if ema is not None:
        ema.load(checkpoint.load_tensors(folder, checkpoint.EMA))
    report.say(f"resuming {job.folder} after step {stored['step']}")
    return State(
        step=stored["step"],
        data_digest=int(stored["data_digest"], 16),
        best=stored["best"],
        totals=stored["totals"],
        pending=stored["pending"],
    )


def _check_identity(job: Job, folder: Path, stored: dict[str, Any]) -> None:
    for key, now in (("recipe_hash", job.recipe_hash), ("data_hash", job.data_hash)):
        if stored[key] != now:
            raise VitptError(
                f"{folder}: its {key} is {stored[key][:12]}, this run's is {now[:12]}",
                hint="give a new --out to start another run",
            )


def _check_disk(job: Job, task: Task) -> None:
    parameters = sum(p.numel() for p in task.parameters())
    copies = 3 + (1 if job.recipe.ema else 0)
    kept = job.recipe.save.keep_last + 2  # BEST, and the one being written
    require_free_space(job.folder, parameters * 4 * copies * kept, f"keeping {kept} checkpoints")
