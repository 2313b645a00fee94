"""Position embeddings: fixed sine-cosine tables, and the resize of learned ones to another grid."""

import torch
from torch import Tensor
from torch.nn import functional as F


def resize_pos_embed(pos: Tensor, old_grid: tuple[int, int], new_grid: tuple[int, int], has_cls: bool) -> Tensor:
    """Learned positions for another grid: bilinear with aligned corners, the class token's row kept.

    Equals `scipy.ndimage.zoom(order=1)` of the authors' code without its rounding faults at the border: the source coordinate
    of row i is i * (old - 1) / (new - 1).

    Shapes:
        pos: (1, N_old (+ 1), D) -> (1, N_new (+ 1), D), same dtype; the same values when the grids are equal.
    """
    if old_grid == new_grid:
        return pos
    cls_row, table = (pos[:, :1], pos[:, 1:]) if has_cls else (pos[:, :0], pos)
    rows, columns = old_grid
    if table.shape[1] != rows * columns:
        raise ValueError(f"{table.shape[1]} positions do not make a grid of {rows} x {columns}")
    # (1, N, D) -> (1, D, rows, columns); float64 because float32 coordinates would cost a digit
    image = table.reshape(1, rows, columns, -1).permute(0, 3, 1, 2).double()
    image = F.interpolate(image, size=new_grid, mode="bilinear", align_corners=True)
    return torch.cat([cls_row, image.permute(0, 2, 3, 1).flatten(1, 2).to(pos.dtype)], dim=1)


def sincos2d(grid: tuple[int, int], width: int) -> Tensor:
    """Fixed table [sin x, cos x, sin y, cos y] over columns x and rows y, raster order, (1, N, D) float32.

    Source: big_vision's frequencies 10000 ** (-i / (D/4 - 1)).
    """
    rows, columns = grid
    quarter = width // 4
    omega = 10000.0 ** (-torch.arange(quarter, dtype=torch.float64, device="cpu") / max(quarter - 1, 1))
    y = torch.arange(rows, dtype=torch.float64, device="cpu").repeat_interleave(columns)[:, None] * omega
    x = torch.arange(columns, dtype=torch.float64, device="cpu").repeat(rows)[:, None] * omega
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1)[None].float()
