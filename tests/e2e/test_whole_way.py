"""The whole way: images -> shards -> pretraining -> fine-tuning at another size -> evaluation -> timm and Google's format and back."""

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from images import encode
from PIL import Image
from timm.data import create_transform, resolve_data_config
from torch.nn import functional as F
from typer.testing import CliRunner

from vitpt.cli.app import app
from vitpt.dataset import open_dataset
from vitpt.evaluate.standalone import load_task
from vitpt.recipe import schema
from vitpt.stream.loader import Loader
from vitpt.stream.plan import evaluation_planner

torch.set_num_threads(1)
CLASSES = ("amber", "blue", "green", "purple", "red", "white", "yellow")
COLOURS = ((255, 176, 0), (40, 60, 220), (40, 180, 60), (140, 40, 180), (210, 40, 40), (240, 240, 240), (240, 230, 60))
VAL = 9  # images a class

PRETRAIN = """
name: small
finetune: tuned.yaml
data: {path: photos-shards, crop: {kind: random_resized, area: [0.5, 1.0]}, threads: 1}
model: {width: 24, depth: 2, heads: 3, mlp: 48, patch: 8, res: 32}
objective: {kind: mpp}
optim: {kind: adamw, lr: 2e-3}
schedule: {warmup_steps: 2}
train: {steps: 20, global_batch_size: 16}
log: {every_steps: 10}
"""
FINETUNE = """
name: tuned
data: {path: photos-shards, crop: {kind: random_resized, area: [0.5, 1.0]}, threads: 1}
model: {res: 32}
objective: {kind: supervised}
optim: {kind: adamw, lr: 5e-3}
train: {steps: 30, global_batch_size: 16}
eval: {every_steps: 10, metric: val/top1, mode: max, crop: {kind: short_crop, short: 56}}
log: {every_steps: 10}
"""


def write_photos(root):
    """Photos of coloured stripes with noise, 7 classes; many sizes, JPEG and PNG."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 24), ("val", VAL)):
        for name, colour in zip(CLASSES, COLOURS, strict=True):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                width, height = rng.integers(40, 90, 2).tolist()
                stripes = 0.5 + 0.5 * np.sin(np.arange(width) / rng.uniform(2, 9) + rng.uniform(0, 6))[None, :, None]
                mixed = stripes * np.array(colour) + (1 - stripes) * rng.integers(0, 256, 3)
                pixels = np.clip(mixed + rng.normal(0, 20, (height, width, 3)), 0, 255).astype(np.uint8)
                kind = "PNG" if number % 4 == 3 else "JPEG"
                (root / split / name / f"{number}.{kind.lower()}").write_bytes(encode(pixels, kind))


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """The working directory of all steps."""
    folder = tmp_path_factory.mktemp("work")
    write_photos(folder / "photos")
    (folder / "small.yaml").write_text(PRETRAIN)
    (folder / "tuned.yaml").write_text(FINETUNE)
    with contextlib.chdir(folder):
        yield folder


def run(*args):
    """Run the command line; return what it says on stdout and stderr."""
    done = CliRunner().invoke(app, list(map(str, args)))
    assert done.exit_code == 0, done.output
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def tuned(here):
    """All up to the fine-tuned run; each command is the one that the command before names or that needs no words."""
    assert "next: vitpt pretrain" in run("shard", "photos", "-j", 1)[1]
    assert "next: vitpt finetune --from runs/small" in run("pretrain", "small.yaml")[1]
    said = run("finetune", "--res", 48)[1]
    assert said.startswith("fine-tuning runs/small by recipe tuned.yaml\n")
    assert "position embedding resized from 4x4 to 6x6 patches" in said
    assert "next: vitpt eval runs/tuned" in said
    return here / "runs/tuned"


@pytest.fixture(scope="module")
def result(tuned):
    """What `vitpt eval` says."""
    return json.loads(run("eval", "--json")[0])


@pytest.fixture(scope="module")
def model(tuned):
    """The same model in timm."""
    run("convert", "runs/tuned", "tuned-timm", "--to", "timm")
    return timm.create_model("local-dir:tuned-timm", pretrained=True).eval()


@pytest.fixture(scope="module")
def val(tuned):
    """(images (N, 48, 48, 3) uint8, labels) of the validation split, as `vitpt eval` sees them, and the task."""
    task, config = load_task(tuned / "checkpoints" / (tuned / "checkpoints/BEST").read_text().strip())
    split = open_dataset("photos-shards").split("val")
    crop = schema.ShortCrop(short=config["pixels"]["crop"]["short"])
    planner = evaluation_planner(crop, 48, 0, split, split.num_samples, 1, 0, task.draws, True)
    loader = Loader(planner, split, 48, decoder="cpu", threads=1, prefetch=1, crc="first", device=torch.device("cpu"))
    with loader.batches(0, planner.steps) as batches:
        (batch,) = list(batches)
        return batch.images[0].clone(), batch.labels.clone(), task.eval()


def test_the_model_has_learnt_and_every_sample_counts(result):
    assert (result["samples"], result["bad"], result["unlabelled"]) == (VAL * len(CLASSES), 0, 0)
    assert result["data"] == "photos-shards"
    assert 1.5 / len(CLASSES) < result["top1"] <= result["top5"]


def test_timm_computes_the_same_logits_and_top1(model, val, result):
    images, labels, task = val
    mean, std = (torch.tensor(model.pretrained_cfg[key]).reshape(1, 3, 1, 1) for key in ("mean", "std"))
    with torch.no_grad():
        ours = task.predict(images)
        theirs = model((images.permute(0, 3, 1, 2).float() / 255 - mean) / std)
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=0)
    hits = (theirs.argmax(dim=1) == labels).sum().item()
    assert hits / len(labels) == result["top1"]
    assert F.cross_entropy(theirs, labels).item() == pytest.approx(result["loss"], rel=1e-5)


def test_timms_own_pipeline_from_the_files_gives_the_same(model, here, result):
    config = resolve_data_config({}, model=model)
    assert config["input_size"] == (3, 48, 48)
    transform = create_transform(**config, is_training=False)
    pictures, labels = [], []
    for label, name in enumerate(CLASSES):
        for path in sorted((here / "photos/val" / name).iterdir()):
            pictures.append(transform(Image.open(path).convert("RGB")))
            labels.append(label)
    with torch.no_grad():
        logits = model(torch.stack(pictures))
    labels = torch.tensor(labels)
    # Pillow's resize rounds between its two passes: a level of difference here and there
    assert F.cross_entropy(logits, labels).item() == pytest.approx(result["loss"], rel=0.01)
    assert (logits.argmax(1) == labels).float().mean().item() == pytest.approx(result["top1"], abs=1.01 / len(labels))


def test_from_timm_back_the_numbers_stay(model, result):
    assert json.loads(Path("tuned-timm/config.json").read_text())["label_names"] == list(CLASSES)
    run("convert", "tuned-timm", "from-timm", "--to", "native")
    back = json.loads(run("eval", "from-timm", "--data", "photos-shards", "--json")[0])
    assert {**back, "checkpoint": ""} == {**result, "checkpoint": ""}


def test_through_googles_format_and_back_the_numbers_stay(tuned, result):
    said = run("convert", "runs/tuned", "tuned.npz", "--to", "google")[1]
    assert "no place for class names" in said
    assert "no place for the evaluation crop" in said
    said = run("convert", "tuned.npz", "from-google", "--to", "native")[1]
    assert "next: vitpt eval from-google --data DIR" in said
    # the crop did not come along; with it the numbers are the same
    path = Path("from-google/config.json")
    config = json.loads(path.read_text())
    assert (config["classes"], config["pixels"]["crop"]) == (None, {"kind": "squash"})
    config["pixels"]["crop"] = {"kind": "short_crop", "short": 56}
    path.write_text(json.dumps(config))
    back = json.loads(run("eval", "from-google", "--data", "photos-shards", "--json")[0])
    assert {**back, "checkpoint": ""} == {**result, "checkpoint": ""}
