"""`vitpt pretrain` as a person and a script meet it, in this process; signals and launchers are tested with the loop."""

import json

import pytest
import torch
from oracles import ORACLES
from running import TINY, metrics, status
from typer.testing import CliRunner

from vitpt.cli.app import app
from vitpt.errors import Exit

torch.set_num_threads(1)
SHORT = ("-o", "train.steps=6", "-o", "eval.every_steps=6", "-o", "log.every_steps=2")


@pytest.fixture
def here(tmp_path, tiny_shards, monkeypatch):
    """An empty working directory with tiny.yaml and tiny_mpp.yaml."""
    monkeypatch.chdir(tmp_path)
    text = TINY.replace("PATH", str(tiny_shards))
    (tmp_path / "tiny.yaml").write_text(text.replace("OBJECTIVE", "supervised"))
    (tmp_path / "tiny_mpp.yaml").write_text(text.replace("OBJECTIVE", "mpp") + "finetune: quickstart_finetune\n")
    return tmp_path


def pretrain(*args):
    return CliRunner().invoke(app, ["pretrain", *map(str, args)])


def plan(*args):
    """The plan as a dict."""
    result = pretrain(*args, "--dry-run", "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_run_is_told_and_ends_with_its_result(here):
    result = pretrain("tiny.yaml", *SHORT)
    assert result.exit_code == Exit.DONE
    lines = result.stderr.splitlines()
    assert lines[0] == "run:         runs/tiny (pretrain)"
    assert any(line.startswith("steps:") and "6 of 10 images = 1.0 epochs" in line for line in lines)
    logged = [line for line in lines if line.startswith("step ")]
    assert [line.split()[1] for line in logged] == ["2/6", "4/6", "6/6"]
    assert all(word in logged[0] for word in ("epoch 0.33", "loss 1.09", "images_per_s", "data_wait"))
    assert "val/loss" in logged[2]
    assert "val/top1" in logged[2]
    assert lines[-2:] == ["next: vitpt eval runs/tiny", "next: vitpt convert runs/tiny tiny-timm --to timm"]
    table = [line.split() for line in result.stdout.splitlines()]
    assert ["checkpoint", "runs/tiny/checkpoints/step-00000006"] in table
    assert ["data", "digest", metrics(here / "runs/tiny")[-1]["data_digest"]] in table
    assert "\x1b" not in result.output
    assert status(here / "runs/tiny")["state"] == "finished"


def test_the_same_command_again_says_that_it_is_finished(here):
    first = pretrain("tiny_mpp.yaml", *SHORT, "--out", "here")
    assert first.exit_code == 0
    assert first.stderr.splitlines()[-1] == "next: vitpt finetune --from here"
    again = pretrain("tiny_mpp.yaml", *SHORT, "--out", "here")
    assert again.exit_code == 0
    assert again.stderr.splitlines()[0] == "here is finished; give a new --out to train again"
    assert again.stdout == first.stdout


def test_json_is_one_document(here):
    result = pretrain("tiny.yaml", *SHORT, "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["run"] == "runs/tiny"
    assert (found["steps"], found["images_seen"], found["epochs"], found["bad_samples"]) == (6, 60, 1.0, 0)
    assert found["best"]["metric"] == "val/loss"
    assert found["checkpoint"] == "step-00000006"
    assert found["data_digest"] == metrics(here / "runs/tiny")[-1]["data_digest"]
    assert json.loads(pretrain("tiny.yaml", *SHORT, "--json").stdout) == found


def test_dry_run_prints_the_plan_and_writes_nothing(here):
    before = sorted(here.rglob("*"))
    result = pretrain("tiny.yaml", "--dry-run")
    assert result.exit_code == 0
    assert result.stderr == ""
    for words in ("runs/tiny (pretrain)", "60 samples, 3 classes", "24 of 10 images = 4.0 epochs", "GMAC", "exaFLOPs"):
        assert words in result.stdout
    assert sorted(here.rglob("*")) == before
    found = plan("tiny.yaml", "-o", "train.global_batch_size=64")
    assert "more than once" in found["note"]
    assert sorted(here.rglob("*")) == before


NAMES = {"ti": "Ti", "s": "S", "b": "B", "l": "L", "h": "H"}


@pytest.mark.parametrize(
    ("name", "res"),
    [
        ("ti16", 224),
        ("s16", 384),
        ("s32", 224),
        ("b32", 224),
        ("b16", 224),
        ("b16", 384),
        ("b8", 224),
        ("l16", 224),
        ("l32", 384),
        ("h14", 224),
    ],
)
def test_the_plan_has_the_parameters_and_the_compute_of_the_paper(here, name, res):
    overrides = ("-o", f"model={{name: vit_{name}, res: {res}}}")
    found = plan("tiny.yaml", *overrides)
    key = f"{NAMES[name.rstrip('0123456789')]}/{name.lstrip('tisblh')}@{res}"
    expected = ORACLES["param_counts"]["values"][key]
    assert f"{expected['headless'] / 1e6:.2f} M parameters" in found["model"]
    width = int(found["model"].split()[0])
    gmacs = (expected["macs_headless"] + 3 * width) / 1e9  # three classes
    assert found["compute"].startswith(f"{gmacs:.3f} GMAC")
    assert found["compute"].endswith(f"{6 * gmacs * 1e9 * 240 / 1e18:.3g} exaFLOPs in all")


def test_masked_patches_cost_a_head_of_512_colours_more(here):
    found = plan("tiny_mpp.yaml", "-o", "model={name: vit_b16, res: 224}")
    assert found["compute"].startswith(f"{(17563060224 + 98 * 768 * 512) / 1e9:.3f} GMAC")


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("tiny.yaml", "-o", "optim.lr=fast"), Exit.USAGE, "optim.lr"),
        (("tiny.yaml", "-o", "data.path=no-shards"), Exit.USAGE, "no-shards: no such dataset folder"),
        (("tiny.yaml", "-o", "data.path=."), Exit.DATA, "no manifest.json"),
        (("tiny.yaml", "-o", "eval.split=test", "-o", "eval.metric=test/loss"), Exit.USAGE, "eval.split"),
        (("quickstart_finetune",), Exit.USAGE, "takes the model from a checkpoint"),
        (("tiny.yaml", "--out", "tiny.yaml"), Exit.USAGE, "tiny.yaml: a file is in the way"),
        (("tiny.yaml", "-o", "data.decoder=dali_gpu"), Exit.ENVIRONMENT, "data.decoder"),
    ],
)  # fmt: skip
def test_errors_are_one_message_and_nothing_is_started(here, args, code, message):
    if "dali_gpu" in args[-1] and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    result = pretrain(*args)
    assert result.exit_code == code, result.output
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""


def test_divergence_ends_with_5_and_says_what_is_kept(here):
    rate = ("-o", "optim.lr=1e30", "-o", "optim.clip_grad_norm=null", "-o", "schedule.warmup_steps=0")
    result = pretrain("tiny.yaml", *SHORT, *rate)
    assert result.exit_code == Exit.FAILED
    assert "diverged between steps" in result.stderr.splitlines()[-2]
    assert status(here / "runs/tiny")["exit_code"] == 5
