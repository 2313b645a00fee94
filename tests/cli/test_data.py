"""`vitpt data stream`: what it recomputes is what a run consumes."""

import json
from dataclasses import replace

import numpy as np
import pytest
from running import digests, run, tiny_recipe
from typer.testing import CliRunner

from vitpt.cli.app import app
from vitpt.dataset import open_dataset
from vitpt.errors import Exit
from vitpt.models.variants import config_from
from vitpt.objectives import build_task
from vitpt.recipe.load import load_recipe
from vitpt.stream.digest import MODULUS, digest
from vitpt.stream.order import make_slots
from vitpt.stream.plan import training_planner

RECIPE = """
name: tiny
seed: 3
data: {path: SHARDS, crop: {kind: random_resized, area: [0.3, 1.0]}, flip: both}
model: {width: 16, depth: 1, heads: 2, mlp: 32, patch: 8, res: 32}
objective: {kind: mpp, corrupt: 0.5}
optim: {kind: adamw, lr: 1e-3}
train: {steps: 3, global_batch_size: 25}
"""


@pytest.fixture
def recipe(tmp_path, tiny_shards):
    path = tmp_path / "tiny.yaml"
    path.write_text(RECIPE.replace("SHARDS", str(tiny_shards)))
    return path


def stream(*arguments, status=Exit.DONE):
    result = CliRunner().invoke(app, ["data", "stream", *map(str, arguments)])
    assert result.exit_code == status, result.output
    return result


def plans_of_two_ranks(path, step):
    """The plans of a step, shared by two ranks in micro-batches of 7."""
    recipe = load_recipe(path).recipe
    dataset = open_dataset(recipe.data.path)
    task = build_task(config_from(recipe.model), recipe.objective, len(dataset.classes))
    slots = make_slots(25, 2, 7)
    planner = training_planner(recipe.data, 32, recipe.seed, dataset.split("train"), slots, 0, task.draws)
    return [replace(planner, rank=rank).plan(step, micro) for rank in (0, 1) for micro in range(slots.micros)]


def test_digests_are_those_of_any_number_of_ranks(recipe):
    found = json.loads(stream(recipe, "--steps", "0:4", "--json").stdout)
    assert [step["step"] for step in found["steps"]] == [0, 1, 2, 3]
    for step in found["steps"]:
        total = sum(digest(plan) for plan in plans_of_two_ranks(recipe, step["step"])) % MODULUS
        assert step["digest"] == f"{total:016x}"
        assert step["samples"] == 25
    assert found["num_samples"] == 60
    assert found["seed"] == 3


def test_samples_are_the_rows_of_the_plans(recipe):
    found = json.loads(stream(recipe, "--steps", "2:3", "--samples", "--json").stdout)["samples"]
    assert [row["position"] for row in found] == list(range(50, 75))
    assert [row["visit"] for row in found] == [0] * 10 + [1] * 15
    plans = plans_of_two_ranks(recipe, 2)
    ids = np.concatenate([plan.ids[plan.ids >= 0] for plan in plans])
    boxes = np.concatenate([plan.views[0].box[plan.ids >= 0] for plan in plans])
    flips = np.concatenate([plan.views[0].flip[plan.ids >= 0] for plan in plans])
    assert [row["id"] for row in found] == ids.tolist()
    assert [row["box"] for row in found] == boxes.tolist()
    assert [row["flip"] for row in found] == flips.tolist()
    for name in plans[0].draws:
        values = np.concatenate([plan.draws[name][plan.ids >= 0] for plan in plans])
        assert [row["draws"][name] for row in found] == values.tolist()


def test_tables_are_plain_text(recipe):
    lines = stream(recipe, "--steps", "1:3").stdout.splitlines()
    assert lines[0].split() == ["step", "samples", "digest"]
    assert len(lines) == 3
    rows = stream(recipe, "--steps", "1:2", "--samples").stdout.splitlines()
    assert rows[0].split() == ["step", "position", "id", "visit", "box", "flip", "draws"]
    assert len(rows) == 26


def test_overrides_change_the_stream(recipe):
    def first(*options):
        return json.loads(stream(recipe, "--steps", "0:1", "--json", *options).stdout)["steps"][0]["digest"]

    all_digests = [
        first(),
        first("-o", "seed=4"),
        first("-o", "data.flip=none"),
        first("-o", "data.fraction=0.5"),
        first("-o", "objective.corrupt=0.25"),
    ]
    assert len(set(all_digests)) == len(all_digests)
    assert first("-o", "data.threads=3", "-o", "train.micro_batch_size=5") == all_digests[0]


@pytest.mark.parametrize("steps", ["5", "3:3", "4:2", "a:b", "-1:4", "1:2:3", ":3"])
def test_wrong_steps_are_one_line(recipe, steps):
    result = stream(recipe, f"--steps={steps}", status=Exit.USAGE)
    assert result.stderr.strip() == f"--steps {steps}: expected A:B with A < B, such as 0:10"
    assert result.stdout == ""


def test_missing_shards_are_said(recipe):
    result = stream(recipe, "-o", "data.path=nowhere", status=Exit.USAGE)
    assert "nowhere" in result.stderr


def test_a_run_consumed_what_is_recomputed(tmp_path, tiny_shards):
    recipe = tiny_recipe(tmp_path, tiny_shards, "mpp")
    options = ("train.steps=8", "data.threads=2", "train.micro_batch_size=4")
    run(recipe, tmp_path / "run", *options)
    found = json.loads(stream(recipe, "--steps", "0:8", "--json").stdout)
    assert [step["digest"] for step in found["steps"]] == [f"{int(one):016x}" for one in digests(tmp_path / "run")]
