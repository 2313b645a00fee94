"""The Vision Transformer (arXiv 2010.11929): pre-norm encoder over patch embeddings. Parameter names are timm's.

Letters in shapes: B images, N patches, T tokens, D width, P patch side, M MLP width.
"""

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitpt.models.posembed import sincos2d
from vitpt.models.variants import ViTConfig

# standard deviation of a unit normal truncated at two standard deviations
_TRUNCATED_STD = 0.87962566103423978


class PatchEmbed(nn.Module):
    """Linear projection of non-overlapping patches.

    The parameter has the layout of a convolution, (D, 3, P, P); it is applied as a matrix product on NHWC patches, which needs
    no copy of the images to another layout.
    """

    def __init__(self, patch: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, kernel_size=patch, stride=patch)

    def forward(self, images: Tensor) -> Tensor:
        """(B, H, W, 3) float -> (B, N, D)."""
        patches = patchify(images, self.proj.kernel_size[0])
        weight = self.proj.weight.permute(0, 2, 3, 1).flatten(1)  # (D, P*P*3)
        return F.linear(patches, weight, self.proj.bias)


def patchify(images: Tensor, patch: int) -> Tensor:
    """(B, H, W, 3) -> (B, N, P*P*3): patches in raster order, each in the order row, column, channel."""
    batch, height, width, channels = images.shape
    rows, columns = height // patch, width // patch
    x = images.reshape(batch, rows, patch, columns, patch, channels).permute(0, 1, 3, 2, 4, 5)
    return x.reshape(batch, rows * columns, patch * patch * channels)


class Attention(nn.Module):
    """Multi-head self-attention with one fused projection to queries, keys and values."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        batch, tokens, width = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, heads, T, D/heads)
        x = F.scaled_dot_product_attention(query, key, value)
        x = self.proj(x.transpose(1, 2).reshape(batch, tokens, width))
        return F.dropout(x, self.dropout, self.training)


class Mlp(nn.Module):
    """D -> M -> GELU -> D."""

    def __init__(self, width: int, hidden: int, gelu: str, dropout: float) -> None:
        super().__init__()
        self.approximate = "tanh" if gelu == "tanh" else "none"
        self.dropout = dropout
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        x = F.gelu(self.fc1(x), approximate=self.approximate)
        x = F.dropout(x, self.dropout, self.training)
        return F.dropout(self.fc2(x), self.dropout, self.training)


class Block(nn.Module):
    """Pre-norm attention and MLP, each with a residual."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.attn = Attention(config.width, config.heads, config.dropout)
        self.norm2 = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.mlp = Mlp(config.width, config.mlp, config.gelu, config.dropout)

    def forward(self, x: Tensor, scale: Tensor | None) -> Tensor:
        """(B, T, D) -> (B, T, D); `scale` (B, 2) multiplies the two branches of each image (stochastic depth)."""
        branch: Tensor = self.attn(self.norm1(x))
        x = x + (branch if scale is None else branch * scale[:, 0, None, None])
        branch = self.mlp(self.norm2(x))
        return x + (branch if scale is None else branch * scale[:, 1, None, None])


class VisionTransformer(nn.Module):
    """Backbone without a head: `embed`, `encode`, `pool`.

    Parameters are uninitialised in the sense of the paper until `initialise` is called or weights are loaded.
    """

    cls_token: nn.Parameter | None
    pos_embed: Tensor | None

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.grid = config.grid
        self.num_patches = config.num_patches
        self.num_prefix = config.num_prefix
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.width)) if config.pool == "tok" else None
        if config.pos_embed == "learned":
            self.pos_embed = nn.Parameter(torch.zeros(1, self.num_prefix + self.num_patches, config.width))
        elif config.pos_embed == "sincos2d":
            # fixed: recomputed from the configuration, so neither trained nor stored
            self.register_buffer("pos_embed", sincos2d(config.grid, config.width), persistent=False)
        else:
            self.pos_embed = None
        self.patch_embed = PatchEmbed(config.patch, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps)

    def embed(self, images: Tensor) -> Tensor:
        """Patch embeddings without positions: (B, H, W, 3) float, normalised -> (B, N, D)."""
        if tuple(images.shape[1:]) != (*self.config.image_size, 3):
            raise ValueError(f"images are {tuple(images.shape[1:])}, the model takes {(*self.config.image_size, 3)}")
        return self.patch_embed(images)  # type: ignore[no-any-return]

    def encode(self, embeddings: Tensor, keep: Tensor | None = None, drop_path: Tensor | None = None) -> Tensor:
        """Class token, positions, blocks and final norm.

        Args:
            embeddings: (B, N, D) of `embed`, perhaps corrupted.
            keep: (B, T') int64 positions of the patches that are encoded, in this order; None for all.
            drop_path: (B, L, 2) uniforms in [0, 1) for stochastic depth of the two branches of each block; None for none.

        Returns:
            (B, T, D) normalised tokens: the class token first, if there is one, then the patches.
        """
        x = self._with_positions(embeddings, keep)
        x = F.dropout(x, self.config.dropout, self.training)
        scales = self._branch_scales(drop_path)
        for i, block in enumerate(self.blocks):
            x = block(x, None if scales is None else scales[:, i])
        return self.norm(x)  # type: ignore[no-any-return]

    def pool(self, tokens: Tensor) -> Tensor:
        """What a head reads: (B, T, D) -> (B, D), the class token or the mean of the patches."""
        return tokens[:, 0] if self.num_prefix else tokens.mean(dim=1)

    def forward(self, images: Tensor) -> Tensor:
        """Pooled features of images: (B, H, W, 3) float -> (B, D)."""
        return self.pool(self.encode(self.embed(images)))

    def _with_positions(self, x: Tensor, keep: Tensor | None) -> Tensor:
        """Add positions, drop what is not kept, prepend the class token."""
        # autocast gives bf16 embeddings: the residual stream keeps the parameters' precision
        x = x.to(self.norm.weight.dtype)
        cls_row = None
        if self.pos_embed is not None:
            learned_prefix = self.pos_embed.shape[1] - self.num_patches
            x = x + self.pos_embed[:, learned_prefix:]
            cls_row = self.pos_embed[:, :learned_prefix] if learned_prefix else None
        if keep is not None:
            x = x.gather(1, keep[:, :, None].expand(-1, -1, x.shape[2]))
        if self.cls_token is None:
            return x
        token = self.cls_token if cls_row is None else self.cls_token + cls_row
        return torch.cat([token.expand(x.shape[0], -1, -1), x], dim=1)

    def _branch_scales(self, uniforms: Tensor | None) -> Tensor | None:
        """(B, L, 2) factors of the residual branches: 0 where dropped, else 1 / (1 - rate); rates grow linearly from 0."""
        if uniforms is None or self.config.drop_path == 0:
            return None
        rates = torch.linspace(0, self.config.drop_path, self.config.depth, device=uniforms.device)[:, None]
        return (uniforms >= rates).to(rates.dtype) / (1 - rates)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Initialise every parameter from a CPU generator, as the authors' code does.

        Xavier-uniform for query, key, value (each on its own), projection and MLP; MLP biases N(0, 1e-6), other biases 0;
        patches truncated LeCun-normal; positions N(0, 0.02); class token 0; norms 1 and 0. The same on every device.
        """
        fill_lecun_normal(self.patch_embed.proj.weight, generator)
        _fill(self.patch_embed.proj.bias, 0.0)
        if self.cls_token is not None:
            _fill(self.cls_token, 0.0)
        if isinstance(self.pos_embed, nn.Parameter):
            fill_normal(self.pos_embed, 0.02, generator)
        for block in self.blocks:
            _initialise_block(cast(Block, block), generator)
        _reset_norm(self.norm)


def _initialise_block(block: Block, generator: torch.Generator) -> None:
    """Initialise one block in place; the caller disables gradients."""
    _reset_norm(block.norm1)
    for matrix in block.attn.qkv.weight.chunk(3):
        _fill_xavier_uniform(matrix, generator)
    _fill(block.attn.qkv.bias, 0.0)
    _fill_xavier_uniform(block.attn.proj.weight, generator)
    _fill(block.attn.proj.bias, 0.0)
    _reset_norm(block.norm2)
    for layer in (block.mlp.fc1, block.mlp.fc2):
        _fill_xavier_uniform(layer.weight, generator)
        fill_normal(layer.bias, 1e-6, generator)


# Everything is drawn on the CPU and copied, so that a model is the same wherever it lives.


@torch.no_grad()
def fill_normal(tensor: Tensor, std: float, generator: torch.Generator) -> None:
    """Fill in place with N(0, std)."""
    tensor.copy_(torch.empty(tensor.shape, device="cpu").normal_(0.0, std, generator=generator))


@torch.no_grad()
def fill_lecun_normal(tensor: Tensor, generator: torch.Generator) -> None:
    """Fill (out, in...) in place: normal of variance 1 / fan_in, truncated at two standard deviations before rescaling."""
    fan_in = tensor[0].numel()
    std = 1.0 / math.sqrt(fan_in) / _TRUNCATED_STD
    drawn = torch.empty(tensor.shape, device="cpu")
    nn.init.trunc_normal_(drawn, std=std, a=-2 * std, b=2 * std, generator=generator)
    tensor.copy_(drawn)


def _fill_xavier_uniform(matrix: Tensor, generator: torch.Generator) -> None:
    """Fill (out, in) in place: uniform within sqrt(6 / (in + out))."""
    bound = math.sqrt(6.0 / sum(matrix.shape))
    matrix.copy_(torch.empty(matrix.shape, device="cpu").uniform_(-bound, bound, generator=generator))


def _fill(tensor: Tensor | None, value: float) -> None:
    if tensor is not None:
        tensor.fill_(value)


def _reset_norm(norm: nn.LayerNorm) -> None:
    _fill(norm.weight, 1.0)
    _fill(norm.bias, 0.0)


def decayed_parameters(module: nn.Module) -> set[str]:
    """Names of the parameters that weight decay applies to: weights of Linear and Conv layers, heads and patches included.

    Not: biases, norms, positions, class token, mask token.
    """
    layers = (nn.Linear, nn.Conv2d)
    owners = (name for name, child in module.named_modules() if isinstance(child, layers))
    return {f"{name}.weight" if name else "weight" for name in owners}
