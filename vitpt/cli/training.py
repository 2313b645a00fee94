"""What `pretrain` and `finetune` share: telling how a run goes, and its last words."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from shlex import quote
from typing import TYPE_CHECKING, Any

from vitpt.cli.console import Progress, progress, result_json, result_table, say

if TYPE_CHECKING:
    from vitpt.train.job import Job

_SHOWN = ("loss", "accuracy", "top1", "lr", "grad_norm", "images_per_s", "data_wait")


class ConsoleReport:
    """Tells a run's progress: a bar on a terminal, elsewhere one plain line a log step."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._progress: Progress | None = None
        self._done = 0
        self._steps = 0

    def say(self, line: str) -> None:
        """One line of text."""
        say(line)

    def begin(self, step: int, steps: int) -> None:
        """Training starts."""
        self._done, self._steps = step, steps
        self._bar = progress(steps, "training", "steps", start=step, plain=False)
        self._progress = self._bar.__enter__()

    def advance(self, step: int) -> None:
        """Steps are done."""
        if self._progress is not None:
            self._progress.advance(step - self._done)
        self._done = step

    def record(self, record: dict[str, Any]) -> None:
        """One line of metrics."""
        say(format_record(record, self._steps))

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.__exit__(None, None, None)
            self._bar = None


@contextmanager
def reporting() -> Iterator[ConsoleReport]:
    """A report that leaves the terminal clean."""
    report = ConsoleReport()
    try:
        yield report
    finally:
        report.close()


def format_record(record: dict[str, Any], steps: int) -> str:
    """A record as one line: `step 100/2000  loss 2.1  lr 0.001 ...  val/loss 2.0  val/top1 0.31`."""
    parts = [f"step {record['step']:>{len(str(steps))}}/{steps}"]
    if "epoch" in record:
        parts.append(f"epoch {record['epoch']:.2f}")
    for name in _SHOWN:
        if f"train/{name}" in record:
            parts.append(f"{name} {_number(name, record[f'train/{name}'])}")
    evaluated = {k: v for k, v in record.items() if "/" in k and not k.startswith("train/")}
    parts += [f"{name} {value:.4g}" for name, value in evaluated.items() if "_" not in name]
    parts += [f"{name} {record[name]}" for name in ("bad_samples", "converted_samples") if record.get(name)]
    return "  ".join(parts)


def _number(name: str, value: float) -> str:
    if name == "data_wait":
        return f"{100 * value:.0f}%"
    return f"{value:.0f}" if name == "images_per_s" else f"{value:.4g}"


def tell_plan(job: "Job") -> None:
    """The plan of a run, on stderr."""
    from vitpt.train.budget import plan_rows

    for what, how_much in plan_rows(job, ranks=int(os.environ.get("WORLD_SIZE", "1"))):
        say(f"{what + ':':<12} {how_much}")


def tell_end(job: "Job", summary: dict[str, Any], json: bool) -> None:
    """Result of a finished run on stdout, and the next command on stderr."""
    if json:
        result_json({"run": str(job.folder), **summary})
    else:
        best = summary["best"]
        rows: list[tuple[str, Any]] = [
            ("run", job.folder),
            ("steps", summary["steps"]),
            ("epochs", summary["epochs"]),
            ("images seen", summary["images_seen"]),
        ]
        if best is not None:
            rows.append((f"best {best['metric']}", best["value"]))
            rows.append(("at step", best["step"]))
        rows += [
            ("checkpoint", f"{job.checkpoints}/{summary['checkpoint']}"),
            ("bad samples", summary["bad_samples"]),
            ("data digest", summary["data_digest"]),
        ]
        result_table(None, ["", job.recipe.name], rows)
    for command in _next_commands(job):
        say(f"next: {command}")


def _next_commands(job: "Job") -> list[str]:
    run = quote(str(job.folder))
    if job.num_classes is None:
        recipe = "" if job.recipe.finetune is not None else " RECIPE"
        return [f"vitpt finetune{recipe} --from {run}"]
    return [f"vitpt eval {run}", f"vitpt convert {run} {quote(job.folder.resolve().name)}-timm --to timm"]
