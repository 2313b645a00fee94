"""Google's `.npz` files: flax trees flattened with '/', in the names of the released (pre-linen) Vision Transformers."""

import math
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vitpt.convert.weights import HALF, Weights, largest_difference, position_table, require_float32
from vitpt.errors import Exit, VitptError
from vitpt.fsio import atomic_write
from vitpt.models.variants import ViTConfig

Array = npt.NDArray[Any]

POSITIONS = "Transformer/posembed_input/pos_embedding"
_PREFIXES = ("opt/target/", "params/img/", "params/")  # of training states and of image-text models
_BLOCK = "Transformer/encoderblock_"
# linen and big_vision count modules per class, pre-linen counts them all
_LINEN = {"LayerNorm_1": "LayerNorm_2", "MultiHeadDotProductAttention_0": "MultiHeadDotProductAttention_1"}
_LINEN |= {"MlpBlock_0": "MlpBlock_3"}
# ours -> (theirs, kind of array), per block and around the blocks
_IN_BLOCK = {
    "norm1.weight": ("LayerNorm_0/scale", "same"),
    "norm1.bias": ("LayerNorm_0/bias", "same"),
    "attn.proj.weight": ("MultiHeadDotProductAttention_1/out/kernel", "out"),
    "attn.proj.bias": ("MultiHeadDotProductAttention_1/out/bias", "same"),
    "norm2.weight": ("LayerNorm_2/scale", "same"),
    "norm2.bias": ("LayerNorm_2/bias", "same"),
    "mlp.fc1.weight": ("MlpBlock_3/Dense_0/kernel", "dense"),
    "mlp.fc1.bias": ("MlpBlock_3/Dense_0/bias", "same"),
    "mlp.fc2.weight": ("MlpBlock_3/Dense_1/kernel", "dense"),
    "mlp.fc2.bias": ("MlpBlock_3/Dense_1/bias", "same"),
}
_AROUND = {
    "patch_embed.proj.weight": ("embedding/kernel", "conv"),
    "patch_embed.proj.bias": ("embedding/bias", "same"),
    "norm.weight": ("Transformer/encoder_norm/scale", "same"),
    "norm.bias": ("Transformer/encoder_norm/bias", "same"),
}
_HEAD = {
    "head.weight": ("head/kernel", "dense"),
    "head.bias": ("head/bias", "same"),
    "representation.weight": ("pre_logits/kernel", "dense"),
    "representation.bias": ("pre_logits/bias", "same"),
}
_QKV = ("query", "key", "value")


def write(weights: Weights, path: Path) -> float:
    """Write a `.npz` file: all of it, checked, or nothing.

    Returns:
        The largest difference between this package's outputs and those computed from the written file.

    Raises:
        VitptError: the model has parts for which the format has no place.
    """
    _refuse(weights)
    arrays = to_arrays(weights)
    with atomic_write(path) as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]  # names are no options
        file.flush()
        written = Path(file.name)
        return largest_difference(weights, lambda images: reference(written, images), path)


def left_out(weights: Weights) -> tuple[str, ...]:
    """What the format does not hold, one sentence each."""
    notes = []
    if weights.classes:
        notes.append("the format has no place for class names")
    if weights.pixels["crop"]["kind"] != "squash":
        notes.append("the format has no place for the evaluation crop")
    return tuple(notes)


def _refuse(weights: Weights) -> None:
    config, pixels = weights.config, weights.pixels
    if config.gelu != "tanh":
        raise VitptError("Google's models have the tanh approximation of GELU, this one has gelu: erf")
    if config.norm_eps != 1e-6:
        raise VitptError(f"Google's models have a LayerNorm epsilon of 1e-6, this one {config.norm_eps}")
    if config.grid[0] != config.grid[1]:
        raise VitptError(
            f"Google's models have square images, this one {config.image_size[0]} x {config.image_size[1]}"
        )
    for key in ("mean", "std"):
        if tuple(pixels[key]) != HALF:
            raise VitptError(
                f"Google's models want pixels of mean and std 0.5, this one has {key} {tuple(pixels[key])}"
            )


def to_arrays(weights: Weights) -> dict[str, Array]:
    """Names of the released files -> float32 arrays."""
    config = weights.config
    split = (config.heads, config.width // config.heads)
    arrays = {}
    if config.pool == "tok":
        arrays["cls"] = weights.backbone["cls_token"].numpy()
    arrays[POSITIONS] = position_table(weights).numpy()
    for ours, (theirs, kind) in _AROUND.items():
        arrays[theirs] = _to_flax(weights.backbone[ours], kind, split)
    for i in range(config.depth):
        for ours, (theirs, kind) in _IN_BLOCK.items():
            arrays[f"{_BLOCK}{i}/{theirs}"] = _to_flax(weights.backbone[f"blocks.{i}.{ours}"], kind, split)
        for part in ("weight", "bias"):
            fused = weights.backbone[f"blocks.{i}.attn.qkv.{part}"]
            for name, third in zip(_QKV, fused.chunk(3), strict=True):
                theirs = f"{_BLOCK}{i}/MultiHeadDotProductAttention_1/{name}/{'kernel' if part == 'weight' else part}"
                # (D, D) with heads in the rows -> (D, heads, D/heads); (D,) -> (heads, D/heads)
                turned = third.T.reshape(-1, *split) if part == "weight" else third.reshape(split)
                arrays[theirs] = turned.contiguous().numpy()
    for ours, value in weights.head.items():
        theirs, kind = _HEAD[ours]
        arrays[theirs] = _to_flax(value, kind, split)
    return arrays


def _to_flax(value: Tensor, kind: str, split: tuple[int, int]) -> Array:
    if kind == "conv":  # (D, 3, P, P) -> (P, P, 3, D)
        value = value.permute(2, 3, 1, 0)
    elif kind == "dense":
        value = value.T
    elif kind == "out":  # (D, D) with heads in the columns -> (heads, D/heads, D)
        value = value.T.reshape(*split, -1)
    return value.contiguous().numpy()


def _from_flax(value: Array, kind: str) -> Tensor:
    if kind == "conv":
        value = value.transpose(3, 2, 0, 1)
    elif kind == "dense":
        value = value.T
    elif kind == "out":
        value = value.reshape(-1, value.shape[-1]).T
    return torch.from_numpy(np.ascontiguousarray(value))


def read(path: Path) -> Weights:
    """Read a `.npz` file of a plain Vision Transformer, in pre-linen, linen or big_vision names.

    Raises:
        VitptError: exit 3 when the file is damaged or holds another kind of model.
    """
    arrays = load(path)
    config = _config(arrays, path)
    backbone = {"pos_embed": _from_flax(arrays.pop(POSITIONS), "same")}
    if config.pool == "tok":
        backbone["cls_token"] = _from_flax(arrays.pop("cls"), "same")
    head = {ours: _take(arrays, theirs, kind, path) for ours, (theirs, kind) in _HEAD.items() if theirs in arrays}
    for ours, (theirs, kind) in _AROUND.items():
        backbone[ours] = _take(arrays, theirs, kind, path)
    for i in range(config.depth):
        for ours, (theirs, kind) in _IN_BLOCK.items():
            backbone[f"blocks.{i}.{ours}"] = _take(arrays, f"{_BLOCK}{i}/{theirs}", kind, path)
        attention = f"{_BLOCK}{i}/MultiHeadDotProductAttention_1"
        kernels = [_take(arrays, f"{attention}/{name}/kernel", "same", path).flatten(1).T for name in _QKV]
        biases = [_take(arrays, f"{attention}/{name}/bias", "same", path).flatten() for name in _QKV]
        backbone[f"blocks.{i}.attn.qkv.weight"] = torch.cat(kernels)
        backbone[f"blocks.{i}.attn.qkv.bias"] = torch.cat(biases)
    if arrays:
        raise VitptError(
            f"{path}: {min(arrays)} belongs to no plain Vision Transformer and cannot be converted", exit_code=Exit.DATA
        )
    objective = {"kind": "supervised", "representation": "representation.weight" in head}
    return Weights(
        config=config,
        backbone=backbone,
        head=head,
        objective=objective if head else None,
        classes=None,
        pixels={
            "res": config.image_size[0],
            "mean": list(HALF),
            "std": list(HALF),
            "crop": {"kind": "squash"},
            "interpolation": "bilinear",
        },
    )


def _take(arrays: dict[str, Array], name: str, kind: str, path: Path) -> Tensor:
    if name not in arrays:
        raise VitptError(f"{path}: {name} is missing", exit_code=Exit.DATA)
    return _from_flax(arrays.pop(name), kind)


def _config(arrays: dict[str, Array], path: Path) -> ViTConfig:
    """All sizes from the shapes."""
    attention = f"{_BLOCK}0/MultiHeadDotProductAttention_1/query/kernel"
    try:
        patch, _, _, width = arrays["embedding/kernel"].shape
        _, heads, _ = arrays[attention].shape
        (mlp,) = arrays[f"{_BLOCK}0/MlpBlock_3/Dense_0/bias"].shape
        _, rows, _ = arrays[POSITIONS].shape
    except (KeyError, ValueError) as error:
        raise VitptError(f"{path}: not a plain Vision Transformer ({error})", exit_code=Exit.DATA) from None
    has_cls = "cls" in arrays
    side = math.isqrt(rows - has_cls)
    if side * side != rows - has_cls:
        raise VitptError(
            f"{path}: {rows} rows of positions make no square grid {'with' if has_cls else 'without'} a class token",
            exit_code=Exit.DATA,
        )
    return ViTConfig(
        width=width,
        depth=len({name.split("/")[1] for name in arrays if name.startswith(_BLOCK)}),
        heads=heads,
        mlp=mlp,
        patch=patch,
        res=side * patch,
        pool="tok" if has_cls else "gap",
    )


def load(path: Path) -> dict[str, Array]:
    """All arrays of a file under the names of the released files; no pickle is ever loaded.

    Raises:
        VitptError: exit 3 when the file is no such archive, or an array is not float32.
    """
    if not zipfile.is_zipfile(path):
        raise VitptError(
            f"{path}: not a readable .npz file (no zip archive)",
            hint="of a model in any other form, give the folder that holds its config.json",
            exit_code=Exit.DATA,
        )
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, AttributeError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise VitptError(f"{path}: not a readable .npz file ({error})", exit_code=Exit.DATA) from None
    prefix = next((p for p in _PREFIXES if f"{p}embedding/kernel" in arrays), "")
    arrays = {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}
    require_float32(arrays, path)
    return _released_names(_unstacked(arrays))


def _unstacked(arrays: dict[str, Array]) -> dict[str, Array]:
    """Blocks that are stacked along a leading axis, one by one."""
    stack = "Transformer/encoderblock/"
    out = {name: value for name, value in arrays.items() if not name.startswith(stack)}
    for name, value in arrays.items():
        if name.startswith(stack):
            out |= {f"{_BLOCK}{i}/{name.removeprefix(stack)}": layer for i, layer in enumerate(value)}
    return out


def _released_names(arrays: dict[str, Array]) -> dict[str, Array]:
    """Linen and big_vision names -> pre-linen names."""
    out = {}
    for name, value in arrays.items():
        parts = name.split("/")
        if name.startswith(_BLOCK):
            parts[2] = _LINEN.get(parts[2], parts[2])
        out["/".join(parts)] = value
    if "pos_embedding" in out:
        table = out.pop("pos_embedding")
        if "cls" in out:  # big_vision adds no position to the class token
            table = np.concatenate([np.zeros_like(table[:, :1]), table], axis=1)
        out[POSITIONS] = table
    return out


def reference(path: Path, images: Tensor) -> tuple[Tensor, Tensor | None]:
    """Features and logits in float64 from a file alone, by numpy, in the words of the paper."""
    arrays = load(path)

    def get(name: str) -> Array:
        return np.asarray(arrays[name], dtype=np.float64)

    def norm(x: Array, name: str) -> Array:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
        return np.asarray(scaled * get(f"{name}/scale") + get(f"{name}/bias"))

    def dense(x: Array, name: str, axes: int = 1) -> Array:
        return np.asarray(np.tensordot(x, get(f"{name}/kernel"), axes) + get(f"{name}/bias"))

    patch = arrays["embedding/kernel"].shape[0]
    pixels = images.double().numpy()
    batch, height, width, _ = pixels.shape
    pixels = pixels.reshape(batch, height // patch, patch, width // patch, patch, 3).transpose(0, 1, 3, 2, 4, 5)
    x = dense(pixels, "embedding", 3).reshape(batch, -1, arrays["embedding/kernel"].shape[3])
    if "cls" in arrays:
        x = np.concatenate([np.broadcast_to(get("cls"), (batch, 1, x.shape[2])), x], axis=1)
    x = x + get(POSITIONS)
    depth = len({name.split("/")[1] for name in arrays if name.startswith(_BLOCK)})
    for i in range(depth):
        block = f"{_BLOCK}{i}"
        y = norm(x, f"{block}/LayerNorm_0")
        attention = f"{block}/MultiHeadDotProductAttention_1"
        # each (B, T, heads, D/heads) -> (B, heads, T, D/heads)
        query, key, value = (dense(y, f"{attention}/{name}").transpose(0, 2, 1, 3) for name in _QKV)
        scores = query @ key.transpose(0, 1, 3, 2) / math.sqrt(query.shape[3])
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (scores / scores.sum(-1, keepdims=True)) @ value
        x = x + dense(mixed.transpose(0, 2, 1, 3), f"{attention}/out", 2)
        hidden = dense(norm(x, f"{block}/LayerNorm_2"), f"{block}/MlpBlock_3/Dense_0")
        hidden = hidden * (1 + np.tanh(math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3))) / 2
        x = x + dense(hidden, f"{block}/MlpBlock_3/Dense_1")
    x = norm(x, "Transformer/encoder_norm")
    features = x[:, 0] if "cls" in arrays else x.mean(axis=1)
    if "head/kernel" not in arrays:
        return torch.from_numpy(features), None
    deeper = np.tanh(dense(features, "pre_logits")) if "pre_logits/kernel" in arrays else features
    return torch.from_numpy(features), torch.from_numpy(dense(deeper, "head"))
