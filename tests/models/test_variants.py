import json
import subprocess
import sys

import pytest
import torch
from oracles import ORACLES

from vitpt.errors import VitptError
from vitpt.models.variants import ViTConfig, config_from, macs
from vitpt.objectives import build_task
from vitpt.recipe import schema

COUNTS = ORACLES["param_counts"]["values"]


def _model(key: str, **options: object) -> schema.Model:
    """`Ti/16@224` -> the recipe section."""
    name, res = key.split("@")
    variant, patch = name.split("/")
    return schema.Model(name=f"vit_{variant.lower()}{patch}", res=int(res), **options)


def _parameters(
    section: schema.Model, objective: schema.Supervised | schema.Mpp, num_classes: int | None
) -> dict[str, int]:
    with torch.device("meta"):
        task = build_task(config_from(section), objective, num_classes)
    counts = {"backbone": 0, "objective": 0}
    for name, parameter in task.named_parameters():
        counts[name.split(".")[0]] += parameter.numel()
    return counts


@pytest.mark.parametrize("key", COUNTS)
def test_parameter_counts(key):
    expected = COUNTS[key]
    plain = _parameters(_model(key), schema.Supervised(), 1000)
    assert plain["backbone"] == expected["headless"]
    assert sum(plain.values()) == expected["k1000"]
    gap = _parameters(_model(key, pool="gap"), schema.Supervised(), 1000)
    assert sum(gap.values()) == expected["gap_k1000"]
    mpp = _parameters(_model(key), schema.Mpp(), None)
    assert sum(mpp.values()) == expected["mpp_mean_total"]


@pytest.mark.parametrize("key", ["Ti/16@224", "B/32@384"])
@pytest.mark.parametrize("num_classes", [10, 21841, 21843])
def test_parameter_counts_of_other_heads(key, num_classes):
    counts = _parameters(_model(key), schema.Supervised(), num_classes)
    assert sum(counts.values()) == COUNTS[key][f"k{num_classes}"]
    wide = _parameters(_model(key), schema.Supervised(representation=True), num_classes)
    assert sum(wide.values()) - sum(counts.values()) == COUNTS[key]["rep_extra"]


@pytest.mark.parametrize("key", COUNTS)
def test_macs(key):
    assert macs(config_from(_model(key))) == COUNTS[key]["macs_headless"]


def test_macs_of_heads_and_no_class_token():
    config = config_from(_model("B/16@224"))
    headless = macs(config)
    assert macs(config, num_classes=1000) - headless == 768_000
    assert macs(config, num_classes=10, representation=True) - headless == 768 * 768 + 7680
    assert macs(config, predictions=98 * 512) - headless == 98 * 512 * 768
    assert macs(config_from(_model("B/16@224", pool="gap"))) < headless


@pytest.mark.parametrize("key", ["B/32", "B/16", "L/32", "L/16", "H/14"])
def test_exaflops_of_the_paper(key):
    published, epochs = next(
        (value, int(name.split("x")[1])) for name, value in _published() if name.startswith(f"{key}x")
    )
    exaflops = 6 * macs(config_from(_model(f"{key}@224"))) * epochs * 303e6 / 1e18
    assert exaflops == pytest.approx(published, rel=ORACLES["exaflops"]["tol_rel"])


def _published():
    return ORACLES["exaflops"]["published"].items()


def test_free_sizes():
    config = config_from(schema.Model(width=48, depth=3, heads=4, mlp=100, patch=7, res=21, pool="gap"))
    assert (config.grid, config.num_patches, config.num_prefix) == ((3, 3), 9, 0)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"name": "vit_x16"}, "unknown name 'vit_x16'"),
        ({"name": "vit_b16", "width": 12}, "name 'vit_b16' and width are given"),
        ({"width": 12, "depth": 1, "heads": 3, "mlp": 4}, "patch is missing"),
        ({}, "width is missing"),
        ({"name": "vit_b16", "res": 230}, "nearest: 224 or 240"),
        ({"name": "vit_b16", "res": 9}, "nearest: 16"),
        ({"width": 12, "depth": 1, "heads": 5, "mlp": 4, "patch": 16}, "nearest: 4"),
        ({"width": 6, "depth": 1, "heads": 1, "mlp": 4, "patch": 16, "pos_embed": "sincos2d"}, "multiple of 4"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(section, message):
    with pytest.raises(VitptError, match=message):
        config_from(schema.Model(**section))


def test_dictionary_goes_through_json_and_back():
    config = ViTConfig(width=8, depth=2, heads=2, mlp=16, patch=4, res=(8, 12), pool="gap", dropout=0.1)
    assert ViTConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(VitptError, match="unknown key 'window'"):
        ViTConfig.from_dict({**config.to_dict(), "window": 3})
    with pytest.raises(VitptError, match="'mlp' is missing"):
        ViTConfig.from_dict({"width": 8, "depth": 2, "heads": 2, "patch": 4})


def test_needs_no_torch():
    code = "import sys, vitpt.models.variants; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
