"""The training loop. Everything that happens in a step is on this page."""

import math
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from vitpt import checkpoint
from vitpt.draws import Purpose, words
from vitpt.errors import Exit, VitptError
from vitpt.evaluate.run import evaluate, means
from vitpt.fsio import write_json
from vitpt.stream.digest import digest
from vitpt.stream.loader import Batch
from vitpt.train.budget import forward_macs
from vitpt.train.claim import first_process
from vitpt.train.job import Job
from vitpt.train.metrics import Record, Report
from vitpt.train.optim import set_learning_rate
from vitpt.train.run import Run
from vitpt.train.schedule import learning_rate
from vitpt.train.setup import start
from vitpt.train.signals import StopSignals
from vitpt.train.status import Status


@dataclass
class Interval:
    """What was measured since the last log line; `digests` holds one number a step."""

    started: float = field(default_factory=time.perf_counter)
    data_wait: float = 0.0
    images: int = 0
    digests: list[int] = field(default_factory=list)
    bad: list[Record] = field(default_factory=list)
    first_step: int = 0


def train(job: Job, report: Report) -> Record:
    """Run a job to its end, from where it stands; status.json says how it went.

    Returns:
        The content of summary.json.
    """
    status = Status(job.folder, job.command, first_process())
    with status.recorded():
        run = start(job, report)
        status.progress = run.state
        return fit(run, report, status)


def fit(run: Run, report: Report, status: Status) -> Record:
    """Train from the run's state to its last step.

    Returns:
        The content of summary.json.

    Raises:
        VitptError: 5 when the loss is not finite or too many samples are bad; 75 or 130 after a checkpoint, when a signal came.
    """
    recipe, state, slots = run.job.recipe, run.state, run.slots
    # DDP takes the mean over ranks: times their number it is the sum over the global batch
    scale = run.ranks / (slots.batch * run.module.objective.units)
    clip = recipe.optim.clip_grad_norm
    norm = torch.zeros(())
    last_saved = time.monotonic()
    interval = Interval(first_step=state.step)
    record: Record
    run.task.train()
    report.begin(state.step, run.job.steps)
    with StopSignals() as stop, run.loader.batches(state.step, run.job.steps) as batches:
        if state.pending is not None:
            record, state.pending = state.pending, None
            _finish_step(run, report, stop, record, saving=True)
        for step in range(state.step, run.job.steps):
            set_learning_rate(run.optimizer, learning_rate(recipe.schedule, recipe.optim.lr, run.job.steps, step))
            step_digest = 0
            for micro in range(slots.micros):
                batch = next(batches)
                seed_dropout(run, step, micro)
                last = micro == slots.micros - 1
                with nullcontext() if last else run.accelerator.no_sync(run.task):
                    loss = run.task(batch.images[0], batch.labels, batch.weights, batch.draws)
                    run.accelerator.backward(loss.sum * scale)
                run.meter.add(loss)
                step_digest += digest(batch.plan)
                _count(interval, batch)
            norm = run.accelerator.clip_grad_norm_(run.task.parameters(), clip if clip is not None else float("inf"))
            run.optimizer.step()
            run.optimizer.zero_grad(set_to_none=True)
            state.step = step + 1
            if run.ema is not None:
                run.ema.update(state.step)
            interval.digests.append(step_digest % 2**64)
            report.advance(state.step)

            minutes = recipe.save.every_minutes
            overdue = run.main and minutes is not None and time.monotonic() - last_saved > 60 * minutes
            signal, overdue_anywhere = run.agree([stop.received, int(overdue)])
            finished = state.step == run.job.steps
            logging = due(state.step, recipe.log.every_steps) or finished
            saving = due(state.step, recipe.save.every_steps) or finished or bool(signal) or bool(overdue_anywhere)
            record = {}
            if logging or saving or _evaluating(run):
                _collect_digests(run, interval)
                check_finite(run, interval, norm)
            if logging:
                record = _log(run, interval, norm)
                interval = Interval(first_step=state.step)
            before = time.perf_counter()
            _finish_step(run, report, stop, record, saving=saving)
            interval.started += time.perf_counter() - before  # images_per_s is of training alone
            if saving:
                last_saved = time.monotonic()
                status.write("running")
            if signal and not finished:
                raise _stopped(run, signal)
    return _summary(run)


def due(step: int, every: int) -> bool:
    """Whether something that happens every `every` steps happens after this one."""
    return step % every == 0


def seed_dropout(run: Run, step: int, micro: int) -> None:
    """Element dropout is the one draw that belongs to (seed, step, rank, micro-batch) instead of a sample."""
    if run.job.model.dropout:
        key = np.array([run.rank << 32 | micro], np.int64)
        low, high = words(run.job.recipe.seed, np.array([step], np.int64), key, Purpose.DROPOUT, 2)[0].tolist()
        torch.manual_seed(high << 32 | low)


def check_finite(run: Run, interval: Interval, norm: torch.Tensor) -> None:
    """Stop before a bad state replaces a good checkpoint.

    Raises:
        VitptError: exit 5, naming the steps among which it happened.
    """
    loss, count = run.meter.totals(run.reduce)["loss"]
    if torch.isfinite(torch.tensor(loss)) and bool(torch.isfinite(norm).item()):
        return
    what = f"the loss is {loss / max(count, 1):.4g}, the gradient norm {float(norm):.4g}"
    raise VitptError(
        f"diverged between steps {interval.first_step + 1} and {run.state.step}: {what}",
        hint="try a smaller optim.lr or a longer warmup with a new --out; earlier checkpoints of this run are good",
        exit_code=Exit.FAILED,
    )


def _evaluating(run: Run) -> bool:
    section = run.job.recipe.eval
    return section is not None and (due(run.state.step, section.every_steps) or run.state.step == run.job.steps)


def _count(interval: Interval, batch: Batch) -> None:
    interval.data_wait += batch.wait_s
    interval.images += int((batch.plan.ids >= 0).sum())
    interval.bad += [asdict(sample) for sample in batch.bad]


def _collect_digests(run: Run, interval: Interval) -> None:
    """Add this interval's digests over all processes, and its bad samples."""
    if interval.digests:
        totals = run.sum(interval.digests)
        run.state.data_digest = (run.state.data_digest + sum(totals)) % 2**64
        if run.digests is not None:
            run.digests.put(run.state.step, totals)
        interval.digests = []
    (run.converted,) = run.sum([run.loader.converted])
    (any_bad,) = run.agree([len(interval.bad)])
    if any_bad:
        bad, interval.bad = interval.bad, []
        run.bad.add(run.gather(bad), write=run.main)


def _log(run: Run, interval: Interval, norm: torch.Tensor) -> Record:
    """The record of a log step; the running sums begin again."""
    recipe, state = run.job.recipe, run.state
    seconds = time.perf_counter() - interval.started
    totals = run.meter.totals(run.reduce)
    run.meter.load({})
    batch = recipe.train.global_batch_size
    return {
        **{f"train/{name}": value for name, value in means(totals).items()},
        "train/lr": learning_rate(recipe.schedule, recipe.optim.lr, run.job.steps, state.step - 1),
        "train/grad_norm": float(norm),
        "train/images_per_s": interval.images * run.ranks / seconds,
        "train/data_wait": interval.data_wait / seconds,
        "bad_samples": len(run.bad.ids),
        "converted_samples": run.converted,
        "epoch": state.step * batch / run.job.num_samples,
        "images_seen": state.step * batch,
        "data_digest": f"{state.data_digest:016x}",
    }


def _finish_step(run: Run, report: Report, stop: StopSignals, record: Record, *, saving: bool) -> None:
    """Evaluate, write the record and save, in this order."""
    state = run.state
    improved = False
    if _evaluating(run):
        values = _evaluate(run, stop)
        if values is None:  # a signal came: evaluated again on resume
            state.pending = record
            run.save()
            raise _stopped(run, run.agree([stop.received])[0])
        record |= values
        improved = _is_best(run, values)
    if record:
        record = {"step": state.step, **record}
        if run.metrics is not None:
            run.metrics.append(record)
        run.accelerator.log({k: v for k, v in record.items() if isinstance(v, int | float)}, step=state.step)
        report.record(record)
    if saving or improved:
        run.save()


def _evaluate(run: Run, stop: StopSignals) -> Record | None:
    """Metrics of the evaluation split as `<split>/<metric>`; None when a signal came."""
    section = run.job.recipe.eval
    if section is None or run.eval_loader is None:
        return {}
    with run.ema.swapped_in() if run.ema is not None else nullcontext():
        result = evaluate(
            run.task, run.eval_loader, run.eval_steps, run.reduce, lambda: bool(run.agree([stop.received])[0])
        )
    if result is None:
        return None
    counted = {"samples": result.samples, "bad_samples": result.bad}
    return {f"{section.split}/{name}": value for name, value in (means(result.totals) | counted).items()}


def _is_best(run: Run, values: Record) -> bool:
    """Note a new best evaluation in the state."""
    section = run.job.recipe.eval
    if section is None or section.metric not in values:
        return False
    value, best = values[section.metric], run.state.best
    if not math.isfinite(value):
        return False
    better = best is None or (value < best["value"] if section.mode == "min" else value > best["value"])
    if better:
        run.state.best = {"metric": section.metric, "value": value, "step": run.state.step}
    return better


def _stopped(run: Run, signal: int) -> VitptError:
    return VitptError(
        f"stopped by a signal after step {run.state.step} of {run.job.steps}; checkpoint saved",
        hint="run the same command again to go on",
        exit_code=Exit(signal),
    )


def _summary(run: Run) -> Record:
    """Write summary.json."""
    state, recipe = run.state, run.job.recipe
    newest = checkpoint.pointed(run.job.checkpoints, "BEST") or checkpoint.pointed(run.job.checkpoints, "LATEST")
    summary: dict[str, Any] = {
        "steps": state.step,
        "images_seen": state.step * recipe.train.global_batch_size,
        "exaflops": 6 * forward_macs(run.job) * state.step * recipe.train.global_batch_size / 1e18,
        "epochs": state.step * recipe.train.global_batch_size / run.job.num_samples,
        "best": state.best,
        "checkpoint": newest.name if newest else None,
        "data_digest": f"{state.data_digest:016x}",
        "bad_samples": len(run.bad.ids),
        "converted_samples": run.converted,
    }
    if run.main:
        write_json(run.job.folder / "summary.json", summary)
    return summary
