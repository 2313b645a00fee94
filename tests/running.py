"""Runs of tiny recipes: in this process, or by the command line in another one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from vitpt.recipe.load import load_recipe
from vitpt.train.fit import train
from vitpt.train.job import Init, Job, make_job

TINY = """
name: tiny
seed: 3
data: {path: PATH, crop: {kind: random_resized, area: [0.3, 1.0]}, threads: 1}
model: {width: 16, depth: 2, heads: 2, mlp: 32, patch: 8, res: 32}
objective: {kind: OBJECTIVE}
optim: {kind: adamw, lr: 2e-3, weight_decay: 0.05}
schedule: {kind: cosine, warmup_steps: 3}
train: {steps: 24, global_batch_size: 10}
eval: {every_steps: 8}
save: {every_steps: 5, every_minutes: null}
log: {every_steps: 3}
"""


def tiny_recipe(folder: Path, shards: Path, objective: str = "supervised") -> Path:
    """Write the tiny recipe for a dataset."""
    path = folder / f"tiny_{objective}.yaml"
    path.write_text(TINY.replace("PATH", str(shards)).replace("OBJECTIVE", objective))
    return path


class Quiet:
    """A report that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.records: list[dict[str, Any]] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    def begin(self, step: int, steps: int) -> None:
        pass

    def advance(self, step: int) -> None:
        pass

    def record(self, record: dict[str, Any]) -> None:
        self.records.append(record)


def job(recipe: Path, out: Path, *overrides: str, init: Init | None = None) -> Job:
    """The job of a recipe."""
    return make_job("finetune" if init else "pretrain", load_recipe(recipe, overrides).recipe, out, init)


def run(recipe: Path, out: Path, *overrides: str, init: Init | None = None) -> Quiet:
    """Train in this process."""
    torch.set_num_threads(1)
    report = Quiet()
    train(job(recipe, out, *overrides, init=init), report)
    return report


def environment() -> dict[str, str]:
    """One thread, no colours, no launcher."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GITHUB_ACTIONS")}
    return {**kept, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "TERMINAL_WIDTH": "200"}


def command(*args: object) -> list[str]:
    """`vitpt ARGS` of this interpreter."""
    return [sys.executable, "-m", "vitpt", *map(str, args)]


def vitpt(*args: object, cwd: Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run the command line in another process."""
    return subprocess.run(command(*args), cwd=cwd, env=environment(), capture_output=True, text=True, timeout=timeout)


def torchrun(ranks: int, *args: object, cwd: Path, timeout: float = 180) -> subprocess.CompletedProcess[str]:
    """Run the command line in several processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    whole = [*launcher, "-m", "vitpt", *map(str, args)]
    return subprocess.run(whole, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=timeout)


def weights(out: Path) -> dict[str, torch.Tensor]:
    """The model of a run's newest checkpoint."""
    root = out / "checkpoints"
    return load_file(root / (root / "LATEST").read_text().strip() / "model.safetensors")


def same_weights(a: Path, b: Path) -> bool:
    """Whether two runs ended in the same weights, bit for bit."""
    left, right = weights(a), weights(b)
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def metrics(out: Path) -> list[dict[str, Any]]:
    """metrics.jsonl of a run."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def digests(out: Path) -> np.ndarray:
    """digests.npy of a run."""
    return np.load(out / "digests.npy")


def status(out: Path) -> dict[str, Any]:
    """status.json of a run."""
    return json.loads((out / "status.json").read_text())
