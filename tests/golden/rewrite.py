"""Runs the golden recipes and writes what they gave. For changes that are meant to change what a seed gives:

    python tests/golden/rewrite.py

The change says so in CHANGELOG.md, with the reason; a diff of the JSON files shows which part moved (digests: order, views or draws;
losses alone: initialisation, model, objective, optimizer, loop or pixels; val alone: evaluation).
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from typer.testing import CliRunner

from vitpt.cli.app import app

HERE = Path(__file__).resolve().parent
RECIPES = ("supervised", "mpp")
TOLERANCE = 1e-4
"""Relative, of losses and metrics: room for another CPU's sums over 20 steps. Digests are integers and have none."""


def measure(name: str, out: Path) -> dict[str, Any]:
    """Train a golden recipe in `out`; what it gave, step by step."""
    torch.set_num_threads(1)
    done = CliRunner().invoke(app, ["pretrain", str(HERE / f"{name}.yaml"), "--out", str(out)])
    if done.exit_code:
        raise RuntimeError(done.output)
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {
        "digests": [f"{digest:016x}" for digest in np.load(out / "digests.npy").tolist()],
        "losses": [record["train/loss"] for record in records],
        "val": {r["step"]: {k: v for k, v in r.items() if k.startswith("val/")} for r in records if "val/loss" in r},
    }


def main() -> None:
    """Rewrite all golden files."""
    for name in RECIPES:
        with tempfile.TemporaryDirectory() as folder:
            values = measure(name, Path(folder) / "run")
        path = HERE / f"{name}.json"
        path.write_text(json.dumps({"tolerance": TOLERANCE, **values}, indent=1) + "\n")
        print(f"{path.name}: loss {values['losses'][0]:.6f} to {values['losses'][-1]:.6f}")


if __name__ == "__main__":
    main()
