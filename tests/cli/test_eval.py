"""`vitpt eval`: what it takes when nothing is said, its table and its JSON. The numbers are tested in tests/evaluate."""

import json
import os
import shutil

import pytest
import torch
from running import run, tiny_recipe
from small_checkpoint import write_checkpoint
from typer.testing import CliRunner

from vitpt.cli.app import app
from vitpt.errors import Exit

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory, tiny_shards):
    """A folder with the classification runs `old` and `new` and an even newer run without a head below ./runs."""
    root = tmp_path_factory.mktemp("work")
    for number, (name, objective) in enumerate((("old", "supervised"), ("new", "supervised"), ("headless", "mpp"))):
        recipe = tiny_recipe(root, tiny_shards, objective)
        run(recipe, root / "runs" / name, "train.steps=4", "eval.every_steps=4")
        os.utime(root / "runs" / name / "status.json", (2e9 + number, 2e9 + number))
    return root


@pytest.fixture
def here(workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    return workplace


def evaluate(*args):
    return CliRunner().invoke(app, ["eval", *map(str, args)])


def test_newest_classifier_on_its_own_data_by_default(here, tiny_shards):
    result = evaluate()
    assert result.exit_code == Exit.DONE, result.output
    lines = result.stderr.splitlines()
    best = "runs/new/checkpoints/step-00000004"
    assert lines[0] == f"evaluating {best} on {tiny_shards} val (32 px, squash)"
    assert lines[-1].startswith("next: vitpt convert runs/new")
    table = dict(line.split(maxsplit=1) for line in result.stdout.splitlines()[1:])
    assert (table["checkpoint"], table["split"], table["samples"]) == (best, "val", "21")
    assert (table["unlabelled"], table["bad"]) == ("0", "0")
    assert {"top1", "top5", "loss"} <= table.keys()


def test_json_is_one_document_with_what_training_measured(here, tiny_shards):
    found = json.loads(evaluate("runs/old", "--json", "--batch", 4).stdout)
    (record,) = [
        json.loads(line) for line in (here / "runs/old/metrics.jsonl").read_text().splitlines() if "val/" in line
    ]
    assert found["samples"] == 21
    assert found["loss"] == pytest.approx(record["val/loss"], rel=1e-6)
    assert found["top1"] == record["val/top1"]
    assert found["checkpoint"].startswith("runs/old/")


def test_another_split_and_other_data(here, tiny_shards, tmp_path):
    assert json.loads(evaluate("--split", "train", "--json").stdout)["samples"] == 60
    shutil.copytree(tiny_shards, tmp_path / "copy")
    moved = json.loads(evaluate("--data", tmp_path / "copy", "--json", "--decoder", "cpu").stdout)
    assert moved["data"] == str(tmp_path / "copy")
    assert moved["loss"] == json.loads(evaluate("--json").stdout)["loss"]


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("runs/headless",), Exit.USAGE, "has no classification head to evaluate"),
        (("runs/none",), Exit.USAGE, "runs/none: no such run, checkpoint or converted folder"),
        (("--split", "test"), Exit.USAGE, "no split 'test'; there is train, val"),
        (("--data", "nowhere"), Exit.USAGE, "nowhere: no such dataset folder"),
        (("--data", "bundled:eurosat_mini"), Exit.DATA, "is not among the 3 classes of the model"),
        (("--decoder", "fast"), Exit.USAGE, "'fast', expected auto, dali_gpu, dali_cpu or cpu"),
        (("--batch", "0"), Exit.USAGE, "--batch"),
    ],
)
def test_errors_are_one_message(here, args, code, message):
    result = evaluate(*args)
    assert result.exit_code == code, result.output
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""


def test_a_folder_outside_a_run_needs_data(here, tmp_path):
    write_checkpoint(tmp_path / "model")
    result = evaluate(tmp_path / "model")
    assert result.exit_code == Exit.USAGE
    assert "--data is needed" in result.stderr


def test_without_a_run_it_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = evaluate()
    assert result.exit_code == Exit.USAGE
    assert result.stderr.splitlines()[0] == "no run with a classification head under ./runs to evaluate"
    assert "vitpt finetune" in result.stderr
