import pytest
import torch
from oracles import ORACLES, formula, tiny_vit

from vitpt.errors import VitptError
from vitpt.objectives import build_task
from vitpt.objectives.supervised import Supervised, label_ranks
from vitpt.recipe import schema

torch.set_num_threads(1)
CONFIG = tiny_vit().config
LOSSES = ORACLES["losses"]
INITIAL = ORACLES["initial_losses"]["values"]


def _task(num_classes=5, seed=0, **options):
    task = build_task(CONFIG, schema.Supervised(**options), num_classes)
    task.initialise(torch.Generator().manual_seed(seed))
    return task


def _batch(count=4, classes=5):
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (count, 8, 12, 3), generator=generator, dtype=torch.uint8)
    return images, torch.arange(count) % classes, torch.ones(count)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({}, "softmax_ce"),
        ({"label_smoothing": 0.1}, "softmax_ce_smooth01"),
        ({"loss": "sigmoid"}, "sigmoid_sum_over_classes_mean_over_batch"),
        ({"loss": "sigmoid", "label_smoothing": 0.1}, "sigmoid_smooth01_sum"),
    ],
)
def test_losses(options, key):
    objective = Supervised(schema.Supervised(**options), CONFIG, 5)
    losses = objective._losses(formula((3, 5), 2, 0.7, 0.2), torch.tensor(LOSSES["labels"]))
    assert losses.mean().item() == pytest.approx(LOSSES[key], abs=LOSSES["tol"])


def test_smoothed_label_is_the_published_vector():
    expected = torch.tensor(ORACLES["labels"]["examples"]["smooth0.1_K4_class1"], dtype=torch.float64)
    for loss, transform in (("softmax", torch.softmax), ("sigmoid", lambda z, dim: z.sigmoid())):
        objective = Supervised(schema.Supervised(loss=loss, label_smoothing=0.1), CONFIG, 4)
        logits = torch.tensor([[0.3, -1.0, 0.5, 2.0]], dtype=torch.float64, requires_grad=True)
        objective._losses(logits, torch.tensor([1])).sum().backward()
        # the gradient of both losses is prediction minus target
        assert torch.allclose(transform(logits, dim=1) - logits.grad, expected[None])


@pytest.mark.parametrize("key", [key for key in INITIAL if not key.startswith("mpp")])
def test_loss_of_step_0(key):
    kind, rest = key.split("_", 1)
    classes = int(rest.split("_")[0])
    options = {"loss": kind}
    if "bias" in rest:
        options["head_bias"] = float(rest.split("bias")[1])
    if "smooth" in rest:
        options["label_smoothing"] = float(rest.split("smooth")[1])
    task = _task(classes, **options).double()
    images, _, weights = _batch()
    loss = task(images, torch.tensor([0, 1, 2, classes - 1]), weights, {})
    assert (loss.sum / loss.count).item() == pytest.approx(INITIAL[key], rel=1e-6)


@pytest.mark.parametrize("case", ORACLES["topk"]["cases"], ids=str)
def test_rank_rule(case):
    ranks = label_ranks(torch.tensor([case["z"]], dtype=torch.float32), torch.tensor([case["y"]]))
    assert ranks.tolist() == [case["rank"]]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_label_with_a_logit_that_is_not_finite_is_a_miss(value):
    assert label_ranks(torch.tensor([[0.0, value, 0.0]]), torch.tensor([1])).item() == 3


def test_zero_head_scores_the_share_of_class_0():
    task = _task(7).eval()
    images, labels, weights = _batch(7, 7)
    metrics = task(images, labels, weights, {}).metrics
    assert metrics["top1"].tolist() == [1, 7]
    assert metrics["top5"].tolist() == [5, 7]


def test_metrics_of_training_and_evaluation():
    task = _task()
    assert set(task(*_batch(), {}).metrics) == {"loss", "top1"}
    loss = task.eval()(*_batch(), {})
    assert set(loss.metrics) == {"loss", "top1", "top5"}
    assert loss.metrics["loss"].tolist() == [loss.sum.item(), loss.count.item()]
    assert not any(value.requires_grad for value in loss.metrics.values())


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_rows_of_weight_0_change_nothing(kind):
    task = _task(loss=kind, representation=True)
    images, labels, weights = _batch()
    padding = torch.full((2, 8, 12, 3), 128, dtype=torch.uint8)
    _fill_head(task)
    _check_padding(task, (images, labels, weights), (padding, torch.tensor([-1, 4]), torch.zeros(2)))


def test_unlabelled_rows_weigh_nothing():
    task = _task()
    _fill_head(task)
    images, labels, weights = _batch()
    _check_padding(task, (images, labels, weights), (images[:1], torch.tensor([-1]), torch.ones(1)))


def test_a_row_without_weight_may_overflow():
    task = _task()
    task.objective.head.bias.data.fill_(float("inf"))
    images, labels, weights = _batch()
    assert task(images, labels, weights * 0, {}).sum.item() == 0


def _fill_head(task):
    with torch.no_grad():
        task.objective.head.weight.copy_(formula(tuple(task.objective.head.weight.shape), 0.3, 0.37))


def _check_padding(task, batch, padding):
    """Loss, metrics and gradients are those of the batch without the padding."""
    results = []
    for rows in (batch, tuple(torch.cat(pair) for pair in zip(batch, padding, strict=True))):
        task.zero_grad()
        loss = task(*rows, {})
        loss.sum.backward()
        results.append((loss, [p.grad.clone() for p in task.parameters()]))
    (plain, gradients), (padded, others) = results
    assert padded.count == plain.count == len(batch[0])
    torch.testing.assert_close(padded.sum, plain.sum)
    torch.testing.assert_close(padded.metrics, plain.metrics)
    torch.testing.assert_close(others, gradients, atol=1e-6, rtol=1e-5)


def test_representation_is_one_tanh_layer():
    objective = _task(representation=True).objective
    features = formula((2, 8), 1, 0.1).float()
    _, weight, bias = objective.head, objective.representation.weight, objective.representation.bias
    expected = objective.head(torch.tanh(features @ weight.T + bias))
    assert torch.equal(objective.logits(features), expected)


def test_only_the_head_gets_a_gradient_at_step_0():
    task = _task()
    task(*_batch(), {}).sum.backward()
    for name, parameter in task.named_parameters():
        assert (parameter.grad.abs().max() > 0) == name.startswith("objective.head"), name


def test_bf16_autocast_keeps_the_loss_in_float32():
    task = _task(1000)
    _fill_head(task)
    images, labels, weights = _batch()
    exact = task(images, labels, weights, {})
    with torch.autocast("cpu", torch.bfloat16):
        rough = task(images, labels, weights, {})
    assert rough.sum.dtype == rough.count.dtype == torch.float32
    assert rough.sum.item() == pytest.approx(exact.sum.item(), rel=1e-2)
    assert rough.sum.item() != exact.sum.item()


def test_prediction_is_what_the_loss_is_made_of():
    task = _task().eval()
    _fill_head(task)
    images, labels, weights = _batch()
    logits = task.predict(images)
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    torch.testing.assert_close(task(images, labels, weights, {}).sum, expected)


@pytest.mark.parametrize("num_classes", [None, 0])
def test_needs_classes(num_classes):
    with pytest.raises(VitptError, match="found no classes"):
        build_task(CONFIG, schema.Supervised(), num_classes)
