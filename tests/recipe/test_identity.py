"""What makes two recipes the same."""

import hashlib
import json
from pathlib import Path

import pytest

from vitpt.recipe.load import load_recipe, recipe_hash, result_differences, result_fields


def recipe(*overrides):
    return load_recipe("vit_b16_mpp", overrides).recipe


EXECUTION = [
    "name=other", "data.path=elsewhere", "data.decoder=cpu", "data.threads=3", "data.prefetch=7", "data.crc=never", "data.max_bad_fraction=0.5",
    "train.micro_batch_size=2", "eval.every_steps=3", "eval=null", "save.keep_last=9", "save.every_minutes=null", "log.trackers=[wandb]",
    "finetune=null", "log.every_steps=1", "eval.crop={kind: squash}",
]  # fmt: skip
RESULT = [
    "seed=1", "data.split=other", "data.fraction=0.5", "data.labelled_only=true", "data.flip=both", "data.crop={kind: squash}",
    "data.crop.area=[0.1, 1]", "data.mean=[0, 0, 0]", "model.name=vit_b8", "model.res=240", "model.gelu=erf", "objective.corrupt=0.4",
    "objective={kind: supervised}", "optim.lr=1e-3", "optim.clip_grad_norm=null", "optim={kind: sgd, lr: 2e-4}", "schedule.kind=linear",
    "ema.decay=0.99", "train.steps=100_001", "train.global_batch_size=4095", "train.precision=fp32",
]  # fmt: skip


@pytest.mark.parametrize("override", EXECUTION)
def test_execution_fields_do_not_change_the_hash(override):
    assert recipe(override) != recipe()
    assert recipe_hash(recipe(override), {}) == recipe_hash(recipe(), {})


@pytest.mark.parametrize("override", RESULT)
def test_result_fields_change_the_hash_and_are_named(override):
    old, new = result_fields(recipe()), result_fields(recipe(override))
    assert recipe_hash(recipe(override), {}) != recipe_hash(recipe(), {})
    keys = [key for key, _, _ in result_differences(old, new)]
    assert keys
    assert all(key.startswith(override.split("=")[0].split(".")[0]) for key in keys)


def test_every_field_of_the_schema_is_in_one_of_the_two_lists():
    """A new field must be thought about: it either changes what is learnt or it does not."""
    from vitpt.recipe.names import all_keys, sections_of
    from vitpt.recipe.schema import Recipe

    def roles(section, prefix=""):
        for name, field in section.model_fields.items():
            below = sections_of(field)
            role = (field.json_schema_extra or {}).get("role")
            if not below or role:
                yield prefix + name, role or ("result" if name == "kind" else None)
            for inner in below if not role else ():
                yield from roles(inner, f"{prefix}{name}.")

    found = dict(roles(Recipe))
    assert None not in found.values()
    assert set(found) | {"eval"} <= set(all_keys())


def test_hash_is_sha256_of_canonical_json():
    extra = {"data": "abc"}
    fields = result_fields(recipe())
    text = json.dumps({"extra": extra, "recipe": fields}, sort_keys=True, separators=(",", ":"))
    assert recipe_hash(recipe(), extra) == hashlib.sha256(text.encode()).hexdigest()
    assert recipe_hash(recipe(), {"data": "abd"}) != recipe_hash(recipe(), extra)


def test_spelling_does_not_matter(tmp_path):
    text = Path(load_recipe("vit_b16_mpp").path).read_text()
    other = tmp_path / "other.yaml"
    other.write_text(text.replace("100_000", "1e5").replace("2e-4", "0.0002").replace("seed: 0\n", ""))
    assert recipe_hash(load_recipe(other).recipe, {}) == recipe_hash(recipe(), {})


def test_differences_survive_json():
    stored = json.loads(json.dumps(result_fields(recipe())))
    assert result_differences(stored, result_fields(recipe())) == []
    changed = result_fields(recipe("optim.lr=1e-3", "data.crop={kind: squash}"))
    assert result_differences(stored, changed) == [
        ("data.crop.area", [0.05, 1.0], None),
        ("data.crop.kind", "random_resized", "squash"),
        ("data.crop.ratio", [0.75, 1.3333333], None),
        ("optim.lr", 2e-4, 1e-3),
    ]
