import pytest
import torch
from oracles import ORACLES, formula
from torch import nn

from vitpt.errors import Exit, VitptError
from vitpt.models.variants import ViTConfig
from vitpt.objectives import build_task
from vitpt.recipe.schema import AdamW, Mpp, Sgd
from vitpt.train.ema import Ema
from vitpt.train.optim import build_optimizer, load_state, set_learning_rate, state_tensors

REFERENCE = ORACLES["optimizers"]


class Weight(nn.Module):
    """A Linear whose (decayed) weight is the oracle's p0."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1, bias=False).double()
        with torch.no_grad():
            self.layer.weight.copy_(formula((1, 4), 1, 0.9, 0.2))


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (AdamW(lr=1e-3, weight_decay=0.1), REFERENCE["adamw_b9_b999_eps1e8_wd01"]),
        (Sgd(lr=1e-3), REFERENCE["sgd_momentum09"]),
    ],
    ids=["adamw", "sgd"],
)
def test_reference_updates(section, expected):
    module = Weight()
    optimizer = build_optimizer(section, module)
    for k, lr in enumerate(REFERENCE["lrs"]):
        set_learning_rate(optimizer, lr)
        module.layer.weight.grad = formula((1, 4), 0.5, 0.7, k)
        optimizer.step()
        torch.testing.assert_close(
            module.layer.weight.detach()[0],
            torch.tensor(expected[k], dtype=torch.float64),
            rtol=0,
            atol=REFERENCE["tol"],
        )


def small_task():
    config = ViTConfig(width=16, depth=2, heads=2, mlp=32, patch=4, res=8)
    task = build_task(config, Mpp(), None)
    task.initialise(torch.Generator().manual_seed(0))
    return task


def test_only_weights_of_layers_decay():
    task = small_task()
    decayed, free = build_optimizer(AdamW(lr=1.0, weight_decay=0.1), task).param_groups
    names = {id(p): name for name, p in task.named_parameters()}
    assert {names[id(p)] for p in decayed["params"]} == {
        "backbone.patch_embed.proj.weight",
        "objective.head.weight",
        *(
            f"backbone.blocks.{i}.{layer}.weight"
            for i in (0, 1)
            for layer in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
        ),
    }
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.1, 0.0)
    assert len(decayed["params"]) + len(free["params"]) == len(names)


@pytest.mark.parametrize("section", [AdamW(lr=1e-2, weight_decay=0.1), Sgd(lr=1e-2)], ids=["adamw", "sgd"])
def test_state_put_back_continues_bit_for_bit(section):
    def updates(task, optimizer, count, first):
        for k in range(first, first + count):
            for index, parameter in enumerate(task.parameters()):
                parameter.grad = formula(tuple(parameter.shape), 0.1, 0.3, k + index).float()
            optimizer.step()

    straight, resumed = small_task(), small_task()
    optimizer = build_optimizer(section, straight)
    updates(straight, optimizer, 2, 0)
    weights = {name: p.detach().clone() for name, p in straight.named_parameters()}
    saved = {key: tensor.clone() for key, tensor in state_tensors(optimizer, straight).items()}
    updates(straight, optimizer, 2, 2)

    with torch.no_grad():
        for name, parameter in resumed.named_parameters():
            parameter.copy_(weights[name])
    again = build_optimizer(section, resumed)
    load_state(again, resumed, saved)
    updates(resumed, again, 2, 2)
    for name, parameter in straight.named_parameters():
        assert torch.equal(parameter, dict(resumed.named_parameters())[name]), name


def test_state_of_another_model_is_refused():
    task = small_task()
    with pytest.raises(VitptError, match="fits no parameter") as caught:
        load_state(build_optimizer(AdamW(lr=1.0), task), task, {"backbone.nothing:exp_avg": torch.zeros(3)})
    assert caught.value.exit_code == Exit.DATA


def test_ema_reference():
    module = nn.Linear(3, 1, bias=False)

    def put(t):
        with torch.no_grad():
            module.weight.copy_(formula((1, 3), 1, 0.5, t).float())

    put(0)
    ema = Ema(module, 0.9999)
    for step in ORACLES["ema"]["steps"]:
        put(step["t"])
        ema.update(step["t"])
        torch.testing.assert_close(ema.average["weight"][0], torch.tensor(step["ema"]), rtol=0, atol=1e-6)
    raw = module.weight.detach().clone()
    with ema.swapped_in():
        assert torch.equal(module.weight, ema.average["weight"])
    assert torch.equal(module.weight, raw)
