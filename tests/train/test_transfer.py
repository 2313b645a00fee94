"""A checkpoint's weights in a model of another resolution, pooling, objective or width."""

import pytest
import torch
from oracles import ORACLES

from vitpt.errors import Exit, VitptError
from vitpt.models.posembed import sincos2d
from vitpt.models.variants import ViTConfig
from vitpt.objectives import build_task
from vitpt.recipe.schema import Mpp, Supervised
from vitpt.train.transfer import load_backbone

SIZES = {"width": 8, "depth": 2, "heads": 2, "mlp": 16, "patch": 4, "res": 8}


def task_of(section=None, seed=0, **options):
    task = build_task(ViTConfig(**{**SIZES, **options}), section or Supervised(), 3)
    task.initialise(torch.Generator().manual_seed(seed))
    return task


def moved(old, new):
    """Put the old task's weights into the new one; return what is said and the new backbone's tensors."""
    return load_backbone(new, old.state_dict(), old.backbone.config, "the checkpoint"), new.backbone.state_dict()


def test_the_same_model_is_copied_and_the_head_stays_fresh():
    old, new = task_of(Mpp(), seed=1), task_of(seed=2)
    head = {name: value.clone() for name, value in new.objective.state_dict().items()}
    said, found = moved(old, new)
    assert said == []
    assert all(torch.equal(value, found[name]) for name, value in old.backbone.state_dict().items())
    assert all(torch.equal(value, new.objective.state_dict()[name]) for name, value in head.items())


@pytest.mark.parametrize("pool", ["tok", "gap"])
def test_positions_are_resized_to_the_new_grid(pool):
    reference = ORACLES["posemb_resize"]["simple_2x2_to_3x3"]
    old, new = task_of(pool=pool), task_of(pool=pool, res=12)
    prefix = 1 if pool == "tok" else 0
    with torch.no_grad():
        old.backbone.pos_embed[0, prefix:] = torch.tensor(reference["grid"]).reshape(4, 1)
        if prefix:
            old.backbone.pos_embed[0, 0] = 77.0
    said, found = moved(old, new)
    expected = torch.tensor(reference["jax"]).reshape(9, 1).expand(9, 8)
    torch.testing.assert_close(found["pos_embed"][0, prefix:], expected, atol=1e-5, rtol=0)
    if prefix:
        assert (found["pos_embed"][0, 0] == 77.0).all()
    assert said == ["position embedding resized from 2x2 to 3x3 patches"]
    assert torch.equal(found["blocks.1.mlp.fc2.weight"], old.backbone.state_dict()["blocks.1.mlp.fc2.weight"])


def test_from_class_token_to_mean():
    old, new = task_of(seed=1), task_of(seed=2, pool="gap")
    said, found = moved(old, new)
    assert torch.equal(found["pos_embed"], old.backbone.pos_embed[:, 1:])
    assert "cls_token" not in found
    assert len(said) == 1
    assert "class token dropped" in said[0]


def test_from_mean_to_class_token():
    old, new = task_of(seed=1, pool="gap"), task_of(seed=2)
    fresh = {name: value.clone() for name, value in new.backbone.state_dict().items()}
    said, found = moved(old, new)
    assert torch.equal(found["pos_embed"][:, 1:], old.backbone.pos_embed)
    assert torch.equal(found["pos_embed"][:, :1], fresh["pos_embed"][:, :1])
    assert torch.equal(found["cls_token"], fresh["cls_token"])
    assert len(said) == 1
    assert "class token begun afresh" in said[0]


def test_everything_at_once():
    old, new = task_of(Mpp(), seed=1), task_of(seed=2, pool="gap", res=16)
    said, found = moved(old, new)
    assert found["pos_embed"].shape == (1, 16, 8)
    assert len(said) == 2
    # the corners of the grid stay where they are
    for corner, there in ((0, 0), (3, 1), (12, 2), (15, 3)):
        torch.testing.assert_close(found["pos_embed"][0, corner], old.backbone.pos_embed[0, 1 + there].detach())
    new.predict(torch.zeros(1, 16, 16, 3, dtype=torch.uint8))


@pytest.mark.parametrize("pos_embed", ["sincos2d", "none"])
def test_fixed_positions_are_computed_for_the_new_grid(pos_embed):
    old, new = task_of(seed=1, pos_embed=pos_embed), task_of(seed=2, pos_embed=pos_embed, res=16)
    said, found = moved(old, new)
    assert said == []
    assert "pos_embed" not in found
    assert torch.equal(found["cls_token"], old.backbone.cls_token)
    if pos_embed == "sincos2d":
        assert torch.equal(new.backbone.pos_embed.reshape(1, 16, 8), sincos2d((4, 4), 8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 12}, r"the checkpoint: .* has shape .*, the model needs"),
        ({"depth": 3}, "the checkpoint: lacks blocks.2"),
        ({"depth": 1}, "the checkpoint: has an unknown tensor blocks.1"),
        ({"pos_embed": "none"}, "the checkpoint: has an unknown tensor pos_embed"),
    ],
)
def test_another_model_is_refused(options, message):
    with pytest.raises(VitptError, match=message) as caught:
        moved(task_of(), task_of(**options))
    assert caught.value.exit_code == Exit.DATA
