import math

import numpy as np
import pytest
import torch
from oracles import ORACLES, formula, tiny_images, tiny_vit

from vitpt.errors import VitptError
from vitpt.models.variants import ViTConfig, config_from
from vitpt.objectives import build_task
from vitpt.objectives.mpp import KEEP, MASK, RANDOM, Mpp, cell_colors, mean_colors, num_corrupted
from vitpt.recipe import schema

torch.set_num_threads(1)
TINY = tiny_vit().config
SMALL = ViTConfig(width=8, depth=1, heads=2, mlp=8, patch=8, res=32)
TARGETS = ["mean_color_3bit", "cells_4x4_3bit", "pixels"]


def _config(num_patches):
    """A model with this many patches in a row."""
    return ViTConfig(width=8, depth=1, heads=2, mlp=8, patch=4, res=(4, 4 * num_patches))


def _image(rule):
    """(1, 32, 48, 3) uint8 of the oracles."""
    a, b, c = rule
    y, x, channel = np.meshgrid(np.arange(32), np.arange(48), np.arange(3), indexing="ij")
    return torch.from_numpy(((a * y + b * x + c * channel) % 256).astype(np.uint8))[None]


IMAGE_A, IMAGE_B = _image((37, 59, 101)), _image((3, 2, 60))


def _draw(objective, ids, seed=3, visits=None):
    ids = np.asarray(ids, dtype=np.int64)
    return objective.draws(seed, np.zeros_like(ids) if visits is None else visits, ids)


def _tensors(draws):
    return {name: torch.from_numpy(values) for name, values in draws.items()}


def _task(config=SMALL, seed=0, **options):
    task = build_task(config, schema.Mpp(**options), None)
    task.initialise(torch.Generator().manual_seed(seed))
    return task


def _fill_head(task):
    with torch.no_grad():
        task.objective.head.weight.copy_(formula(tuple(task.objective.head.weight.shape), 0.3, 0.37))


def _batch(task, count, seed=1):
    height, width = task.backbone.config.image_size
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, height, width, 3), generator=generator, dtype=torch.uint8)
    return images, torch.full((count,), -1), torch.ones(count), _tensors(_draw(task.objective, np.arange(count)))


# which patches, and how


@pytest.mark.parametrize("case", ORACLES["mpp_counts"]["cases"], ids=lambda case: f"{case['ratio']} of {case['n']}")
def test_number_of_corrupted_patches(case):
    assert num_corrupted(case["n"], case["ratio"]) == case["corrupted"]
    objective = Mpp(schema.Mpp(corrupt=case["ratio"]), _config(case["n"]))
    positions = _draw(objective, np.arange(50))["positions"]
    assert positions.shape == (50, case["corrupted"])
    assert (np.diff(positions, axis=1) > 0).all()  # distinct
    assert positions.min() >= 0
    assert positions.max() < case["n"]


def test_shares_of_kinds_positions_and_donors():
    objective = Mpp(schema.Mpp(), _config(64))
    draws = _draw(objective, np.arange(10_000))
    kinds, positions, donors = draws["kinds"], draws["positions"], draws["donors"]
    for kind, share in ((MASK, 0.8), (RANDOM, 0.1), (KEEP, 0.1)):
        assert (kinds == kind).mean() == pytest.approx(share, abs=0.005)
    counts = np.bincount(positions.ravel(), minlength=64)
    assert np.abs(counts - 5000).max() < 5 * 50  # five standard deviations of a binomial of 10,000 halves
    assert (donors != positions).all()
    offsets = np.bincount((donors - positions).ravel() % 64, minlength=64)
    assert offsets[0] == 0
    assert np.abs(offsets[1:] / offsets.sum() - 1 / 63).max() < 1e-3
    # corrupting one patch says nothing of its neighbour: 32 of 64 without replacement
    taken = np.zeros((10_000, 64), dtype=bool)
    np.put_along_axis(taken, positions.astype(np.int64), True, axis=1)
    assert (taken[:, :-1] & taken[:, 1:]).mean() == pytest.approx(0.5 * 31 / 63, abs=0.003)


def test_shares_are_a_choice():
    objective = Mpp(schema.Mpp(shares=(0.0, 1.0, 0.0)), _config(16))
    assert (_draw(objective, np.arange(100))["kinds"] == RANDOM).all()
    objective = Mpp(schema.Mpp(shares=(0.0, 0.0, 1.0)), _config(16))
    assert (_draw(objective, np.arange(100))["kinds"] == KEEP).all()
    objective = Mpp(schema.Mpp(shares=(1.0, 0.0, 0.0)), _config(16))
    assert (_draw(objective, np.arange(100))["kinds"] == MASK).all()


@pytest.mark.parametrize("shares", [(0.8, 0.1, 0.2), (0.8, 0.0, 0.0)])
def test_wrong_shares_are_refused(shares):
    with pytest.raises(VitptError, match=r"objective\.shares"):
        Mpp(schema.Mpp(shares=shares), SMALL)


def test_draws_belong_to_sample_visit_and_seed():
    objective = Mpp(schema.Mpp(), SMALL)
    ids = np.array([5, 2**40, 7, 0])
    together = _draw(objective, ids)
    for row, sample in enumerate(ids):
        alone = _draw(objective, [sample])
        for name, values in together.items():
            assert (alone[name][0] == values[row]).all()
    for other in (_draw(objective, ids, seed=4), _draw(objective, ids, visits=np.ones(4, dtype=np.int64))):
        assert not np.array_equal(other["positions"], together["positions"])
        assert not np.array_equal(other["kinds"], together["kinds"])


def test_draws_stay_the_same_for_ever():
    draws = _draw(Mpp(schema.Mpp(), _config(16)), [0, 1])
    assert {name: values.tolist() for name, values in draws.items()} == FROZEN


FROZEN = {
    "positions": [[2, 3, 4, 5, 9, 10, 13, 15], [0, 3, 4, 8, 9, 13, 14, 15]],
    "kinds": [[0, 0, 0, 0, 2, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0]],
    "donors": [[13, 4, 8, 4, 6, 12, 10, 0], [7, 0, 13, 15, 7, 10, 5, 4]],
}


def test_a_single_patch_has_no_donor():
    objective = Mpp(schema.Mpp(shares=(0.5, 0.5, 0.0)), _config(1))
    draws = _draw(objective, np.arange(200))
    assert set(np.unique(draws["kinds"])) == {MASK, KEEP}
    assert (draws["positions"] == 0).all()
    assert (draws["donors"] == 0).all()


# targets


def test_bins_of_single_colours():
    case = ORACLES["mpp_bins"]
    for color in case["colours"]:
        image = torch.tensor(color["rgb"], dtype=torch.uint8).expand(1, 16, 16, 3).contiguous()
        assert mean_colors(image, 16).item() == color["label"]
        assert cell_colors(image, 16).unique().tolist() == [color["label"]]


def test_bin_edges():
    case = ORACLES["mpp_bins"]
    for mean, expected in zip(case["mean_0_255"], case["bin"], strict=True):
        total = math.floor(mean * 256)
        pixels = torch.full((256,), total // 256, dtype=torch.uint8)
        pixels[: total % 256] += 1
        image = pixels.reshape(1, 16, 16, 1).expand(1, 16, 16, 3).contiguous()
        assert mean_colors(image, 16).item() == 73 * expected


def test_mean_colours_of_the_reference_images():
    case = ORACLES["mpp_targets"]
    assert mean_colors(IMAGE_A, 16)[0].tolist() == case["labels_a"]
    assert mean_colors(IMAGE_B, 16)[0].tolist() == case["labels_b"]
    both = mean_colors(torch.cat([IMAGE_A, IMAGE_B]), 16)
    assert both.tolist() == [case["labels_a"], case["labels_b"]]


def test_cell_colours_of_the_reference_image():
    assert cell_colors(IMAGE_B, 16)[0].tolist() == ORACLES["mpp_targets"]["cells_b"]


@pytest.mark.parametrize("patch", [14, 7, 3, 2, 1])
def test_cells_of_patches_that_four_does_not_divide(patch):
    generator = torch.Generator().manual_seed(patch)
    image = torch.randint(0, 256, (1, patch, 2 * patch, 3), generator=generator, dtype=torch.uint8)
    found = cell_colors(image, patch)[0]
    for column in range(2):
        pixels = image[0, :, column * patch : (column + 1) * patch].numpy().astype(int)
        for cell in range(16):
            (top, bottom), (left, right) = (
                (i * patch // 4, math.ceil((i + 1) * patch / 4)) for i in (cell // 4, cell % 4)
            )
            window = pixels[top:bottom, left:right].reshape(-1, 3)
            red, green, blue = 8 * window.sum(0) // (256 * len(window))
            assert found[column, cell] == 64 * red + 8 * green + blue


# losses

CORRUPTED = {
    "positions": torch.tensor([[0, 2, 5]], dtype=torch.int32),
    "kinds": torch.tensor([[MASK, RANDOM, KEEP]], dtype=torch.uint8),
    "donors": torch.tensor([[1, 4, 0]], dtype=torch.int32),
}


def _loss_of(section, outputs):
    """Mean loss of IMAGE_B with these outputs of the head at all six patches."""
    config = ViTConfig(width=8, depth=1, heads=2, mlp=8, patch=16, res=(32, 48))
    objective = Mpp(section, config)
    targets = objective.targets(IMAGE_B, torch.tensor([-1]), CORRUPTED)
    losses, _ = objective.compare(outputs[None, CORRUPTED["positions"][0].long()], targets)
    assert losses.shape == (1, 3)
    return losses.mean().item()


def test_losses_of_the_reference_image():
    case = ORACLES["mpp_losses"]
    color = _loss_of(schema.Mpp(), formula((6, 512), 0.5, 0.013, 0.3))
    assert color == pytest.approx(case["ce_mean_colour"], abs=case["tol"])
    cells = formula((6, 16, 512), 0.5, 0.0013, 0.3).reshape(6, -1)
    assert _loss_of(schema.Mpp(target="cells_4x4_3bit"), cells) == pytest.approx(case["ce_cells"], abs=case["tol"])
    pixels = formula((6, 768), 0.5, 0.017, 0.1)
    assert _loss_of(schema.Mpp(target="pixels"), pixels) == pytest.approx(case["l2"], abs=case["tol"])
    assert _loss_of(schema.Mpp(target="pixels"), pixels * 0) == pytest.approx(
        case["l2_zero_prediction"], abs=case["tol"]
    )
    normalised = _loss_of(schema.Mpp(target="pixels", norm_pix=True), pixels)
    assert normalised == pytest.approx(case["l2_norm_pix_ddof1_eps1e6"], abs=case["tol"])


def test_forward_through_the_tiny_model():
    case = ORACLES["mpp_forward"]
    objective = Mpp(schema.Mpp(), TINY).double()
    objective.load_state_dict(
        {
            "mask_token": formula((8,), 0.3, 0.37, 50),
            "head.weight": formula((512, 8), 0.3, 0.37, 60),
            "head.bias": formula((512,), 0.3, 0.37, 61),
        }
    )
    model, seen = tiny_vit(), {}
    model.blocks[0].register_forward_pre_hook(lambda _, args: seen.update(z0=args[0][0]))
    colors = torch.tensor([case["labels"]])[:, CORRUPTED["positions"][0].long()]
    loss = objective(model, tiny_images()[:1], {"colors": colors}, CORRUPTED, torch.ones(1))
    for patch in (0, 2, 5):
        expected = torch.tensor(case[f"z0_patch{patch}"], dtype=torch.float64)
        assert torch.allclose(seen["z0"][patch + 1], expected, atol=case["tol"])
    assert (loss.sum / loss.count).item() == pytest.approx(case["loss"], abs=case["tol"])
    assert loss.count == 3


@pytest.mark.parametrize("target", TARGETS)
def test_loss_of_step_0(target):
    task = _task(target=target)
    images, labels, weights, draws = _batch(task, 4)
    loss = task(images, labels, weights, draws)
    if target == "pixels":
        pixels = task.objective.targets(images, labels, draws)["pixels"]
        expected = pixels.square().mean().item()
    else:
        expected = ORACLES["initial_losses"]["values"]["mpp_512"]
    assert (loss.sum / loss.count).item() == pytest.approx(expected, rel=1e-5)
    assert loss.count == 4 * task.objective.units


@pytest.mark.parametrize("target", TARGETS)
def test_metrics_split_by_kind_add_up(target):
    task = _task(target=target)
    _fill_head(task)
    images, labels, weights, draws = _batch(task, 4)
    loss = task(images, labels, weights, draws)
    names = ["loss"] if target == "pixels" else ["loss", "accuracy"]
    assert set(loss.metrics) == {f"{name}{kind}" for name in names for kind in ("", "_mask", "_random", "_keep")}
    for name in names:
        parts = sum(loss.metrics[f"{name}_{kind}"] for kind in ("mask", "random", "keep"))
        torch.testing.assert_close(parts, loss.metrics[name])
    assert loss.metrics["loss"][0] == loss.sum
    assert not any(value.requires_grad for value in loss.metrics.values())


def test_accuracy_counts_hits():
    objective = Mpp(schema.Mpp(target="cells_4x4_3bit"), SMALL)
    colors = torch.randint(0, 512, (2, 3, 16), generator=torch.Generator().manual_seed(0))
    outputs = torch.nn.functional.one_hot(colors, 512).float()
    outputs[0, 0, :4] = 0
    outputs[0, 0, :4, 511] = 1
    colors[0, 0, :4] = 0
    _, hits = objective.compare(outputs.flatten(2), {"colors": colors})
    assert hits[0, 0] == 12 / 16
    assert hits.sum() == 5 + 12 / 16


# what reaches the loss and what does not


def test_only_corrupted_positions_get_a_gradient():
    task = _task()
    _fill_head(task)
    images, labels, weights, draws = _batch(task, 2)
    tokens = []
    encode = task.backbone.encode

    def keeping(*args, **kwargs):
        tokens.append(encode(*args, **kwargs))
        tokens[0].retain_grad()
        return tokens[0]

    task.backbone.encode = keeping
    task(images, labels, weights, draws).sum.backward()
    touched = tokens[0].grad.abs().sum(-1) > 0
    for row in range(2):
        assert touched[row].nonzero()[:, 0].tolist() == (draws["positions"][row] + 1).tolist()


def test_gradient_flows_through_donors_and_mask_token():
    objective = Mpp(schema.Mpp(), TINY).double()
    embeddings = formula((1, 6, 8), 1, 0.3).requires_grad_()
    corrupted = objective.corrupt(embeddings, CORRUPTED)
    assert torch.equal(corrupted[0, 0], objective.mask_token)
    assert torch.equal(corrupted[0, 2], embeddings[0, 4])
    assert torch.equal(corrupted[0, [1, 3, 4, 5]], embeddings[0, [1, 3, 4, 5]])
    corrupted.sum().backward()
    assert embeddings.grad[0, :, 0].tolist() == [0, 1, 0, 1, 2, 1]
    assert objective.mask_token.grad.tolist() == [1] * 8


def test_a_donor_is_taken_from_the_clean_embeddings():
    objective = Mpp(schema.Mpp(), TINY).double()
    embeddings = formula((1, 6, 8), 1, 0.3)
    draws = {
        "positions": torch.tensor([[1, 3]], dtype=torch.int32),
        "kinds": torch.tensor([[RANDOM, RANDOM]], dtype=torch.uint8),
        "donors": torch.tensor([[3, 1]], dtype=torch.int32),
    }
    corrupted = objective.corrupt(embeddings, draws)
    assert torch.equal(corrupted[0, [1, 3]], embeddings[0, [3, 1]])


@pytest.mark.parametrize("target", TARGETS)
def test_rows_of_weight_0_change_nothing(target):
    task = _task(target=target)
    _fill_head(task)
    images, labels, weights, draws = _batch(task, 3)
    results = []
    for padding in (0, 2):
        grey = torch.full((padding, *images.shape[1:]), 128, dtype=torch.uint8)
        empty = _tensors(_draw(task.objective, np.full(padding, -1)))
        padded = {name: torch.cat([values, empty[name]]) for name, values in draws.items()}
        task.zero_grad()
        loss = task(
            torch.cat([images, grey]),
            torch.cat([labels, torch.full((padding,), -1)]),
            torch.cat([weights, torch.zeros(padding)]),
            padded,
        )
        loss.sum.backward()
        results.append((loss, [p.grad.clone() for p in task.parameters()]))
    (plain, gradients), (padded, others) = results
    assert padded.count == plain.count
    torch.testing.assert_close(padded.sum, plain.sum)
    torch.testing.assert_close(padded.metrics, plain.metrics)
    torch.testing.assert_close(others, gradients, atol=1e-5, rtol=1e-5)


def test_place_in_the_batch_does_not_matter():
    task = _task()
    _fill_head(task)
    images, labels, _, draws = _batch(task, 3)
    order = torch.tensor([2, 0, 1])
    losses = [task(images, labels, one, draws).sum for one in torch.eye(3)]
    turned = {name: values[order] for name, values in draws.items()}
    others = [task(images[order], labels, one, turned).sum for one in torch.eye(3)]
    torch.testing.assert_close(torch.stack(others), torch.stack(losses)[order])


@pytest.mark.parametrize("pool", ["tok", "gap"])
@pytest.mark.parametrize("target", TARGETS)
def test_bf16_autocast_keeps_the_loss_in_float32(pool, target):
    task = _task(ViTConfig(**{**SMALL.to_dict(), "pool": pool, "pos_embed": "none"}), target=target)
    _fill_head(task)
    batch = _batch(task, 4)
    exact = task(*batch)
    with torch.autocast("cpu", torch.bfloat16):
        rough = task(*batch)
    assert rough.sum.dtype == rough.count.dtype == torch.float32
    assert rough.sum.item() == pytest.approx(exact.sum.item(), rel=2e-2)
    rough.sum.backward()
    assert all(p.grad.isfinite().all() and p.grad.dtype == torch.float32 for p in task.parameters())


def test_a_few_steps_learn_the_colours():
    task = _task(ViTConfig(**{**SMALL.to_dict(), "width": 32, "mlp": 64}), seed=1)
    images = torch.zeros(8, 32, 32, 3, dtype=torch.uint8)
    images[:, :, 16:] = 255  # left black, right white: the position tells
    optimizer = torch.optim.AdamW(task.parameters(), lr=1e-2)
    losses = []
    for step in range(100):
        draws = _tensors(_draw(task.objective, np.arange(8), visits=np.full(8, step)))
        loss = task(images, torch.full((8,), -1), torch.ones(8), draws)
        optimizer.zero_grad()
        (loss.sum / loss.count).backward()
        optimizer.step()
        losses.append((loss.sum / loss.count).item())
    assert losses[0] == pytest.approx(math.log(512), abs=1e-4)
    assert losses[-1] < 0.2  # below ln 2, what the shares of the two colours alone give


def test_units_of_a_real_model():
    config = config_from(schema.Model(name="vit_b16"))
    with torch.device("meta"):
        assert Mpp(schema.Mpp(), config).units == 98
        assert Mpp(schema.Mpp(corrupt=0.15), config).units == 29
