"""What is settled and what is refused before a run starts."""

import json
import shutil

import pytest
import yaml
from changed import changed_copy
from images import make_shards, write_class_folder
from running import job, run, tiny_recipe
from small_checkpoint import SIZES, write_checkpoint

from vitpt import checkpoint
from vitpt.errors import Exit, VitptError
from vitpt.recipe import schema
from vitpt.train.job import is_finished, make_job, read_init, read_summary
from vitpt.train.setup import prepare_folder


def refused(message, recipe, out, *overrides, init=None):
    with pytest.raises(VitptError, match=message) as caught:
        job(recipe, out, *overrides, init=init)
    assert not out.exists()
    return caught.value


@pytest.fixture
def recipe(tmp_path, tiny_shards):
    return tiny_recipe(tmp_path, tiny_shards)


def test_a_job_without_a_folder_goes_under_runs(recipe):
    found = job(recipe, None)
    assert str(found.folder) == "runs/tiny"
    assert (found.num_samples, found.steps, found.num_classes) == (60, 24, 3)
    assert found.data["num_samples"] == 60
    assert found.data["sources"][0]["classes"] == ["cat", "dog", "eel"]


@pytest.mark.parametrize(("epochs", "steps"), [("1", 6), ("2.5", 15), ("0.01", 1)])
def test_epochs_are_turned_into_steps(recipe, tmp_path, epochs, steps):
    text = recipe.read_text().replace("steps: 24", f"epochs: {epochs}").replace("warmup_steps: 3", "warmup_steps: 0")
    recipe.write_text(text)
    assert job(recipe, tmp_path / "run").steps == steps


def test_unlabelled_samples_are_refused_with_their_number(tiny_shards, tmp_path):
    data = changed_copy(tiny_shards, tmp_path / "shards", "train", unlabelled=range(7))
    recipe = tiny_recipe(tmp_path, data)
    error = refused("7 of 60 samples of split 'train' have no label", recipe, tmp_path / "run")
    assert error.exit_code == Exit.DATA
    assert "data.labelled_only=true" in error.hint
    rest = job(recipe, tmp_path / "run", "data.labelled_only=true")
    assert rest.num_samples == 53
    half = job(recipe, tmp_path / "run", "data.labelled_only=true", "data.fraction=0.5")
    assert half.num_samples in (26, 27)
    without_labels = job(tiny_recipe(tmp_path, data, "mpp"), tmp_path / "run")
    assert (without_labels.num_samples, without_labels.num_classes) == (60, None)


def test_images_without_classes_are_refused_for_classification_alone(tmp_path):
    write_class_folder(tmp_path / "flat", 6)
    data = make_shards(tmp_path / "flat", tmp_path / "shards")
    error = refused("split 'train' has no labels", tiny_recipe(tmp_path, data), tmp_path / "run")
    assert error.exit_code == Exit.DATA
    found = job(tiny_recipe(tmp_path, data, "mpp"), tmp_path / "run", "eval=null")
    assert (found.num_samples, found.eval_split) == (6, None)


def test_a_missing_evaluation_split_names_those_there_are(recipe, tmp_path):
    error = refused(
        r"eval\.split: .* no split 'test'; there is train, val",
        recipe,
        tmp_path / "run",
        "eval.split=test",
        "eval.metric=test/loss",
    )
    assert error.exit_code == Exit.USAGE
    assert "--val-fraction" in error.hint
    assert refused("no split 'all'", recipe, tmp_path / "run", "data.split=all").exit_code == Exit.USAGE


def test_an_evaluation_split_without_labels_is_refused_for_classification(tiny_shards, tmp_path):
    data = changed_copy(tiny_shards, tmp_path / "shards", "val", unlabelled=range(21))
    error = refused("eval.split: no sample of 'val' has a label", tiny_recipe(tmp_path, data), tmp_path / "run")
    assert error.exit_code == Exit.DATA
    assert job(tiny_recipe(tmp_path, data, "mpp"), tmp_path / "run").eval_split is not None


def test_a_warmup_longer_than_the_run_is_refused(recipe, tmp_path):
    error = refused(
        "24 steps of warmup, but the run has 24 steps", recipe, tmp_path / "run", "schedule.warmup_steps=24"
    )
    assert error.exit_code == Exit.USAGE
    assert "60 samples" in error.hint


def test_a_model_is_needed_where_no_checkpoint_gives_one(recipe, tmp_path):
    recipe.write_text(
        recipe.read_text().replace(
            "model: {width: 16, depth: 2, heads: 2, mlp: 32, patch: 8, res: 32}", "model: {res: 32}"
        )
    )
    refused("model: neither name nor width", recipe, tmp_path / "run")


# -- starting from a checkpoint


FINETUNE = """
name: tuned
data: {path: PATH, crop: {kind: squash}}
model: {res: 24}
objective: {kind: supervised}
optim: {kind: sgd, lr: 0.01}
train: {steps: 4, global_batch_size: 5}
"""


@pytest.fixture
def tuning(tmp_path, tiny_shards):
    path = tmp_path / "tuned.yaml"
    path.write_text(FINETUNE.replace("PATH", str(tiny_shards)))
    return path


@pytest.fixture
def start(tmp_path):
    """A checkpoint unlike the defaults in everything a recipe may leave out."""
    pixels = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}
    write_checkpoint(tmp_path / "start", schema.Mpp(), gelu="erf", pos_embed="sincos2d", pixels=pixels)
    return read_init(tmp_path / "start")


def test_what_the_recipe_leaves_out_comes_from_the_checkpoint(tuning, start, tmp_path):
    found = job(tuning, tmp_path / "run", init=start)
    model = {key: getattr(found.model, key) for key in ("width", "depth", "heads", "mlp", "patch", "gelu", "pos_embed")}
    assert model == {**{key: SIZES[key] for key in SIZES if key != "res"}, "gelu": "erf", "pos_embed": "sincos2d"}
    assert found.model.res == 24
    assert (found.recipe.data.mean, found.recipe.data.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    # the stored recipe says it all, so that it can be read without the checkpoint
    prepare_folder(found)
    stored = yaml.safe_load((tmp_path / "run/recipe.yaml").read_text())
    assert (stored["model"]["width"], stored["model"]["gelu"], stored["data"]["mean"]) == (12, "erf", [0.1, 0.2, 0.3])
    assert json.loads((tmp_path / "run/init.json").read_text())["sha256"] == start.sha256
    assert job(tuning, tmp_path / "run", init=start).recipe == found.recipe


def test_what_the_recipe_says_of_pixels_counts(tuning, start, tmp_path):
    found = job(tuning, tmp_path / "run", "data.mean=[0.5,0.5,0.5]", init=start)
    assert (found.recipe.data.mean, found.recipe.data.std) == ((0.5, 0.5, 0.5), (0.4, 0.5, 0.6))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.gelu=tanh"], r"model\.gelu: the recipe says tanh, the checkpoint .*start has erf"),
        (
            ["model.pos_embed=learned"],
            r"model\.pos_embed: the recipe says learned, the checkpoint .*start has sincos2d",
        ),
        (["model.name=vit_ti8"], r"model\.width: the recipe says 192, the checkpoint .*start has 12"),
    ],
)
def test_what_contradicts_the_checkpoint_is_named(tuning, start, tmp_path, overrides, message):
    error = refused(message, tuning, tmp_path / "run", *overrides, init=start)
    assert error.exit_code == Exit.USAGE
    assert "--from" in error.hint


def test_a_resolution_that_the_patch_does_not_divide_names_the_nearest_two(tuning, start, tmp_path):
    error = refused(
        "model.res: 27 is not a multiple of the patch side 4; nearest: 24 or 28",
        tuning,
        tmp_path / "run",
        "model.res=27",
        init=start,
    )
    assert error.exit_code == Exit.USAGE


def test_a_run_goes_on_only_from_the_weights_it_started_from(tuning, start, tmp_path):
    run(tuning, tmp_path / "run", init=start)
    assert is_finished(job(tuning, tmp_path / "run", init=start))
    tensors = {name: value + 1 for name, value in checkpoint.load_tensors(start.folder).items()}
    checkpoint.write_model(tmp_path / "other", tensors, start.config)
    with pytest.raises(VitptError, match=r"--from: the run in .*run started from other weights") as caught:
        job(tuning, tmp_path / "run", init=read_init(tmp_path / "other"))
    assert caught.value.exit_code == Exit.USAGE
    shutil.copytree(start.folder, tmp_path / "moved")  # the weights count, not where they lie
    assert is_finished(job(tuning, tmp_path / "run", init=read_init(tmp_path / "moved")))


# -- the run's folder


def test_a_finished_run(recipe, tmp_path):
    overrides = ("train.steps=4", "eval=null")
    assert not is_finished(job(recipe, tmp_path / "run", *overrides))
    run(recipe, tmp_path / "run", *overrides)
    found = job(recipe, tmp_path / "run", *overrides)
    assert is_finished(found)
    assert read_summary(found)["steps"] == 4
    assert read_summary(found)["images_seen"] == 40


def test_a_folder_of_something_else_is_refused(recipe, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/a.jpg").touch()
    with pytest.raises(VitptError, match=r"photos: not empty and not a run of vitpt \(it holds a\.jpg"):
        job(recipe, tmp_path / "photos")
    (tmp_path / "file").touch()
    with pytest.raises(VitptError, match="file: a file is in the way"):
        job(recipe, tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert job(recipe, tmp_path / "empty").steps == 24


def test_a_damaged_data_json_is_named(recipe, tmp_path):
    prepare_folder(job(recipe, tmp_path / "run"))
    (tmp_path / "run/data.json").write_text("{")
    with pytest.raises(VitptError, match=r"data\.json: not readable as JSON") as caught:
        job(recipe, tmp_path / "run")
    assert caught.value.exit_code == Exit.DATA


def test_hashes_say_what_is_learnt_and_nothing_else(recipe, tuning, start, tmp_path):
    first = job(recipe, tmp_path / "run")
    for override in ("data.threads=2", "name=other", "log.every_steps=7", "eval=null"):
        assert job(recipe, tmp_path / "run", override).recipe_hash == first.recipe_hash, override
    for override in ("seed=4", "model.gelu=erf", "train.steps=25", "data.flip=both"):
        assert job(recipe, tmp_path / "run", override).recipe_hash != first.recipe_hash, override
    assert job(recipe, tmp_path / "run", "data.fraction=0.5").data_hash != first.data_hash
    tuned = make_job("finetune", job(tuning, None, init=start).recipe, None, start)
    assert tuned.recipe_hash != make_job("pretrain", tuned.recipe, None).recipe_hash
