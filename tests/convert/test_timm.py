import json

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from small_checkpoint import CLASSES, write_checkpoint
from timm.data import create_transform, resolve_data_config

from vitpt import checkpoint
from vitpt.convert import convert, from_timm, to_google, to_timm
from vitpt.convert.timm import _crop_from_timm, _crop_to_timm
from vitpt.errors import Exit, VitptError
from vitpt.models.variants import ViTConfig
from vitpt.objectives import build_task
from vitpt.recipe import schema

torch.set_num_threads(1)


def _timm(folder):
    return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()


def _images(task, count=2):
    height, width = task.backbone.config.image_size
    return torch.randint(
        0, 256, (count, height, width, 3), generator=torch.Generator().manual_seed(3), dtype=torch.uint8
    )


def _difference(task, model):
    """Between our logits and timm's on random images."""
    images = _images(task)
    with torch.no_grad():
        theirs = model(task.normalise(images).permute(0, 3, 1, 2))
        return (task.predict(images) - theirs).abs().max().item()


@pytest.mark.parametrize("pool", ["tok", "gap"])
@pytest.mark.parametrize("gelu", ["tanh", "erf"])
def test_timm_gives_our_logits(tmp_path, write, pool, gelu):
    folder, task = write(pool=pool, gelu=gelu)
    assert to_timm(folder, tmp_path / "timm") < 1e-5
    model = _timm(tmp_path / "timm")
    assert _difference(task, model) < 1e-5
    assert model.num_classes == 5
    assert model.pretrained_cfg["label_names"] == CLASSES


@pytest.mark.parametrize(
    "options",
    [
        {"pos_embed": "sincos2d"},
        {"pos_embed": "none", "pool": "gap"},
        {"res": (16, 24)},
        {"width": 20, "heads": 1, "mlp": 33, "patch": 8, "res": 24, "depth": 3},
        {"width": 192, "heads": 3, "mlp": 768, "depth": 12, "patch": 16, "res": 32},
        {"width": 49, "heads": 7, "mlp": 100, "depth": 1},
    ],
    ids=str,
)
def test_odd_sizes(tmp_path, write, options):
    folder, task = write(**options)
    assert to_timm(folder, tmp_path / "timm") < 1e-4
    model = _timm(tmp_path / "timm")
    assert _difference(task, model) < (1e-5 if options.get("width") != 192 else 1e-4)
    described = json.loads((tmp_path / "timm/config.json").read_text())
    assert described["architecture"] in timm.list_models()
    if options.get("width") == 192:
        assert described["architecture"] == "vit_tiny_patch16_224"


def test_a_real_size_agrees_to_1e_5(tmp_path):
    config = ViTConfig(width=384, depth=12, heads=6, mlp=1536, patch=16, res=64)
    task = build_task(config, schema.Supervised(), 10).eval()
    task.initialise(torch.Generator().manual_seed(0))
    torch.nn.init.normal_(task.objective.head.weight, std=0.05, generator=torch.Generator().manual_seed(1))
    described = {
        "model": config.to_dict(),
        "objective": schema.Supervised().model_dump(),
        "classes": None,
        "pixels": {
            "res": 64,
            "mean": [0.5] * 3,
            "std": [0.5] * 3,
            "crop": {"kind": "squash"},
            "interpolation": "bilinear",
        },
    }
    checkpoint.write_model(tmp_path / "native", task.state_dict(), described)
    assert to_timm(tmp_path / "native", tmp_path / "timm") < 1e-5
    model = _timm(tmp_path / "timm")
    assert type(model).__name__ == "VisionTransformer"
    assert _difference(task, model) < 1e-5


@pytest.mark.parametrize("pool", ["tok", "gap"])
def test_mpp_model_is_written_without_a_head(tmp_path, write, pool):
    folder, task = write(schema.Mpp(), pool=pool)
    done = convert(folder, tmp_path / "timm", "timm")
    assert done.num_classes == 0
    assert "mpp" in done.notes[0]
    model = _timm(tmp_path / "timm")
    inputs = task.normalise(_images(task))
    with torch.no_grad():
        torch.testing.assert_close(model(inputs.permute(0, 3, 1, 2)), task.backbone(inputs), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("crop", "size"), [({"kind": "squash"}, (16, 16)), ({"kind": "short_crop", "short": 19}, (19, 19))], ids=str
)
def test_preprocessing(tmp_path, write, crop, size):
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    folder, _ = write(pixels={"crop": crop, "mean": mean, "std": std})
    to_timm(folder, tmp_path / "timm")
    described = resolve_data_config({}, model=_timm(tmp_path / "timm"))
    assert list(described["mean"]) == mean
    assert described["interpolation"] == "bilinear"
    resize = create_transform(**described).transforms[0]
    assert resize.size in (size, size[0])
    if crop["kind"] == "squash":
        assert tuple(resize.size) == size
    from_timm(tmp_path / "timm", tmp_path / "back")
    assert checkpoint.read_config(tmp_path / "back")["pixels"]["crop"] == crop


@pytest.mark.parametrize("short", range(224, 300))
def test_every_short_side_survives(short):
    crop = {"kind": "short_crop", "short": short}
    assert _crop_from_timm(_crop_to_timm(crop, 224), 224) == crop


def test_there_and_back_is_bit_equal(tmp_path, write):
    for i, options in enumerate(({}, {"pool": "gap", "gelu": "erf"}, {"res": (16, 24)}, {"mlp": 33})):
        parent = tmp_path / str(i)
        parent.mkdir()
        write_checkpoint(parent / "native", **options)
        to_timm(parent / "native", parent / "timm")
        assert from_timm(parent / "timm", parent / "back") < 1e-5
        first, second = (checkpoint.load_tensors(parent / name) for name in ("native", "back"))
        assert first.keys() == second.keys()
        assert all(torch.equal(value, second[name]) for name, value in first.items())
        configs = [checkpoint.read_config(parent / name) for name in ("native", "back")]
        assert configs[0]["model"] == configs[1]["model"]
        assert configs[0]["classes"] == configs[1]["classes"]
        assert configs[0]["pixels"] == configs[1]["pixels"]


def test_a_model_saved_by_timm_is_read(tmp_path):
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3, img_size=32).eval()
    torch.nn.init.normal_(model.cls_token)
    timm.models.save_for_hf(model, tmp_path / "timm", model_args={"img_size": 32}, safe_serialization=True)
    difference = from_timm(tmp_path / "timm", tmp_path / "native")
    assert difference < 1e-4
    described = checkpoint.read_config(tmp_path / "native")
    assert described["model"]["gelu"] == "erf"
    task = build_task(ViTConfig.from_dict(described["model"]), schema.Supervised(**described["objective"]), 3).eval()
    task.load_state_dict(checkpoint.load_tensors(tmp_path / "native"))
    assert _difference(task, model) < 1e-4


def test_timm_to_google_in_one_step(tmp_path, write):
    folder, _ = write()
    to_timm(folder, tmp_path / "timm")
    assert to_google(tmp_path / "timm", tmp_path / "model.npz") < 1e-5
    to_google(folder, tmp_path / "direct.npz")
    assert (tmp_path / "model.npz").read_bytes() == (tmp_path / "direct.npz").read_bytes()


def test_timm_reads_our_google_file(tmp_path, write):
    folder, task = write()
    to_google(folder, tmp_path / "model.npz")
    size = {"img_size": 16, "patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 3, "mlp_ratio": 20 / 12 + 1e-9}
    model = timm.models.VisionTransformer(**size, num_classes=5, act_layer="gelu_tanh").eval()
    model.load_pretrained(tmp_path / "model.npz")
    assert _difference(task, model) < 1e-5


def test_representation_layer_is_refused(tmp_path, write):
    folder, _ = write(schema.Supervised(representation=True))
    with pytest.raises(VitptError, match="representation layer") as error:
        to_timm(folder, tmp_path / "timm")
    assert "--drop-head" in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["native"]
    assert to_timm(folder, tmp_path / "timm", drop_head=True) < 1e-5
    assert _timm(tmp_path / "timm").num_classes == 0


def test_another_epsilon_is_refused(tmp_path, write):
    folder, _ = write(norm_eps=1e-5)
    with pytest.raises(VitptError, match="epsilon"):
        to_timm(folder, tmp_path / "timm")


def test_weights_that_are_not_finite_leave_nothing_behind(tmp_path, write):
    folder, _ = write()
    tensors = load_file(folder / "model.safetensors")
    tensors["backbone.norm.bias"][0] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(VitptError, match="not be finite"):
        to_timm(folder, tmp_path / "timm")
    assert [path.name for path in tmp_path.iterdir()] == ["native"]


def _edit(folder, **changes):
    path = folder / "config.json"
    described = json.loads(path.read_text())
    for key, value in changes.items():
        target = (
            described["model_args"]
            if key in ("act_layer", "fc_norm", "qk_norm", "num_heads", "class_token")
            else described
        )
        target[key] = value
    path.write_text(json.dumps(described))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "vit_base_patch16_clip_224"}, "architecture 'vit_base_patch16_clip_224'"),
        ({"architecture": "resnet50"}, "architecture 'resnet50'"),
        ({"act_layer": "quick_gelu"}, "quick_gelu"),
        ({"qk_norm": True}, "qk_norm"),
        ({"fc_norm": True}, "pooling"),
        ({"class_token": False}, "pooling"),
        ({"num_heads": 5}, "heads"),
    ],
)
def test_other_models_of_timm_are_refused(tmp_path, write, changes, message):
    folder, _ = write()
    to_timm(folder, tmp_path / "timm")
    _edit(tmp_path / "timm", **changes)
    with pytest.raises(VitptError, match=message):
        from_timm(tmp_path / "timm", tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("blocks.0.ls1.gamma", torch.ones(12), "ls1.gamma"),
        ("head.bias", torch.ones(5, dtype=torch.float16), "float16"),
        ("norm.bias", torch.ones(13), "norm.bias"),
    ],
)
def test_other_tensors_are_refused(tmp_path, write, name, value, message):
    folder, _ = write()
    to_timm(folder, tmp_path / "timm")
    path = tmp_path / "timm/model.safetensors"
    save_file({**load_file(path), name: value}, path)
    with pytest.raises(VitptError, match=message) as error:
        from_timm(tmp_path / "timm", tmp_path / "back")
    assert error.value.exit_code == Exit.DATA


def test_damaged_folder(tmp_path, write):
    folder, _ = write()
    to_timm(folder, tmp_path / "timm")
    (tmp_path / "timm/model.safetensors").write_bytes(b"short")
    with pytest.raises(VitptError, match="not a readable timm folder"):
        from_timm(tmp_path / "timm", tmp_path / "back")
    (tmp_path / "timm/model.safetensors").unlink()
    with pytest.raises(VitptError, match="missing"):
        from_timm(tmp_path / "timm", tmp_path / "back")
