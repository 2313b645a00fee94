import json
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from running import Quiet, digests, job, metrics, run, same_weights, status, tiny_recipe, weights

from vitpt import checkpoint
from vitpt.errors import Exit, VitptError
from vitpt.train import fit as fit_module
from vitpt.train.fit import train


@pytest.fixture(scope="module")
def straight(tiny_shards, tmp_path_factory):
    """An uninterrupted supervised run."""
    folder = tmp_path_factory.mktemp("straight")
    recipe = tiny_recipe(folder, tiny_shards)
    run(recipe, folder / "run")
    return recipe, folder / "run"


def without_times(records):
    timed = ("train/images_per_s", "train/data_wait")
    return [{k: v for k, v in record.items() if k not in timed} for record in records]


class Interrupt(Quiet):
    """Raises a signal in this process when a step is done."""

    def __init__(self, at: int, number: int = signal.SIGTERM) -> None:
        super().__init__()
        self.at, self.number = at, number

    def advance(self, step: int) -> None:
        if step == self.at:
            signal.raise_signal(self.number)


def test_files_of_a_run(straight):
    _, out = straight
    names = {path.name for path in out.iterdir()}
    assert names == {
        "recipe.yaml",
        "data.json",
        "plan.json",
        "status.json",
        "metrics.jsonl",
        "digests.npy",
        "summary.json",
        "checkpoints",
    }
    assert status(out)["state"] == "finished"
    assert status(out)["exit_code"] == 0
    records = metrics(out)
    assert [r["step"] for r in records] == [3, 6, 8, 9, 12, 15, 16, 18, 21, 24]
    assert [r["step"] for r in records if "val/loss" in r] == [8, 16, 24]
    assert records[0]["epoch"] == pytest.approx(3 * 10 / 60)
    assert (digests(out) != 0).all()
    total = int(np.sum(digests(out), dtype=np.uint64))
    assert records[-1]["data_digest"] == f"{total:016x}"


def test_loss_of_a_zero_head_is_the_logarithm_of_the_classes(tiny_shards, tmp_path):
    recipe = tiny_recipe(tmp_path, tiny_shards)
    run(recipe, tmp_path / "run", "train.steps=4", "log.every_steps=1")
    # with a warmup the first update has rate 0, so two losses are those of the zero head
    assert [r["train/loss"] for r in metrics(tmp_path / "run")[:2]] == pytest.approx([np.log(3)] * 2, abs=1e-6)


def test_training_learns(tmp_path):
    recipe = tiny_recipe(tmp_path, "bundled:eurosat_mini")
    extra = ("train.global_batch_size=32", "model.res=64", "optim.lr=5e-3")
    run(recipe, tmp_path / "run", *extra, "train.steps=120", "eval.every_steps=120", "log.every_steps=40")
    records = metrics(tmp_path / "run")
    assert records[-1]["val/loss"] < 0.8 * np.log(10)
    assert records[-1]["val/top1"] > 0.25
    assert records[-1]["train/loss"] < records[0]["train/loss"]


@pytest.mark.parametrize("at", [1, 5, 7, 8, 9, 23])
def test_stopped_anywhere_the_run_ends_in_the_same_weights_and_metrics(straight, tmp_path, at):
    recipe, out = straight
    with pytest.raises(VitptError) as caught:
        train(job(recipe, tmp_path / "run"), Interrupt(at))
    assert caught.value.exit_code == Exit.PREEMPTED
    assert status(tmp_path / "run")["state"] == "preempted"
    assert status(tmp_path / "run")["exit_code"] == 75
    assert status(tmp_path / "run")["step"] == at
    report = run(recipe, tmp_path / "run")
    assert any(f"after step {at}" in line for line in report.lines)
    assert same_weights(out, tmp_path / "run")
    assert without_times(metrics(tmp_path / "run")) == without_times(metrics(out))
    assert np.array_equal(digests(out), digests(tmp_path / "run"))
    assert json.loads((tmp_path / "run/summary.json").read_text()) == json.loads((out / "summary.json").read_text())


def test_a_signal_during_an_evaluation_abandons_it_and_it_is_done_on_resume(straight, tmp_path, monkeypatch):
    recipe, out = straight
    evaluate = fit_module.evaluate

    def interrupted(*args, **kwargs):
        signal.raise_signal(signal.SIGUSR1)
        return evaluate(*args, **kwargs)

    monkeypatch.setattr(fit_module, "evaluate", interrupted)
    with pytest.raises(VitptError) as caught:
        run(recipe, tmp_path / "run")
    assert caught.value.exit_code == Exit.PREEMPTED
    assert not any("val/loss" in record for record in metrics(tmp_path / "run"))
    monkeypatch.undo()
    run(recipe, tmp_path / "run")
    assert without_times(metrics(tmp_path / "run")) == without_times(metrics(out))
    assert same_weights(out, tmp_path / "run")


def test_ctrl_c_saves_and_leaves_with_130(straight, tmp_path):
    recipe, out = straight
    with pytest.raises(VitptError) as caught:
        train(job(recipe, tmp_path / "run"), Interrupt(6, signal.SIGINT))
    assert caught.value.exit_code == Exit.INTERRUPTED
    assert status(tmp_path / "run")["state"] == "interrupted"
    run(recipe, tmp_path / "run")
    assert same_weights(out, tmp_path / "run")


def test_a_damaged_newest_checkpoint_falls_back_to_an_older_one(straight, tmp_path):
    recipe, out = straight
    with pytest.raises(VitptError):
        train(job(recipe, tmp_path / "run"), Interrupt(13))
    (tmp_path / "run/checkpoints/step-00000013/model.safetensors").write_bytes(b"")
    report = run(recipe, tmp_path / "run")
    assert any("damaged" in line for line in report.lines)
    assert any("after step 10" in line for line in report.lines)
    assert same_weights(out, tmp_path / "run")
    steps = [record["step"] for record in metrics(tmp_path / "run")]
    assert steps == sorted(set(steps))


@pytest.mark.parametrize(
    "change", ["data.decoder=dali_cpu", "data.threads=2", "data.prefetch=4", "train.micro_batch_size=3"]
)
def test_execution_fields_may_change_on_resume(straight, tmp_path, change):
    recipe, out = straight
    with pytest.raises(VitptError):
        train(job(recipe, tmp_path / "run"), Interrupt(11))
    run(recipe, tmp_path / "run", change)
    assert np.array_equal(digests(out), digests(tmp_path / "run"))
    losses = [[r["train/loss"] for r in metrics(o) if "train/loss" in r] for o in (out, tmp_path / "run")]
    # a decoder's pixels may differ by a level here and there, sums by their order
    assert losses[1] == pytest.approx(losses[0], rel=1e-2 if "dali" in change else 1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("optim.lr=1e-3", r"optim\.lr: the run in .* has 0\.002, the recipe now says 0\.001"),
        ("data.fraction=0.5", r"data\.fraction: .* has 1\.0, .* 0\.5"),
        ("seed=4", "seed: .* has 3, .* 4"),
    ],
)
def test_a_changed_result_field_is_refused(straight, change, message):
    recipe, out = straight
    with pytest.raises(VitptError, match=message) as caught:
        job(recipe, out, change)
    assert caught.value.exit_code == Exit.USAGE
    assert "--out" in caught.value.hint


def test_other_data_are_refused(straight, tmp_path, split_folders):
    from images import make_shards

    recipe, out = straight
    other = make_shards(split_folders, tmp_path / "other", seed=9)
    with pytest.raises(VitptError, match="other data") as caught:
        job(recipe, out, f"data.path={other}")
    assert caught.value.exit_code == Exit.DATA


@pytest.mark.parametrize("micro", [1, 3, 4, 10])
def test_accumulation_changes_nothing_but_the_order_of_sums(straight, tmp_path, micro):
    recipe, out = straight
    run(recipe, tmp_path / "run", f"train.micro_batch_size={micro}")
    assert np.array_equal(digests(out), digests(tmp_path / "run"))
    losses = [[r["train/loss"] for r in metrics(o) if "train/loss" in r] for o in (out, tmp_path / "run")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_mpp_resumes_exactly_too(tiny_shards, tmp_path):
    recipe = tiny_recipe(tmp_path, tiny_shards, "mpp")
    extra = ("model.dropout=0.1", "model.drop_path=0.2", "ema.decay=0.9")
    run(recipe, tmp_path / "a", *extra)
    with pytest.raises(VitptError):
        train(job(recipe, tmp_path / "b", *extra), Interrupt(7))
    run(recipe, tmp_path / "b", *extra)
    assert same_weights(tmp_path / "a", tmp_path / "b")
    averages = [
        checkpoint.load_tensors(checkpoint.steps_saved(tmp_path / o / "checkpoints")[-1][1], "ema") for o in "ab"
    ]
    assert all(torch.equal(averages[0][name], averages[1][name]) for name in averages[0])
    record = metrics(tmp_path / "a")[-1]
    assert {"val/loss", "val/accuracy", "val/loss_mask", "val/loss_random", "val/loss_keep"} <= record.keys()


def test_divergence_stops_before_a_bad_checkpoint(tiny_shards, tmp_path):
    recipe = tiny_recipe(tmp_path, tiny_shards)
    with pytest.raises(VitptError, match=r"diverged between steps \d+ and \d+") as caught:
        run(recipe, tmp_path / "run", "optim.lr=1e30", "optim.clip_grad_norm=null", "schedule.warmup_steps=0")
    assert caught.value.exit_code == Exit.FAILED
    assert status(tmp_path / "run")["state"] == "failed"
    assert status(tmp_path / "run")["exit_code"] == 5
    saved = [path for _, path in checkpoint.steps_saved(tmp_path / "run/checkpoints")]
    assert all(torch.isfinite(t).all() for path in saved for t in checkpoint.load_tensors(path).values())


def damaged_copy(shards: Path, target: Path, count: int) -> Path:
    """A copy of a dataset with one bit flipped in the first images of its first training shard."""
    import shutil

    from vitpt.dataset import open_dataset

    shutil.copytree(shards, target)
    split = open_dataset(target).split("train")
    path = split.shard_path(0)
    content = bytearray(path.read_bytes())
    for row in range(count):
        content[int(split.offset[row]) + 30] ^= 4
    path.write_bytes(content)
    return target


def test_bad_samples_weigh_nothing_and_are_listed(tiny_shards, tmp_path):
    recipe = tiny_recipe(tmp_path, damaged_copy(tiny_shards, tmp_path / "shards", 2))
    run(recipe, tmp_path / "run", "data.max_bad_fraction=0.05")
    bad = [json.loads(line) for line in (tmp_path / "run/bad_samples.jsonl").read_text().splitlines()]
    assert sorted(sample["id"] for sample in bad) == [0, 1]
    assert all("crc32" in sample["reason"] and sample["name"] for sample in bad)
    assert metrics(tmp_path / "run")[-1]["bad_samples"] == 2


def test_too_many_bad_samples_end_the_run(tiny_shards, tmp_path):
    recipe = tiny_recipe(tmp_path, damaged_copy(tiny_shards, tmp_path / "shards", 2))
    with pytest.raises(VitptError, match="2 of 60 samples could not be used, 1 are allowed") as caught:
        run(recipe, tmp_path / "run", "data.max_bad_fraction=0.02")
    assert caught.value.exit_code == Exit.FAILED


def test_best_outlives_the_newest(tiny_shards, tmp_path):
    recipe = tiny_recipe(tmp_path, tiny_shards)
    # the loss at the end of a run with a huge rate is worse than at its start
    extra = ("save.keep_last=1", "eval.every_steps=2", "optim.lr=0.3", "schedule.warmup_steps=8", "train.steps=20")
    run(recipe, tmp_path / "run", *extra)
    root = tmp_path / "run/checkpoints"
    best = json.loads((tmp_path / "run/summary.json").read_text())["best"]
    losses = {r["step"]: r["val/loss"] for r in metrics(tmp_path / "run") if "val/loss" in r}
    assert best["step"] == min(losses, key=losses.get)
    assert best["step"] != 20
    assert checkpoint.pointed(root, "BEST").name == checkpoint.folder_name(best["step"])
    assert [step for step, _ in checkpoint.steps_saved(root)] == [best["step"], 20]


def test_a_fraction_of_the_data_is_used_and_nothing_else(tiny_shards, tmp_path):
    recipe = tiny_recipe(tmp_path, tiny_shards)
    run(recipe, tmp_path / "run", "data.fraction=0.25", "train.steps=6", "log.every_steps=6")
    assert metrics(tmp_path / "run")[-1]["epoch"] == pytest.approx(6 * 10 / 15)


def test_weights_of_the_same_recipe_twice_are_equal(straight, tmp_path):
    recipe, out = straight
    run(recipe, tmp_path / "run")
    assert same_weights(out, tmp_path / "run")
    assert set(weights(out)) >= {"backbone.cls_token", "backbone.blocks.1.mlp.fc2.bias", "objective.head.weight"}
