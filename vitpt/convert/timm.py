"""Folders that `timm.create_model("local-dir:<folder>", pretrained=True)` loads. timm itself is not needed."""

import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from vitpt.checkpoint import write_tensors
from vitpt.convert.weights import HALF, Weights, largest_difference, position_table, require_float32
from vitpt.errors import Exit, VitptError
from vitpt.fsio import publish_folder, write_json, writing
from vitpt.models.variants import VARIANTS, ViTConfig

# timm's words for the variants, and its attention heads by them; every number is overridden in what is written here.
WORDS = {"ti": "tiny", "s": "small", "b": "base", "l": "large", "h": "huge"}
HEADS = {WORDS[name]: variant.heads for name, variant in VARIANTS.items()}
REGISTERED = {  # plain models that timm registers at 224 pixels
    "tiny": (16,),
    "small": (8, 16, 32),
    "base": (8, 16, 32),
    "large": (14, 16, 32),
    "huge": (14,),
}
_ARCHITECTURE = re.compile(r"vit_(tiny|small|base|large|huge)_patch\d+_\d+(\..*)?")
_GELU: dict[str | None, Literal["erf", "tanh"]] = {None: "erf", "gelu": "erf", "gelu_tanh": "tanh"}
_FROM_TENSORS = {"patch_size", "embed_dim", "depth", "mlp_ratio", "num_classes"}  # what the shapes say better
_READ = {"img_size", "num_heads", "act_layer", "class_token", "fc_norm", "global_pool"}
_AS_PLAIN = {"qkv_bias": True, "in_chans": 3, "pos_embed": "learn", "no_embed_class": False, "init_values": None}
_OF_TRAINING = re.compile(r"(weight_init|fix_init|(\w+_)?drop(_path)?_rate)")


def write(weights: Weights, folder: Path) -> float:
    """Write a timm folder: all of it, checked, or nothing.

    Returns:
        The largest difference between this package's outputs and those computed from the written files.

    Raises:
        VitptError: the model has parts for which timm has no place.
    """
    if "representation.weight" in weights.head:
        raise VitptError(
            "the model has a representation layer, for which timm has no place",
            hint="--drop-head writes the backbone alone",
        )
    if weights.config.norm_eps != 1e-6:
        raise VitptError(
            f"timm's Vision Transformers have a LayerNorm epsilon of 1e-6, found {weights.config.norm_eps}"
        )
    temporary = folder.parent / f".{folder.name}.{os.getpid()}"
    tensors = weights.backbone | weights.head
    tensors["pos_embed"] = position_table(weights)
    with writing(folder):
        try:
            temporary.mkdir(parents=True)
            write_tensors(temporary / "model.safetensors", tensors)
            write_json(temporary / "config.json", _description(weights))
            difference = largest_difference(weights, lambda images: reference(temporary, images), folder)
            publish_folder(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return difference


def _description(weights: Weights) -> dict[str, Any]:
    """The content of config.json."""
    config = weights.config
    height, width = config.image_size
    pool = "token" if config.pool == "tok" else "avg"
    model_args: dict[str, Any] = {
        "img_size": height if height == width else [height, width],
        "patch_size": config.patch,
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.heads,
        "mlp_ratio": _mlp_ratio(config.width, config.mlp),
        "act_layer": "gelu_tanh" if config.gelu == "tanh" else "gelu",
        "global_pool": pool,
    }
    if config.pool == "gap":  # the final norm comes before the mean, and there is no class token
        model_args |= {"fc_norm": False, "class_token": False}
    described: dict[str, Any] = {
        "architecture": _architecture(config),
        "num_classes": weights.num_classes,
        "num_features": config.width,
        "global_pool": pool,
        "model_args": model_args,
        "pretrained_cfg": {
            "input_size": [3, height, width],
            "fixed_input_size": True,
            "mean": list(weights.pixels["mean"]),
            "std": list(weights.pixels["std"]),
            "interpolation": weights.pixels["interpolation"],
            **_crop_to_timm(weights.pixels["crop"], height),
            "first_conv": "patch_embed.proj",
            "classifier": "head",
            "num_classes": weights.num_classes,
            "custom_load": False,
        },
    }
    if weights.classes:
        described["label_names"] = list(weights.classes)
    return described


def _architecture(config: ViTConfig) -> str:
    """The registered name nearest to the model."""
    for name, variant in VARIANTS.items():
        if (variant.width, variant.depth, variant.heads, variant.mlp) == (
            config.width,
            config.depth,
            config.heads,
            config.mlp,
        ):
            patches = REGISTERED[WORDS[name]]
            patch = config.patch if config.patch in patches else patches[len(patches) // 2]
            return f"vit_{WORDS[name]}_patch{patch}_224"
    return "vit_base_patch16_224"


def _mlp_ratio(width: int, hidden: int) -> float:
    """A ratio from which timm's int(width * ratio) gives the hidden width."""
    ratio = hidden / width
    while int(width * ratio) < hidden:
        ratio = math.nextafter(ratio, math.inf)
    return ratio


def _crop_to_timm(crop: dict[str, Any], res: int) -> dict[str, Any]:
    """How timm says what its evaluation cuts out."""
    if crop["kind"] == "squash":
        return {"crop_pct": 1.0, "crop_mode": "squash"}
    share = res / crop["short"]
    while math.floor(res / share) < crop["short"]:  # timm divides again and rounds down
        share = math.nextafter(share, 0.0)
    return {"crop_pct": share, "crop_mode": "center"}


def read(folder: Path) -> Weights:
    """Read a timm folder (`config.json`, `model.safetensors`) of a plain Vision Transformer.

    Raises:
        VitptError: exit 3 when the folder is damaged or holds another kind of model.
    """
    described, tensors = _load(folder)
    args = described.get("model_args") or {}
    _refuse_unknown(described, args, folder)
    pretrained = described.get("pretrained_cfg") or {}
    head = {name: tensors.pop(name) for name in sorted(tensors) if name in ("head.weight", "head.bias")}
    config = _config(described, args, pretrained, tensors, folder)
    weights = Weights(
        config=config,
        backbone=tensors,
        head=head,
        objective={"kind": "supervised"} if head else None,
        classes=_class_names(described, pretrained, len(head.get("head.bias", ()))),
        pixels={
            "res": config.image_size[0],
            "mean": _channels(pretrained, "mean"),
            "std": _channels(pretrained, "std"),
            "crop": _crop_from_timm(pretrained, config.image_size[0]),
            "interpolation": "bilinear",
        },
    )
    if pretrained.get("interpolation", "bilinear") != "bilinear":
        weights = weights.noting(f"timm resizes {pretrained['interpolation']}, vitpt bilinear")
    return weights


def _channels(pretrained: dict[str, Any], key: str) -> list[float]:
    values = [float(value) for value in pretrained.get(key, HALF)]
    if len(values) != 3:
        raise ValueError(f"pretrained_cfg.{key} has {len(values)} numbers, expected 3")
    return values


def _class_names(described: dict[str, Any], pretrained: dict[str, Any], num_classes: int) -> list[str] | None:
    """One name a class, if the folder has them."""
    names = described.get("label_names") or pretrained.get("label_names")
    if not isinstance(names, list) or len(names) != num_classes:
        return None
    return [str(name) for name in names] or None


def _load(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        described = json.loads((folder / "config.json").read_bytes())
        tensors = load_file(folder / "model.safetensors")
    except FileNotFoundError as error:
        raise VitptError(
            f"{error.filename or folder / 'model.safetensors'}: missing",
            hint="a timm folder has config.json and model.safetensors; pickled weights (.bin, .pth) are never loaded",
            exit_code=Exit.DATA,
        ) from None
    except (OSError, ValueError, SafetensorError) as error:
        raise VitptError(f"{folder}: not a readable timm folder ({error})", exit_code=Exit.DATA) from None
    require_float32(tensors, folder / "model.safetensors")
    return described, tensors


def _refuse_unknown(described: dict[str, Any], args: dict[str, Any], folder: Path) -> None:
    """Refuse what a plain Vision Transformer does not have: a silent difference would be worse."""
    path = folder / "config.json"
    name = str(described.get("architecture"))
    if not _ARCHITECTURE.fullmatch(name):
        raise VitptError(
            f"{path}: architecture {name!r} cannot be converted; expected vit_<{'|'.join(HEADS)}>_patch<side>_<res>",
            exit_code=Exit.DATA,
        )
    for key, value in args.items():
        known = key in _READ or key in _FROM_TENSORS or _OF_TRAINING.fullmatch(key)
        if not known and not (key in _AS_PLAIN and value == _AS_PLAIN[key]):
            raise VitptError(f"{path}: model_args.{key} = {value!r} cannot be converted", exit_code=Exit.DATA)
    if args.get("act_layer") not in _GELU:
        raise VitptError(
            f"{path}: model_args.act_layer {args['act_layer']!r} cannot be converted; expected gelu or gelu_tanh",
            exit_code=Exit.DATA,
        )


def _config(
    described: dict[str, Any],
    args: dict[str, Any],
    pretrained: dict[str, Any],
    tensors: dict[str, Tensor],
    folder: Path,
) -> ViTConfig:
    """Sizes from the shapes; what shapes do not say from config.json."""
    pool = args.get("global_pool", described.get("global_pool", "token"))
    if (pool, args.get("class_token", True), args.get("fc_norm")) not in (
        ("token", True, None),
        ("token", True, False),
        ("avg", False, False),
    ):
        raise VitptError(
            f"{folder / 'config.json'}: this pooling cannot be converted; expected global_pool token, or avg with "
            "class_token and fc_norm false (final norm, then the mean)",
            exit_code=Exit.DATA,
        )
    try:
        width, _, patch, _ = tensors["patch_embed.proj.weight"].shape
        mlp = len(tensors["blocks.0.mlp.fc1.bias"])
    except (KeyError, ValueError):
        raise VitptError(f"{folder / 'model.safetensors'}: not a Vision Transformer", exit_code=Exit.DATA) from None
    size = args.get("img_size") or pretrained.get("input_size", [3, 224, 224])[1:]
    height, width_px = (size, size) if isinstance(size, int) else size
    word = described["architecture"].split("_")[1]
    return ViTConfig(
        width=width,
        depth=len({name.split(".")[1] for name in tensors if name.startswith("blocks.")}),
        heads=args.get("num_heads", HEADS[word]),
        mlp=mlp,
        patch=patch,
        res=height if height == width_px else (height, width_px),
        pool="tok" if pool == "token" else "gap",
        gelu=_GELU[args.get("act_layer")],
    )


def _crop_from_timm(pretrained: dict[str, Any], res: int) -> dict[str, Any]:
    if pretrained.get("crop_mode") == "squash":
        return {"kind": "squash"}
    return {"kind": "short_crop", "short": math.floor(res / pretrained.get("crop_pct", 0.875))}


def reference(folder: Path, images: Tensor) -> tuple[Tensor, Tensor | None]:
    """Features and logits in float64 from a timm folder alone, in the words of the paper: no code of the models here."""
    described, tensors = _load(folder)
    args = described.get("model_args") or {}

    def get(name: str) -> Tensor:
        return tensors[name].double()

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt() * get(f"{name}.weight") + get(
            f"{name}.bias"
        )

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ get(f"{name}.weight").T + get(f"{name}.bias")

    patch = tensors["patch_embed.proj.weight"].shape[-1]
    pixels = images.double().permute(0, 3, 1, 2)
    x = F.conv2d(pixels, get("patch_embed.proj.weight"), get("patch_embed.proj.bias"), stride=patch)
    x = x.flatten(2).transpose(1, 2)
    if "cls_token" in tensors:
        x = torch.cat([get("cls_token").expand(len(x), -1, -1), x], dim=1)
    x = x + get("pos_embed")
    batch, tokens, width = x.shape
    heads = args.get("num_heads", HEADS.get(described["architecture"].split("_")[1], 0))
    depth = len({name.split(".")[1] for name in tensors if name.startswith("blocks.")})
    for i in range(depth):
        block = f"blocks.{i}"
        query, key, value = linear(norm(x, f"{block}.norm1"), f"{block}.attn.qkv").chunk(3, dim=-1)
        query, key, value = (part.reshape(batch, tokens, heads, -1).transpose(1, 2) for part in (query, key, value))
        attention = torch.softmax(query @ key.transpose(2, 3) / math.sqrt(width / heads), dim=-1)
        x = x + linear((attention @ value).transpose(1, 2).flatten(2), f"{block}.attn.proj")
        hidden = linear(norm(x, f"{block}.norm2"), f"{block}.mlp.fc1")
        x = x + linear(_gelu(hidden, _GELU[args.get("act_layer")]), f"{block}.mlp.fc2")
    x = norm(x, "norm")
    features = x[:, 0] if "cls_token" in tensors else x.mean(dim=1)
    return features, linear(features, "head") if "head.weight" in tensors else None


def _gelu(x: Tensor, kind: str) -> Tensor:
    if kind == "erf":
        return x * (1 + torch.erf(x / math.sqrt(2))) / 2
    return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
