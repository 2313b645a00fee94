import numpy as np
import pytest
import torch
from oracles import tiny_vit

from vitpt.models.variants import ViTConfig
from vitpt.objectives import OBJECTIVES, build_task
from vitpt.recipe import schema

torch.set_num_threads(1)
CONFIG = tiny_vit().config
DEEP = ViTConfig(**{**CONFIG.to_dict(), "depth": 3, "drop_path": 0.5})
IDS = np.arange(4)


def _draws(task, ids=IDS):
    drawn = task.draws(7, np.zeros(len(ids), dtype=np.int64), ids)
    return {name: torch.from_numpy(values) for name, values in drawn.items()}


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_state_has_backbone_and_objective_only(kind):
    sections = {"supervised": schema.Supervised(), "mpp": schema.Mpp()}
    task = build_task(CONFIG, sections[kind], 5)
    assert {name.split(".")[0] for name in task.state_dict()} == {"backbone", "objective"}
    assert "backbone.blocks.1.attn.qkv.weight" in task.state_dict()


def test_normalisation():
    task = build_task(CONFIG, schema.Supervised(), 5, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    images = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16, 1).expand(1, 16, 16, 3)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    torch.testing.assert_close(task.normalise(images), (images.float() / 255 - mean) / std)
    half = build_task(CONFIG, schema.Supervised(), 5)
    torch.testing.assert_close(half.normalise(images), images.float() / 127.5 - 1, atol=1e-6, rtol=0)


@pytest.mark.parametrize("section", [schema.Supervised(), schema.Mpp(), schema.Mpp(target="pixels")])
def test_draws_are_integers_of_one_row_a_sample(section):
    task = build_task(DEEP, section, 5)
    drawn = task.draws(7, np.zeros(4, dtype=np.int64), IDS)
    assert drawn["drop_path"].shape == (4, 6)
    for values in drawn.values():
        assert values.dtype.kind in "iu"
        assert len(values) == 4
    assert "drop_path" not in build_task(CONFIG, section, 5).draws(7, np.zeros(4, dtype=np.int64), IDS)


def test_drop_path_belongs_to_sample_and_training():
    task = build_task(DEEP, schema.Supervised(), 5)
    task.initialise(torch.Generator().manual_seed(0))
    torch.nn.init.normal_(task.objective.head.weight, generator=torch.Generator().manual_seed(1))
    image = torch.randint(0, 256, (1, 8, 12, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    images, labels = image.expand(4, -1, -1, -1), torch.zeros(4, dtype=torch.int64)

    def losses(ids):
        draws = _draws(task, ids)
        return [task(images, labels, weights, draws).sum.item() for weights in torch.eye(4)]

    task.train()
    forward = losses(IDS)
    assert len({round(loss, 4) for loss in forward}) > 1  # the same image, dropped differently
    assert losses(IDS[::-1].copy()) == pytest.approx(forward[::-1])
    task.eval()
    assert losses(IDS) == pytest.approx([losses(IDS)[0]] * 4)


def test_prediction_needs_a_classifier():
    task = build_task(CONFIG, schema.Mpp(), None)
    with pytest.raises(TypeError, match="classification"):
        task.predict(torch.zeros(1, 8, 12, 3, dtype=torch.uint8))


def test_initialisation_reaches_every_parameter():
    for section in (schema.Supervised(representation=True), schema.Mpp()):
        task = build_task(CONFIG, section, 5)
        for parameter in task.parameters():
            parameter.data.fill_(float("nan"))
        task.initialise(torch.Generator().manual_seed(0))
        assert all(parameter.isfinite().all() for parameter in task.parameters())
