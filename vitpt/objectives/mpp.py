"""Masked patch prediction (ViT paper, section 4.6 and appendix B.1.2).

A share of the patch embeddings is corrupted: most are replaced by one learnable mask token, some by the embedding of another
patch of the same image, some kept. From the encoder's outputs at exactly these positions their colours are predicted.

Letters in shapes: B images, N patches, n corrupted patches per image, D width, P patch side.
"""

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitpt.draws import Purpose, words
from vitpt.errors import VitptError
from vitpt.models.variants import ViTConfig
from vitpt.models.vit import VisionTransformer, fill_normal, patchify
from vitpt.objectives.loss import Loss, weighted_sum
from vitpt.recipe import schema

MASK, RANDOM, KEEP = 0, 1, 2
KINDS = ("mask", "random", "keep")
COLORS = 512  # 3 bits per channel: 64 * red + 8 * green + blue
CELLS = 4  # cells per side of a patch

IntArray = npt.NDArray[np.integer]


class Mpp(nn.Module):
    """Corrupts patch embeddings and predicts what was there; head and mask token are dropped afterwards."""

    def __init__(self, section: schema.Mpp, config: ViTConfig, num_classes: int | None = None) -> None:
        super().__init__()
        if min(section.shares) < 0 or abs(sum(section.shares) - 1) > 1e-9:
            raise VitptError(f"objective.shares: expected three shares >= 0 that sum to 1, found {section.shares}")
        self.section = section
        self.config = config
        self.units = num_corrupted(config.num_patches, section.corrupt)  # loss terms per sample
        self.mask_token = nn.Parameter(torch.zeros(config.width))
        self.head = nn.Linear(config.width, num_outputs(section, config.patch))

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Initialise every parameter from a CPU generator: mask token N(0, 0.02), head 0."""
        fill_normal(self.mask_token, 0.02, generator)
        self.head.weight.zero_()
        self.head.bias.zero_()

    def draws(self, seed: int, visits: npt.NDArray[np.int64], ids: npt.NDArray[np.int64]) -> dict[str, IntArray]:
        """Which patches are corrupted and how, for each sample and visit.

        Returns:
            positions (B, n) int32, distinct and ascending; kinds (B, n) uint8: MASK, RANDOM or KEEP; donors (B, n) int32: the
            patch that replaces a RANDOM one, never itself.
        """
        patches, n = self.config.num_patches, self.units
        positions = draw_positions(seed, visits, ids, patches, n)
        kinds = draw_kinds(seed, visits, ids, n, self.section.shares)
        if patches == 1:  # no other patch exists
            kinds[kinds == RANDOM] = KEEP
            return {"positions": positions, "kinds": kinds, "donors": np.zeros_like(positions)}
        scaled = words(seed, visits, ids, Purpose.MPP_DONORS, n).astype(np.uint64) * np.uint64(patches - 1)
        donors = (scaled >> np.uint64(32)).astype(np.int32)
        donors += donors >= positions  # uniform over the others
        return {"positions": positions, "kinds": kinds, "donors": donors}

    def targets(self, images: Tensor, labels: Tensor, draws: dict[str, Tensor]) -> dict[str, Tensor]:
        """What is to be predicted, from the uint8 pixels (B, H, W, 3) that the model sees.

        Returns:
            `colors` (B, n) int64, or (B, n, 16) for cells; or `pixels` (B, n, P*P*3) float32 in [-1, 1].
        """
        at = draws["positions"].long()
        if self.section.target == "mean_color_3bit":
            return {"colors": mean_colors(images, self.config.patch).gather(1, at)}
        if self.section.target == "cells_4x4_3bit":
            cells = cell_colors(images, self.config.patch)
            return {"colors": cells.gather(1, at[:, :, None].expand(-1, -1, cells.shape[2]))}
        patches = patchify(images, self.config.patch)
        pixels = patches.gather(1, at[:, :, None].expand(-1, -1, patches.shape[2])).float() / 127.5 - 1
        if self.section.norm_pix:
            variance, mean = torch.var_mean(pixels, dim=-1, correction=1, keepdim=True)
            pixels = (pixels - mean) / (variance + 1e-6).sqrt()
        return {"pixels": pixels}

    def corrupt(self, embeddings: Tensor, draws: dict[str, Tensor]) -> Tensor:
        """Replace the drawn patches, by clean embeddings or the mask token: (B, N, D) -> (B, N, D)."""
        at, kinds = draws["positions"].long(), draws["kinds"]
        source = torch.where(kinds == RANDOM, draws["donors"].long(), at)
        rows = torch.arange(len(at), device=at.device)[:, None]
        # indexing, not gather: its gradient adds up shared donors in a fixed order on every device
        new = torch.where((kinds == MASK)[:, :, None], self.mask_token.to(embeddings.dtype), embeddings[rows, source])
        return embeddings.scatter(1, at[:, :, None].expand_as(new), new)

    def forward(
        self,
        backbone: VisionTransformer,
        inputs: Tensor,
        targets: dict[str, Tensor],
        draws: dict[str, Tensor],
        weights: Tensor,
        drop_path: Tensor | None = None,
    ) -> Loss:
        """Loss of normalised images (B, H, W, 3) with weights (B,): the mean over corrupted patches once sums are divided."""
        embeddings = self.corrupt(backbone.embed(inputs), draws)
        tokens = backbone.encode(embeddings, drop_path=drop_path)
        at = draws["positions"].long() + backbone.num_prefix
        outputs = self.head(tokens.gather(1, at[:, :, None].expand(-1, -1, tokens.shape[2])))
        losses, hits = self.compare(outputs, targets)
        total, count = weighted_sum(losses, weights), weights.sum() * self.units
        metrics = {"loss": torch.stack([total.detach(), count])}
        metrics |= _by_kind("loss", losses.detach(), draws["kinds"], weights)
        if hits is not None:
            metrics["accuracy"] = torch.stack([weighted_sum(hits, weights), count])
            metrics |= _by_kind("accuracy", hits, draws["kinds"], weights)
        return Loss(total, count, metrics)

    def compare(self, outputs: Tensor, targets: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Loss and accuracy of each corrupted patch from the head's outputs (B, n, outputs): both (B, n) float32."""
        outputs = outputs.float()
        if self.section.target == "pixels":
            return (outputs - targets["pixels"]).square().mean(dim=-1), None
        colors = targets["colors"]
        logits = outputs.reshape(*outputs.shape[:2], -1, COLORS)  # (B, n, 1 or 16, 512)
        losses = F.cross_entropy(logits.flatten(0, 2), colors.flatten(), reduction="none")
        shape = logits.shape[:3]
        hits = (logits.detach().argmax(dim=-1) == colors.reshape(shape)).float()
        return losses.reshape(shape).mean(dim=-1), hits.mean(dim=-1)


def _by_kind(name: str, terms: Tensor, kinds: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """The metric split by how the patch was corrupted."""
    counted = weights[:, None].expand_as(terms)
    metrics = {}
    for kind, label in enumerate(KINDS):
        of_kind = (kinds == kind) & (counted > 0)
        sums = torch.where(of_kind, terms * counted, 0.0).sum(), torch.where(of_kind, counted, 0.0).sum()
        metrics[f"{name}_{label}"] = torch.stack(sums)
    return metrics


def num_outputs(section: schema.Mpp, patch: int) -> int:
    """Outputs of the head for each corrupted patch."""
    outputs = {"mean_color_3bit": COLORS, "cells_4x4_3bit": CELLS * CELLS * COLORS, "pixels": patch**2 * 3}
    return outputs[section.target]


def num_corrupted(num_patches: int, ratio: float) -> int:
    """How many patches of each image are corrupted: floor(ratio * N + 0.5), at least 1."""
    return min(num_patches, max(1, math.floor(ratio * num_patches + 0.5)))


def draw_positions(seed: int, visits: IntArray, ids: IntArray, num_patches: int, count: int) -> npt.NDArray[np.int32]:
    """`count` distinct positions of `num_patches` per sample, uniform without replacement, ascending; (B, count)."""
    keys = words(seed, visits, ids, Purpose.MPP_POSITIONS, num_patches).astype(np.uint64)
    keys <<= np.uint64(32)
    keys |= np.arange(num_patches, dtype=np.uint64)  # no two keys are equal, so no sort decides by itself
    keys.sort(axis=1)
    positions = keys[:, :count].astype(np.uint32).astype(np.int32)  # the low half
    positions.sort(axis=1)
    return positions


def draw_kinds(
    seed: int, visits: IntArray, ids: IntArray, count: int, shares: tuple[float, float, float]
) -> npt.NDArray[np.uint8]:
    """MASK where u < shares[0], RANDOM where u < shares[0] + shares[1], else KEEP, independently; (B, count)."""
    upper = words(seed, visits, ids, Purpose.MPP_KINDS, count) >> np.uint32(8)  # u = upper / 2^24
    first, second = (np.uint32(math.ceil(edge * 2**24)) for edge in (shares[0], min(shares[0] + shares[1], 1.0)))
    return (upper >= first).astype(np.uint8) + (upper >= second)


def mean_colors(images: Tensor, patch: int) -> Tensor:
    """Mean colour of each patch in 3 bits per channel: (B, H, W, 3) uint8 -> (B, N) int64 in [0, 512).

    Exact: integer sums, bin = floor(8 * sum / (256 * pixels)).
    """
    batch, height, width, _ = images.shape
    rows, columns = height // patch, width // patch
    # rows first: the inner axis stays long and contiguous
    sums = images.reshape(batch, rows, patch, width * 3).sum(2, dtype=torch.int32)
    sums = sums.reshape(batch, rows, columns, patch, 3).sum(3, dtype=torch.int32)
    return _color_index(sums, patch * patch).reshape(batch, rows * columns)


def cell_colors(images: Tensor, patch: int) -> Tensor:
    """Mean colours of the 4 x 4 cells of each patch: (B, H, W, 3) uint8 -> (B, N, 16) int64, cells in raster order.

    Cell i covers pixels floor(i * P / 4) to ceil((i + 1) * P / 4) of the patch, so cells overlap where 4 does not divide P.
    """
    batch, height, width, _ = images.shape
    rows, columns = height // patch, width // patch
    edges = [(i * patch // CELLS, -(-(i + 1) * patch // CELLS)) for i in range(CELLS)]
    bands = images.reshape(batch, rows, patch, width * 3)
    bands = torch.stack([bands[:, :, a:b].sum(2, dtype=torch.int32) for a, b in edges], dim=2)
    cells = bands.reshape(batch, rows, CELLS, columns, patch, 3)
    cells = torch.stack([cells[:, :, :, :, a:b].sum(4, dtype=torch.int32) for a, b in edges], dim=4)
    sides = torch.tensor([b - a for a, b in edges], dtype=torch.int32, device=images.device)
    pixels = (sides[:, None] * sides)[:, None, :, None]  # against (B, rows, 4, columns, 4, 3)
    return _color_index(cells, pixels).transpose(2, 3).reshape(batch, rows * columns, CELLS * CELLS)


def _color_index(sums: Tensor, pixels: int | Tensor) -> Tensor:
    """(..., 3) integer sums over a number of pixels -> (...) int64, 64 * red + 8 * green + blue."""
    bins = torch.div(8 * sums, 256 * pixels, rounding_mode="floor").long()
    return 64 * bins[..., 0] + 8 * bins[..., 1] + bins[..., 2]
