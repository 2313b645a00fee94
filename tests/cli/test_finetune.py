"""`vitpt finetune`: what it takes when nothing is said, and that it says so first."""

import json
import os

import pytest
import torch
from running import TINY, metrics, run, status, tiny_recipe
from typer.testing import CliRunner

from vitpt import checkpoint
from vitpt.cli.app import app
from vitpt.errors import Exit

torch.set_num_threads(1)
TUNE = """
name: tuned
data: {path: PATH, crop: {kind: squash}, threads: 1}
model: {res: 32}
objective: {kind: supervised}
optim: {kind: sgd, lr: 0.05}
train: {steps: 4, global_batch_size: 10}
eval: {metric: val/top1, mode: max}
log: {every_steps: 2}
"""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory, tiny_shards):
    """A folder with tuned.yaml, and two pretraining runs below ./runs of which `second` is newer."""
    root = tmp_path_factory.mktemp("work")
    (root / "tuned.yaml").write_text(TUNE.replace("PATH", str(tiny_shards)))
    recipe = tiny_recipe(root, tiny_shards, "mpp")
    recipe.write_text(recipe.read_text() + "finetune: tuned.yaml\n")
    for number, name in enumerate(("second", "first")):  # in this order: the time counts, not the name
        run(recipe, root / "runs" / name, "train.steps=4", "eval=null", f"seed={number}")
        os.utime(root / "runs" / name / "status.json", (2e9 - number, 2e9 - number))
    return root


@pytest.fixture
def here(workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    return workplace


def finetune(*args):
    return CliRunner().invoke(app, ["finetune", *map(str, args)])


def test_newest_run_and_its_successor_by_default(here, tmp_path):
    result = finetune("--out", tmp_path / "run")
    assert result.exit_code == Exit.DONE, result.output
    lines = result.stderr.splitlines()
    assert lines[0] == "fine-tuning runs/second by recipe tuned.yaml"
    assert lines[-2] == f"next: vitpt eval {tmp_path / 'run'}"
    assert "best val/top1" in result.stdout
    init = json.loads((tmp_path / "run/init.json").read_text())
    assert init["checkpoint"] == "runs/second/checkpoints/step-00000004"
    assert status(tmp_path / "run")["command"] == "finetune"
    record = metrics(tmp_path / "run")[0]
    assert {"train/loss", "train/top1"} <= record.keys()


def test_the_weights_are_those_of_the_source(here, tmp_path):
    # rate 0: what comes out is what went in
    rate = ("-o", "optim.lr=1e-30", "-o", "train.steps=1")
    result = finetune("tuned.yaml", "--from", "runs/first", "--out", tmp_path / "run", *rate)
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith("fine-tuning runs/first by recipe tuned.yaml\n")
    before = checkpoint.load_tensors(checkpoint.find(here / "runs/first"))
    after = checkpoint.load_tensors(checkpoint.find(tmp_path / "run"))
    backbone = [name for name in before if name.startswith("backbone.")]
    assert len(backbone) > 20
    assert all(torch.equal(before[name], after[name]) for name in backbone)
    assert after["objective.head.weight"].shape == (3, 16)


def test_another_resolution_resizes_the_positions(here, tmp_path):
    result = finetune("--res", 48, "--out", tmp_path / "run", "--json")
    assert result.exit_code == 0, result.output
    assert "position embedding resized from 4x4 to 6x6 patches" in result.stderr
    assert json.loads(result.stdout)["steps"] == 4
    config = checkpoint.read_config(checkpoint.find(tmp_path / "run"))
    assert (config["model"]["res"], config["pixels"]["res"], config["model"]["width"]) == (48, 48, 16)
    assert config["classes"] == ["cat", "dog", "eel"]


def test_dry_run_prints_the_plan_and_writes_nothing(here):
    before = sorted(here.rglob("*"))
    result = finetune("--dry-run", "--json", "--res", 64)
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert plan["run"] == "runs/tuned (finetune)"
    assert "16 wide, 2 deep, 2 heads, patch 8, 64 px" in plan["model"]
    assert result.stderr == "fine-tuning runs/second by recipe tuned.yaml\n"
    assert "steps" in finetune("--dry-run").stdout
    assert sorted(here.rglob("*")) == before


@pytest.mark.parametrize(
    ("args", "code", "message", "hint"),
    [
        (("--res", 30), Exit.USAGE, "model.res: 30 is not a multiple of the patch side 8; nearest: 24 or 32", ""),
        (("--from", "runs/fist"), Exit.USAGE, "runs/fist: no such run, checkpoint or converted folder", "did you mean runs/first?"),
        (("tuned.yaml", "--from", "runs"), Exit.USAGE, "runs: holds no checkpoint", "give a run"),
        (("--from", "runs/first/checkpoints/step-00000004", "-o", "optim.lr=x"), Exit.USAGE, "optim.lr", ""),
        (("no_such_recipe",), Exit.USAGE, "no_such_recipe", ""),
        (("-o", "model.gelu=erf"), Exit.USAGE, "model.gelu: the recipe says erf, the checkpoint", "leave the model out"),
    ],
)  # fmt: skip
def test_errors_are_one_message_and_nothing_is_started(here, args, code, message, hint):
    before = sorted(here.rglob("*"))
    result = finetune(*args)
    assert result.exit_code == code, result.output
    assert message in result.stderr
    assert hint in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""
    assert sorted(here.rglob("*")) == before


def test_without_a_run_it_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = finetune()
    assert result.exit_code == Exit.USAGE
    assert result.stderr.splitlines()[0] == "no pretraining run under ./runs to start from"
    assert "vitpt pretrain quickstart" in result.stderr


def test_a_run_without_a_successor_needs_a_recipe(here, tmp_path, tiny_shards):
    (tmp_path / "plain.yaml").write_text(TINY.replace("PATH", str(tiny_shards)).replace("OBJECTIVE", "supervised"))
    run(tmp_path / "plain.yaml", tmp_path / "plain", "train.steps=4", "eval=null")
    result = finetune("--from", tmp_path / "plain")
    assert result.exit_code == Exit.USAGE
    assert "RECIPE is needed" in result.stderr
    assert "'tiny', which names no `finetune:` recipe" in result.stderr
