"""Does masked patch prediction help when labels are few? One configuration, several seeds, against training from scratch.

For each seed: pretrain by `eurosat_mpp`, fine-tune by `eurosat_finetune` (10 % of the labels), and train the same recipe from
scratch. Prints each result, means and spreads, and the yardsticks of the pretraining loss: the best constant predictor (entropy of
the colours) and copying the left neighbour.

    vitpt shard eurosat eurosat-shards
    python benchmarks/mpp_study.py eurosat-shards --seeds 3 --out runs/mpp_study
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from vitpt.dataset import open_dataset
from vitpt.objectives.mpp import mean_colors
from vitpt.recipe.schema import Squash
from vitpt.stream.loader import Loader
from vitpt.stream.plan import evaluation_planner


def vitpt(*args: object) -> float:
    """Run one command; seconds it took."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "vitpt", *map(str, args)], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def yardsticks(shards: Path, res: int, patch: int) -> dict[str, float]:
    """Loss of the best constant and accuracy of copying the left neighbour, over the validation split."""
    split = open_dataset(shards).split("val")
    planner = evaluation_planner(Squash(), res, 0, split, 64, 1, 0, lambda seed, visits, ids: {}, False)
    loader = Loader(planner, split, res, decoder="cpu", threads=1, prefetch=2, crc="first", device=torch.device("cpu"))
    counts, same, pairs = torch.zeros(512, dtype=torch.float64), 0, 0
    with loader.batches(0, planner.steps) as batches:
        for batch in batches:
            colors = mean_colors(batch.images[0][batch.weights > 0], patch).reshape(-1, res // patch, res // patch)
            counts += torch.bincount(colors.flatten(), minlength=512)
            same += int((colors[:, :, 1:] == colors[:, :, :-1]).sum())
            pairs += colors[:, :, 1:].numel()
    shares = counts[counts > 0] / counts.sum()
    return {
        "constant_loss": float(-(shares * shares.log()).sum()),
        "constant_accuracy": float(shares.max()),
        "neighbour_accuracy": same / pairs,
    }


def last(run: Path, name: str) -> float:
    """The last value of a metric of a run."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return next(float(record[name]) for record in reversed(records) if name in record)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/mpp_study"))
    args = parser.parse_args()
    print(json.dumps(yardsticks(args.shards, 64, 8)), flush=True)
    data = ("-o", f"data.path={args.shards}")
    results: dict[str, list[float]] = {"after MPP": [], "from scratch": []}
    for seed in range(args.seeds):
        pretrained, tuned, scratch = (args.out / f"{name}-{seed}" for name in ("mpp", "tuned", "scratch"))
        seeded = ("-o", f"seed={seed}", *data)
        seconds = vitpt("pretrain", "eurosat_mpp", "--out", pretrained, *seeded)
        shown = {name: last(pretrained, name) for name in ("train/loss", "val/loss", "val/accuracy")}
        print(f"seed {seed}: pretrained in {seconds:.0f} s, {json.dumps(shown)}", flush=True)
        vitpt("finetune", "eurosat_finetune", "--from", pretrained, "--out", tuned, *seeded)
        vitpt("pretrain", "eurosat_finetune", "--out", scratch, *seeded)
        for name, run in (("after MPP", tuned), ("from scratch", scratch)):
            results[name].append(100 * last(run, "val/top1"))
            print(f"seed {seed}: {name}: val/top1 {results[name][-1]:.2f}", flush=True)
    for name, values in results.items():
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        print(f"{name}: mean {statistics.mean(values):.2f}, standard deviation {spread:.2f}, {len(values)} seeds")
    gains = [a - b for a, b in zip(results["after MPP"], results["from scratch"], strict=True)]
    print(f"gain: mean {statistics.mean(gains):.2f} points, from {min(gains):.2f} to {max(gains):.2f}")


if __name__ == "__main__":
    main()
