"""Sizes of the Vision Transformer: named variants, free sizes, compute. Imports no torch."""

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from vitpt.errors import Exit, VitptError
from vitpt.recipe import schema


class Variant(NamedTuple):
    """Width D, depth L, attention heads and MLP width M of a named model."""

    width: int
    depth: int
    heads: int
    mlp: int


# Table 1 of the ViT paper (B, L, H); Ti and S as in "How to train your ViT" (arXiv 2106.10270).
VARIANTS = {
    "ti": Variant(192, 12, 3, 768),
    "s": Variant(384, 12, 6, 1536),
    "b": Variant(768, 12, 12, 3072),
    "l": Variant(1024, 24, 16, 4096),
    "h": Variant(1280, 32, 16, 5120),
}

_NAME = re.compile(r"vit_([a-z]+)([1-9]\d*)")
_NUMBERS = ("width", "depth", "heads", "mlp", "patch")


@dataclass(frozen=True)
class ViTConfig:
    """Everything that decides the function a Vision Transformer computes.

    Args:
        width: embedding width D.
        depth: number of blocks L.
        heads: attention heads; divides the width.
        mlp: hidden width M of the MLP.
        patch: patch side P, pixels.
        res: image side in pixels, or (height, width).
        pool: `tok` reads a class token; `gap` the mean of the patches, without a class token.
        pos_embed: `learned` (N + 1 rows with a class token, else N), `sincos2d` (fixed, patches only) or `none`.
        gelu: tanh approximation (as the authors' code) or exact erf.
        dropout: after the positions, the attention projection and both MLP layers, never on attention weights.
        drop_path: stochastic depth of the last block; linear in depth from 0.
        norm_eps: epsilon of every LayerNorm.

    Raises:
        VitptError: the sizes do not fit each other.
    """

    width: int
    depth: int
    heads: int
    mlp: int
    patch: int
    res: int | tuple[int, int] = 224
    pool: Literal["tok", "gap"] = "tok"
    pos_embed: Literal["learned", "sincos2d", "none"] = "learned"
    gelu: Literal["tanh", "erf"] = "tanh"
    dropout: float = 0.0
    drop_path: float = 0.0
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.width % self.heads:
            divisors = [h for h in range(1, self.width + 1) if self.width % h == 0]
            nearest = min(divisors, key=lambda h: (abs(h - self.heads), h))
            raise VitptError(f"model.heads: {self.heads} does not divide model.width {self.width}; nearest: {nearest}")
        if self.pos_embed == "sincos2d" and self.width % 4:
            raise VitptError(f"model.width: sincos2d needs a multiple of 4, found {self.width}")
        for side in self.image_size:
            if side % self.patch:
                low = side // self.patch * self.patch
                near = f"{low} or {low + self.patch}" if low else f"{self.patch}"
                raise VitptError(f"model.res: {side} is not a multiple of the patch side {self.patch}; nearest: {near}")

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the image, pixels."""
        return (self.res, self.res) if isinstance(self.res, int) else self.res

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        height, width = self.image_size
        return height // self.patch, width // self.patch

    @property
    def num_patches(self) -> int:
        """Number of patches N, in raster order."""
        rows, columns = self.grid
        return rows * columns

    @property
    def num_prefix(self) -> int:
        """Tokens before the patches: 1 with a class token, else 0."""
        return 1 if self.pool == "tok" else 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any], source: str = "model configuration") -> "ViTConfig":
        """The inverse of `to_dict`, also after a trip through JSON (lists become tuples).

        Raises:
            VitptError: the values make no model (exit 3); `source` is named.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - known):
            raise _no_model(source, f"unknown key {unknown[0]!r}; known: {', '.join(sorted(known))}")
        if missing := [name for name in _NUMBERS if name not in values]:
            raise _no_model(source, f"{missing[0]!r} is missing")
        res = values.get("res", 224)
        try:
            return cls(**{**values, "res": res if isinstance(res, int) else tuple(res)})
        except VitptError as error:
            raise _no_model(source, error.message) from None


def _no_model(source: str, why: str) -> VitptError:
    return VitptError(f"{source}: {why}", exit_code=Exit.DATA)


def config_from(section: schema.Model) -> ViTConfig:
    """The configuration that the `model` section of a recipe describes, by name or by numbers.

    Raises:
        VitptError: unknown name, name and numbers together, missing numbers, or sizes that do not fit.
    """
    given = [key for key in _NUMBERS if getattr(section, key) is not None]
    if section.name is not None:
        if given:
            raise VitptError(f"model: name {section.name!r} and {given[0]} are given; give the name or all the numbers")
        variant, patch = _named(section.name)
        numbers = {**variant._asdict(), "patch": patch}
    else:
        if missing := [key for key in _NUMBERS if key not in given]:
            raise VitptError(f"model: {missing[0]} is missing; give name, or {', '.join(_NUMBERS)}")
        numbers = {key: getattr(section, key) for key in _NUMBERS}
    return ViTConfig(
        **numbers,
        res=section.res,
        pool=section.pool,
        pos_embed=section.pos_embed,
        gelu=section.gelu,
        dropout=section.dropout,
        drop_path=section.drop_path,
    )


def _named(name: str) -> tuple[Variant, int]:
    """Sizes and patch side of `vit_<variant><patch>`."""
    match = _NAME.fullmatch(name)
    if match is None or match[1] not in VARIANTS:
        names = ", ".join(f"vit_{variant}<patch side>" for variant in VARIANTS)
        raise VitptError(f"model.name: unknown name {name!r}; valid: {names}, such as vit_b16")
    return VARIANTS[match[1]], int(match[2])


def macs(config: ViTConfig, *, num_classes: int = 0, representation: bool = False, predictions: int = 0) -> int:
    """Multiply-adds of one forward pass of one image.

    Args:
        config: the model.
        num_classes: width of a classification head; 0 for none.
        representation: whether a D x D layer comes before that head.
        predictions: outputs of a per-patch head, over all its patches (corrupted patches x width of the head).

    Source: multiply-adds as the paper's exaFLOPs count them (6 x MACs x images for training).
    """
    d, n, t = config.width, config.num_patches, config.num_patches + config.num_prefix
    embedding = n * config.patch**2 * 3 * d
    blocks = config.depth * (t * (4 * d * d + 2 * d * config.mlp) + 2 * t * t * d)
    head = d * num_classes + (d * d if representation else 0) + d * predictions
    return embedding + blocks + head
