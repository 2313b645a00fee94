"""Evaluation counts every sample once and gives the numbers that Pillow, torch and timm give without this package."""

import io
import json
import shutil

import numpy as np
import pytest
import timm
import torch
from changed import changed_copy
from images import make_shards, write_splits
from PIL import Image
from running import torchrun
from small_checkpoint import CLASSES, SIZES, write_checkpoint
from torch import nn
from torch.nn import functional as F

from vitpt import checkpoint
from vitpt.dataset import open_dataset
from vitpt.errors import Exit, VitptError
from vitpt.evaluate.run import Meter, evaluate, means
from vitpt.evaluate.standalone import evaluate_checkpoint
from vitpt.objectives.loss import Loss
from vitpt.recipe import schema
from vitpt.stream.loader import Loader
from vitpt.stream.plan import evaluation_planner

torch.set_num_threads(1)
CPU = torch.device("cpu")
PIXELS = {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.25, 0.3]}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A checkpoint with five classes, of which the data have three."""
    folder = tmp_path_factory.mktemp("model")
    task = write_checkpoint(folder / "biased", pixels=PIXELS, pool="gap")
    colours = torch.randint(0, 256, (64, 1, 1, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():  # random weights prefer one class: take their preference away
        task.objective.head.bias -= task.predict(colours.expand(-1, SIZES["res"], SIZES["res"], -1)).mean(dim=0)
    checkpoint.write_model(folder / "model", task.state_dict(), checkpoint.read_config(folder / "biased"))
    return folder / "model"


def evaluated(model, data, *, batch=64, split="val", lines=None):
    said = [] if lines is None else lines
    return evaluate_checkpoint(
        model, str(data), split, batch=batch, decoder="cpu", say=said.append, advance=lambda: None
    )


def by_pillow_and_timm(model, split, rows):
    """Logits and labels (by name) of some rows: Pillow decodes, torch squashes, timm's model computes."""
    images = []
    for row in rows:
        start = int(split.offset[row])
        payload = split.shard_path(int(split.shard[row])).read_bytes()[start : start + int(split.length[row])]
        pixels = torch.from_numpy(np.array(Image.open(io.BytesIO(payload)).convert("RGB"))).permute(2, 0, 1)[None]
        images.append(F.interpolate(pixels.float(), (SIZES["res"],) * 2, mode="bilinear", antialias=True))
    mean, std = (torch.tensor(PIXELS[key]).reshape(1, 3, 1, 1) for key in ("mean", "std"))
    vit = timm.models.VisionTransformer(
        img_size=SIZES["res"],
        patch_size=SIZES["patch"],
        embed_dim=SIZES["width"],
        depth=SIZES["depth"],
        num_heads=SIZES["heads"],
        mlp_ratio=SIZES["mlp"] / SIZES["width"] + 1e-9,
        num_classes=len(CLASSES),
        act_layer=lambda: nn.GELU(approximate="tanh"),
        class_token=False,
        global_pool="avg",
        fc_norm=False,
    )
    tensors = checkpoint.load_tensors(model)
    vit.load_state_dict({name.removeprefix("backbone.").removeprefix("objective."): t for name, t in tensors.items()})
    with torch.no_grad():
        logits = vit.eval()((torch.cat(images) / 255 - mean) / std)
    names = ("cat", "dog", "eel")
    labels = torch.tensor([CLASSES.index(names[int(split.label[row])]) for row in rows])
    return logits, labels


def test_numbers_are_those_of_pillow_and_timm(model, tiny_shards):
    lines = []
    result = evaluated(model, tiny_shards, lines=lines)
    split = open_dataset(tiny_shards).split("val")
    logits, labels = by_pillow_and_timm(model, split, range(21))
    assert (result["samples"], result["unlabelled"], result["bad"]) == (21, 0, 0)
    assert result["loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=0.01)
    assert result["top1"] == pytest.approx((logits.argmax(1) == labels).float().mean().item(), abs=1.5 / 21)
    assert result["top5"] == 1.0
    assert len(set(logits.argmax(1).tolist())) > 1
    assert lines == [f"evaluating {model} on {tiny_shards} val (16 px, squash)"]


@pytest.mark.parametrize("batch", [1, 2, 4, 20, 21, 64])
def test_every_sample_counts_once_for_any_batch(model, tiny_shards, batch):
    result = evaluated(model, tiny_shards, batch=batch)
    expected = evaluated(model, tiny_shards, batch=7)
    assert result["samples"] == 21
    assert result["top1"] == expected["top1"]
    assert result["loss"] == pytest.approx(expected["loss"], rel=1e-6)


def test_unlabelled_and_bad_samples_are_left_out_and_counted(model, tiny_shards, tmp_path):
    data = changed_copy(tiny_shards, tmp_path / "shards", "val", unlabelled=[0, 5, 20], damaged=[3])
    result = evaluated(model, data, batch=4)
    rows = [row for row in range(21) if row not in (0, 5, 20, 3)]
    logits, labels = by_pillow_and_timm(model, open_dataset(data).split("val"), rows)
    assert (result["samples"], result["unlabelled"], result["bad"]) == (17, 3, 1)
    assert result["loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=0.01)


def test_classes_are_matched_by_name(model, split_folders, tmp_path):
    # the same images without the first class: the labels are other numbers, the losses of the rest the same
    source = tmp_path / "two"
    shutil.copytree(split_folders, source)
    for split in ("train", "val"):
        shutil.rmtree(source / split / "cat")
    result = evaluated(model, make_shards(source, tmp_path / "two-shards"))
    split = open_dataset(make_shards(split_folders, tmp_path / "three-shards")).split("val")
    rows = np.flatnonzero(split.label > 0)
    logits, labels = by_pillow_and_timm(model, split, rows)
    assert result["samples"] == len(rows) == 14
    assert result["loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=0.01)


def test_an_unknown_class_is_named(model, tmp_path):
    data = make_shards(write_splits(tmp_path / "s", 2, 1, ("cat", "dgo", "fly")), tmp_path / "shards")
    with pytest.raises(
        VitptError, match=r"class 'dgo' is not among the 5 classes of the model \(2 of 3 are not\)"
    ) as caught:
        evaluated(model, data)
    assert caught.value.exit_code == Exit.DATA
    assert "'dog'" in caught.value.hint


def test_a_model_without_names_takes_as_many_classes_by_number(model, tiny_shards, tmp_path):
    nameless = tmp_path / "nameless"
    shutil.copytree(model, nameless)
    config = json.loads((nameless / "config.json").read_text()) | {"classes": None}
    (nameless / "config.json").write_text(json.dumps(config))
    with pytest.raises(VitptError, match="3 classes, but the model has 5, without names to match") as caught:
        evaluated(nameless, tiny_shards)
    assert caught.value.exit_code == Exit.DATA
    five = make_shards(write_splits(tmp_path / "s", 2, 2, tuple(CLASSES)), tmp_path / "shards")
    by_number, by_name = evaluated(nameless, five), evaluated(model, five)
    assert by_number["loss"] == by_name["loss"]
    assert by_number["samples"] == 10


def test_a_split_without_labels_and_a_missing_split_are_refused(model, tiny_shards, tmp_path):
    data = changed_copy(tiny_shards, tmp_path / "shards", "val", unlabelled=range(21))
    with pytest.raises(VitptError, match="no sample of split 'val' has a label") as caught:
        evaluated(model, data)
    assert caught.value.exit_code == Exit.DATA
    with pytest.raises(VitptError, match="no split 'test'; there is train, val") as caught:
        evaluated(model, data, split="test")
    assert caught.value.exit_code == Exit.USAGE


def test_a_model_without_a_head_is_refused(tmp_path, tiny_shards):
    write_checkpoint(tmp_path / "mpp", schema.Mpp())
    with pytest.raises(VitptError, match="has no classification head") as caught:
        evaluated(tmp_path / "mpp", tiny_shards)
    assert caught.value.exit_code == Exit.USAGE
    assert "vitpt finetune --from" in caught.value.hint


@pytest.mark.two_process
def test_two_processes_give_the_same_numbers(model, tiny_shards, tmp_path):
    data = changed_copy(tiny_shards, tmp_path / "shards", "val", unlabelled=[0], damaged=[3])
    done = torchrun(2, "eval", model, "--data", data, "--batch", 4, "--decoder", "cpu", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    two, one = json.loads(done.stdout), evaluated(model, data)
    assert done.stderr.count(f"evaluating {model}") == 1  # rank 0 alone speaks
    assert two["samples"] == 19
    assert {**two, "loss": 0} == {**one, "loss": 0}
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-6)


def loader_of(task, shards, batch):
    split = open_dataset(shards).split("val")
    planner = evaluation_planner(schema.Squash(), SIZES["res"], 0, split, batch, 1, 0, task.draws, False)
    loader = Loader(planner, split, SIZES["res"], decoder="cpu", threads=1, prefetch=1, crc="first", device=CPU)
    return loader, planner.steps


def test_an_abandoned_evaluation_gives_nothing_and_puts_the_mode_back(tmp_path, tiny_shards):
    task = write_checkpoint(tmp_path / "model").train()
    loader, steps = loader_of(task, tiny_shards, 4)
    asked = []
    assert evaluate(task, loader, steps, lambda t: t, stopped=lambda: len(asked) == 3 or asked.append(1)) is None
    assert len(asked) == 3
    assert task.training
    advanced = []
    result = evaluate(task, loader, steps, lambda t: t, advance=lambda: advanced.append(1))
    assert (result.samples, result.bad) == (21, 0)
    assert result.totals["loss"][1] == 21
    assert len(advanced) == steps == 6
    assert task.training


def test_meter_sums_in_float64_and_leaves_out_what_counted_nothing():
    meter = Meter(CPU)
    for total, count in ((2**25, 1.0), (1.0, 1.0), (1.0, 0.0)):
        pairs = {"loss": torch.tensor([total, count]), "never": torch.zeros(2)}
        meter.add(Loss(torch.tensor(total), torch.tensor(count), pairs))
    totals = meter.totals(lambda t: t)
    assert totals == {"loss": [2**25 + 2, 2.0], "never": [0.0, 0.0]}  # float32 has no 2**25 + 1
    assert means(totals) == {"loss": 2**24 + 1}
    other = Meter(CPU)
    other.load(totals)
    assert other.totals(lambda t: 3 * t)["loss"] == [3 * (2**25 + 2), 6.0]
    assert Meter(CPU).totals(lambda t: t) == {}
