import math

import pytest
import torch
from oracles import ORACLES, formula, tiny_images, tiny_vit, tiny_weights
from torch.nn import functional as F

from vitpt.models.variants import ViTConfig, config_from
from vitpt.models.vit import Mlp, PatchEmbed, VisionTransformer, decayed_parameters, patchify
from vitpt.objectives import build_task
from vitpt.recipe import schema

torch.set_num_threads(1)
TINY = ORACLES["tiny_vit"]
HEAD = {name: value for name, value in tiny_weights().items() if name.startswith("head.")}


def _logits(features):
    return F.linear(features, HEAD["head.weight"], HEAD["head.bias"])


def _near(found, expected, tolerance=5e-6):
    return torch.allclose(found.double(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", ["tanh", "erf"])
def test_gelu(kind):
    case = ORACLES["gelu"]
    values = torch.tensor(case["x"], dtype=torch.float64)
    layer = Mlp(1, 1, kind, 0.0).double()
    for linear in (layer.fc1, layer.fc2):
        torch.nn.init.ones_(linear.weight)
        torch.nn.init.zeros_(linear.bias)
    assert _near(layer(values[:, None])[:, 0], case[kind])


def test_layer_norm():
    norm = VisionTransformer(ViTConfig(width=8, depth=1, heads=1, mlp=8, patch=4, res=4)).norm
    norm.load_state_dict({"weight": formula((8,), 0.1, 0.7, 1.0, 1.0), "bias": formula((8,), 0.1, 0.9, 2.0)})
    assert _near(norm(formula((2, 8), 1, 0.1).float()), ORACLES["layernorm"]["y"]["1e-06"])


def test_patch_order():
    image = torch.arange(72.0).reshape(1, 3, 4, 6).permute(0, 2, 3, 1)
    assert patchify(image, 2)[0].tolist() == ORACLES["patch_order"]["hwc"]


def test_patch_embedding_equals_a_convolution():
    case = ORACLES["patch_embed"]
    layer = PatchEmbed(2, 4).double()
    weight, bias = formula((4, 3, 2, 2), 0.3, 0.21, 0.5), formula((4,), 0.1, 0.5)
    layer.load_state_dict({"proj.weight": weight, "proj.bias": bias})
    image = torch.arange(72, dtype=torch.float64).reshape(1, 3, 4, 6)
    tokens = layer(image.permute(0, 2, 3, 1))
    assert _near(tokens[0], case["tokens"])
    convolved = F.conv2d(image, weight, bias, stride=2).flatten(2).transpose(1, 2)
    assert torch.allclose(tokens, convolved)


@pytest.mark.parametrize("gelu", ["tanh", "erf"])
def test_logits(gelu):
    assert _near(_logits(tiny_vit(gelu=gelu)(tiny_images())), TINY[f"logits_gelu_{gelu}"])


def test_logits_in_float32():
    model = tiny_vit().float()
    features = model(tiny_images().float())
    logits = F.linear(features, HEAD["head.weight"].float(), HEAD["head.bias"].float())
    assert _near(logits, TINY["logits_gelu_tanh"], 2e-6)


def test_tokens_on_the_way():
    model, seen = tiny_vit(), {}
    model.blocks[0].register_forward_pre_hook(lambda _, args: seen.update(z0=args[0]))
    for i, block in enumerate(model.blocks):
        block.register_forward_hook(lambda _, args, out, i=i: seen.update({f"block{i}": out}))
    tokens = model.encode(model.embed(tiny_images()))
    assert _near(seen["z0"][0, 0], TINY["z0_cls_first"])
    assert _near(seen["z0"][0, 1], TINY["z0_patch0"])
    assert _near(seen["block0"][0, 0], TINY["block0_token0"])
    assert _near(seen["block1"][0, 0], TINY["block1_token0"])
    assert _near(tokens[:, 0], TINY["final_norm_cls"])
    assert _near(_logits(tokens[:, 1:].mean(1)), TINY["logits_gap_ln_then_mean"])


def test_gap_has_no_class_token():
    model = tiny_vit(pool="gap")
    assert model.cls_token is None
    assert _near(_logits(model(tiny_images())), TINY["logits_gap_without_cls_token_pos1_6"])


def test_gradient_norms():
    section = schema.Supervised(label_smoothing=TINY["loss"]["label_smoothing"])
    task = build_task(tiny_vit().config, section, 5).double()
    task.backbone.load_state_dict(tiny_vit().state_dict())
    task.objective.load_state_dict(HEAD)
    labels = torch.tensor(TINY["loss"]["labels"])
    loss = task.objective(task.backbone, tiny_images(), {"labels": labels}, {}, torch.ones(2))
    mean = loss.sum / loss.count
    assert mean.item() == pytest.approx(TINY["loss"]["value"], abs=5e-6)
    mean.backward()
    norms = {name.split(".", 1)[1]: p.grad.norm().item() for name, p in task.named_parameters()}
    assert norms == pytest.approx(TINY["grad_norms"], abs=5e-6)
    assert math.hypot(*norms.values()) == pytest.approx(TINY["grad_norm_total"], abs=5e-6)


def test_permuting_patches_without_positions_permutes_tokens():
    model = tiny_vit()
    model.pos_embed.data.zero_()
    embeddings = model.embed(tiny_images())
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    plain, permuted = model.encode(embeddings), model.encode(embeddings[:, order])
    assert torch.allclose(plain[:, 1:][:, order], permuted[:, 1:], atol=1e-12)
    assert torch.allclose(plain[:, 0], permuted[:, 0], atol=1e-12)


def test_no_positions_equal_zero_positions():
    zero = tiny_vit()
    zero.pos_embed.data.zero_()
    none = VisionTransformer(ViTConfig(**{**zero.config.to_dict(), "pos_embed": "none"})).double()
    none.load_state_dict({name: value for name, value in zero.state_dict().items() if name != "pos_embed"})
    assert torch.allclose(none(tiny_images()), zero(tiny_images()), atol=1e-12)


@pytest.mark.parametrize("pool", ["tok", "gap"])
def test_fixed_positions_are_neither_trained_nor_stored(pool):
    config = ViTConfig(width=8, depth=1, heads=2, mlp=8, patch=4, res=8, pool=pool, pos_embed="sincos2d")
    model = VisionTransformer(config)
    assert "pos_embed" not in model.state_dict()
    assert "pos_embed" not in dict(model.named_parameters())
    model.initialise(torch.Generator().manual_seed(0))
    embeddings = torch.zeros(1, 4, 8)
    seen = {}
    model.blocks[0].register_forward_pre_hook(lambda _, args: seen.update(z0=args[0]))
    model.encode(embeddings)
    assert torch.equal(seen["z0"][:, model.num_prefix :], model.pos_embed)


@pytest.mark.parametrize("pool", ["tok", "gap"])
def test_keep_encodes_only_these_patches(pool):
    model = tiny_vit(pool=pool)
    embeddings = model.embed(tiny_images())
    everything = torch.arange(6).expand(2, 6)
    assert torch.allclose(model.encode(embeddings, keep=everything), model.encode(embeddings))
    keep = torch.tensor([[4, 1, 2], [0, 5, 3]])
    tokens = model.encode(embeddings, keep=keep)
    assert tokens.shape == (2, 3 + model.num_prefix, 8)
    altered = embeddings.clone()
    altered[0, [0, 3, 5]] = 9.0  # patches that are dropped from the first image
    assert torch.equal(model.encode(altered, keep=keep), tokens)
    # a kept patch brings its own position along
    short = tiny_vit(pool=pool)
    prefix = short.num_prefix
    short.pos_embed.data[:, prefix : prefix + 3] = model.pos_embed[:, prefix:][:, keep[0]]
    at_front = torch.cat([embeddings[:1, keep[0]], torch.zeros(1, 3, 8)], 1)
    first = short.encode(at_front, keep=torch.arange(3)[None])
    assert torch.allclose(first, tokens[:1])


def test_drop_path_of_single_branches():
    model = tiny_vit(drop_path=0.5)
    embeddings = model.embed(tiny_images())
    kept = model.encode(embeddings, drop_path=torch.full((2, 2, 2), 0.75))
    plain = model.encode(embeddings)
    # the first block's rate is 0 and the second's 0.5: a kept branch counts twice, a dropped one nothing
    assert not torch.allclose(kept, plain)
    uniforms = torch.full((2, 2, 2), 0.75)
    uniforms[1, 1] = 0.49
    mixed = model.encode(embeddings, drop_path=uniforms)
    assert torch.allclose(mixed[0], kept[0])
    shallow = tiny_vit()
    shallow.blocks = shallow.blocks[:1]
    assert torch.allclose(mixed[1], shallow.encode(embeddings)[1])


def test_drop_path_rates_grow_linearly():
    model = VisionTransformer(ViTConfig(width=4, depth=12, heads=1, mlp=4, patch=4, res=4, drop_path=0.1))
    rates = torch.tensor(ORACLES["llrd"]["drop_path_depth12_rate01"])
    scales = model._branch_scales(torch.stack([rates - 1e-6, rates + 1e-6], 1)[None])[0]
    assert scales[1:, 0].eq(0).all()
    assert torch.allclose(scales[:, 1], 1 / (1 - rates))


def test_dropout_acts_only_while_training():
    model = tiny_vit(dropout=0.5)
    images = tiny_images()
    assert torch.equal(model(images), model(images))
    assert _near(_logits(model(images)), TINY["logits_gelu_tanh"])
    model.train()
    assert not torch.equal(model(images), model(images))


def test_images_of_another_size_are_refused():
    with pytest.raises(ValueError, match="the model takes"):
        tiny_vit().embed(torch.zeros(1, 12, 8, 3, dtype=torch.float64))


@pytest.mark.parametrize("variant", ["ti", "s"])
def test_initialisation_bounds(variant):
    bounds = ORACLES["init"]["values"][variant.capitalize()]
    task = build_task(config_from(schema.Model(name=f"vit_{variant}16")), schema.Supervised(representation=True), 10)
    task.initialise(torch.Generator().manual_seed(0))
    model = task.backbone
    for block in model.blocks:
        for matrix in block.attn.qkv.weight.chunk(3):
            _check_uniform(matrix, bounds["qkv_per_matrix_bound"])
        _check_uniform(block.attn.proj.weight, bounds["proj_bound"])
        for layer in (block.mlp.fc1, block.mlp.fc2):
            _check_uniform(layer.weight, bounds["fc_bound"])
            assert 0 < layer.bias.abs().max() < 1e-5
        assert block.attn.qkv.bias.eq(0).all()
        assert block.attn.proj.bias.eq(0).all()
    _check_normal(model.patch_embed.proj.weight, bounds["patch16_std"], truncated=True)
    _check_normal(task.objective.representation.weight, bounds["rep_std"], truncated=True)
    _check_normal(model.pos_embed, 0.02)
    assert model.cls_token.eq(0).all()
    assert task.objective.head.weight.eq(0).all()


def _check_uniform(matrix, bound):
    assert 0.99 * bound < matrix.abs().max() <= bound
    assert matrix.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)


def _check_normal(tensor, std, truncated=False):
    assert tensor.std().item() == pytest.approx(std, rel=0.02)
    limit = 2 * std / 0.87962566103423978 if truncated else 6 * std
    assert tensor.abs().max() <= limit * (1 + 1e-6)


def test_initialisation_depends_on_its_generator_alone():
    config = tiny_vit().config
    states = []
    for noise, seed in ((3, 5), (4, 5), (4, 6)):
        torch.manual_seed(noise)
        task = build_task(config, schema.Mpp(), None)
        torch.rand(7)
        task.initialise(torch.Generator().manual_seed(seed))
        states.append(task.state_dict())
    first, again, other = states
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["backbone.pos_embed"], other["backbone.pos_embed"])
    assert not torch.equal(first["objective.mask_token"], other["objective.mask_token"])


def test_what_decays():
    task = build_task(tiny_vit().config, schema.Supervised(representation=True), 5)
    decayed = decayed_parameters(task)
    everything = {name for name, _ in task.named_parameters()}
    assert decayed < everything
    assert "backbone.patch_embed.proj.weight" in decayed
    assert {"objective.head.weight", "objective.representation.weight"} < decayed
    rest = everything - decayed
    assert all(name.endswith(".bias") or "norm" in name for name in rest - {"backbone.cls_token", "backbone.pos_embed"})
    assert {"backbone.cls_token", "backbone.pos_embed"} < rest
    mpp = build_task(tiny_vit().config, schema.Mpp(), None)
    assert "objective.mask_token" not in decayed_parameters(mpp)
    assert decayed_parameters(task.objective.head) == {"weight"}
