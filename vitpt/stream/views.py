"""What to cut out of an image and how to scale it: integers only, computed once, before a byte is read.

Boxes follow torchvision's definition (crop first, then resize), so that region decoders can skip what is outside. No result
depends on the CPU's libm: square roots are correctly rounded by IEEE 754, the exponential is written out below.
"""

from dataclasses import dataclass
from decimal import Context, Decimal
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from vitpt.draws import Purpose, uniforms, words
from vitpt.recipe.schema import EvalCrop, RandomResizedCrop, Squash, TrainCrop

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]
UInt8 = npt.NDArray[np.uint8]
IntArray = npt.NDArray[np.integer]

TRIES = 10
"""Windows drawn per sample; the first that fits is taken. As in torchvision's RandomResizedCrop."""

HORIZONTAL, VERTICAL, TRANSPOSE = 1, 2, 4
"""Bits of a turn: first the transpose, then the flips."""

# Turn that makes the stored image upright, by EXIF orientation 1..8 (index 0 is not used).
_TURN_OF_ORIENTATION = np.array(
    [
        0,
        0,
        HORIZONTAL,
        HORIZONTAL | VERTICAL,
        VERTICAL,
        TRANSPOSE,
        TRANSPOSE | HORIZONTAL,
        TRANSPOSE | HORIZONTAL | VERTICAL,
        TRANSPOSE | VERTICAL,
    ],
    dtype=np.uint8,
)


@dataclass(frozen=True)
class View:
    """One picture of each sample, in upright pixels: cut `box`, resize it to `resize`, cut the square at `crop`, flip.

    Attributes:
        box: (n, 4) int32 [y, x, height, width].
        flip: (n,) uint8; bit 0 horizontal, bit 1 vertical.
        orient: (n,) uint8 EXIF orientation of the stored image.
        resize: (n, 2) int32 [height, width].
        crop: (n, 2) int32 [y, x] in the resized picture.
        size: side of the square that results.
        filter: of the resize; always antialiased.
    """

    box: Int32
    flip: UInt8
    orient: UInt8
    resize: Int32
    crop: Int32
    size: int
    filter: str = "bilinear"


@dataclass(frozen=True)
class Stored:
    """A view in stored pixels, as a decoder needs it: cut, resize and cut as in `View`, then apply `turn` to the square.

    Attributes:
        width, height: (n,) int32, the stored image's size.
        box, resize, crop: as in `View`.
        turn: (n,) uint8: bit 2 transpose, then bit 1 vertical and bit 0 horizontal flip.
        size: side of the square.
    """

    width: Int32
    height: Int32
    box: Int32
    resize: Int32
    crop: Int32
    turn: UInt8
    size: int

    def __getitem__(self, rows: slice) -> "Stored":
        return Stored(
            self.width[rows],
            self.height[rows],
            self.box[rows],
            self.resize[rows],
            self.crop[rows],
            self.turn[rows],
            self.size,
        )


def training_view(
    crop: TrainCrop,
    flip: str,
    size: int,
    seed: int,
    ids: Int64,
    visits: Int64,
    widths: IntArray,
    heights: IntArray,
    orients: IntArray,
    view: int = 0,
) -> View:
    """The training view of each sample and visit.

    Shapes: ids, visits, widths, heights (upright), orients (n,).
    """
    if isinstance(crop, RandomResizedCrop):
        box = random_resized_box(crop, uniforms(seed, visits, ids, Purpose.CROP, 2 * TRIES + 2, view), widths, heights)
        resize = np.full((len(ids), 2), size, dtype=np.int32)
        upright = View(box, _no_flips(len(ids)), _as_u8(orients), resize, np.zeros_like(resize), size)
    else:
        upright = evaluation_view(crop, size, widths, heights, orients)
    if flip == "none":
        return upright
    coins = words(seed, visits, ids, Purpose.FLIP, 2, view) < np.uint32(1 << 31)
    flips = coins[:, 0].astype(np.uint8) * np.uint8(HORIZONTAL)
    if flip == "both":
        flips |= coins[:, 1].astype(np.uint8) * np.uint8(VERTICAL)
    return View(upright.box, flips, upright.orient, upright.resize, upright.crop, size)


def evaluation_view(crop: EvalCrop, size: int, widths: IntArray, heights: IntArray, orients: IntArray) -> View:
    """The evaluation view of each sample: no draws.

    `squash` resizes the whole image to the square. `short_crop` resizes its shorter side to `crop.short` (to `size` where that is
    larger: a smaller image is enlarged) and the longer one to int(short * long / shorter), then cuts the central square, its
    corner rounded half to even; both roundings are torchvision's.

    Shapes: widths, heights (upright), orients (n,).
    """
    n = len(widths)
    w, h = np.asarray(widths).astype(np.int64), np.asarray(heights).astype(np.int64)
    box = np.stack([np.zeros(n, np.int64), np.zeros(n, np.int64), h, w], axis=1).astype(np.int32)
    if isinstance(crop, Squash):
        resize = np.full((n, 2), size, dtype=np.int32)
        return View(box, _no_flips(n), _as_u8(orients), resize, np.zeros((n, 2), np.int32), size)
    short = max(crop.short, size)
    shorter = np.minimum(w, h)
    resize = np.stack([short * h // shorter, short * w // shorter], axis=1)
    corner = np.rint((resize - size) / 2)
    return View(box, _no_flips(n), _as_u8(orients), resize.astype(np.int32), corner.astype(np.int32), size)


def random_resized_box(crop: RandomResizedCrop, u: Float64, widths: IntArray, heights: IntArray) -> Int32:
    """Windows of RandomResizedCrop from a fixed number of uniforms.

    Area uniform, ratio (width / height) log-uniform, the first of ten tries that fits, its position uniform (both ends included);
    else the largest central window whose ratio is within bounds.

    Shapes: u (n, 22) in [0, 1): ten pairs (area, ratio), then y, x; widths, heights (n,); returns (n, 4) int32 [y, x, h, w].
    Source: the rule of torchvision's RandomResizedCrop.get_params.
    """
    width, height = np.asarray(widths).astype(np.float64)[:, None], np.asarray(heights).astype(np.float64)[:, None]
    # (n, 10)
    area = (crop.area[0] + u[:, 0 : 2 * TRIES : 2] * (crop.area[1] - crop.area[0])) * (width * height)
    log_low, log_high = _log(crop.ratio[0]), _log(crop.ratio[1])
    ratio = exponential(log_low + u[:, 1 : 2 * TRIES : 2] * (log_high - log_low))
    tried_w = np.rint(np.sqrt(area * ratio))
    tried_h = np.rint(np.sqrt(area / ratio))
    fits = (tried_w >= 1) & (tried_w <= width) & (tried_h >= 1) & (tried_h <= height)
    first = np.argmax(fits, axis=1)
    rows = np.arange(len(u))
    found = fits[rows, first]
    width, height = width[:, 0], height[:, 0]
    central_w, central_h = _largest_window(crop, width, height)
    w = np.where(found, tried_w[rows, first], central_w)
    h = np.where(found, tried_h[rows, first], central_h)
    y = np.where(found, np.floor(u[:, -2] * (height - h + 1)), (height - h) // 2)
    x = np.where(found, np.floor(u[:, -1] * (width - w + 1)), (width - w) // 2)
    return np.stack([y, x, h, w], axis=1).astype(np.int32)


def _largest_window(crop: RandomResizedCrop, width: Float64, height: Float64) -> tuple[Float64, Float64]:
    """The whole image, or as much of its longer side as the nearest ratio allows."""
    ratio = width / height
    w = np.where(ratio > crop.ratio[1], np.clip(np.rint(height * crop.ratio[1]), 1, width), width)
    h = np.where(ratio < crop.ratio[0], np.clip(np.rint(width / crop.ratio[0]), 1, height), height)
    return w, h


# ln 2 in two parts: the first has few enough bits that its product with a small integer is exact.
_LN2_HIGH, _LN2_LOW = float.fromhex("0x1.62e42fee00000p-1"), float.fromhex("0x1.a39ef35793c76p-33")
_INVERSE_FACTORIALS = tuple(1 / factor for factor in (1, 1, 2, 6, 24, 120, 720, 5040, 40320, 362880, 3628800, 39916800))
_INVERSE_FACTORIALS += (1 / 479001600, 1 / 6227020800)


def exponential(x: Float64) -> Float64:
    """e^x with the same bits on every machine (relative error about 1e-15): only +, *, rounding and powers of two."""
    k = np.rint(x * 1.4426950408889634)
    r = x - k * _LN2_HIGH - k * _LN2_LOW
    total = np.full_like(r, _INVERSE_FACTORIALS[-1])
    for factor in reversed(_INVERSE_FACTORIALS[:-1]):
        total *= r
        total += factor
    return np.ldexp(total, k.astype(np.int32))


@lru_cache(maxsize=16)
def _log(x: float) -> float:
    """ln x, correctly rounded: decimal arithmetic is the same everywhere."""
    return float(Decimal(x).ln(Context(prec=40)))


def stored(view: View, widths: IntArray, heights: IntArray) -> Stored:
    """A view of upright images as a view of the stored ones, whose EXIF orientation and flips become one turn at the end.

    Shapes: widths, heights (n,) of the stored (not turned) images.
    """
    upright_turn = _TURN_OF_ORIENTATION[view.orient]
    turn = upright_turn ^ view.flip  # both flip after the transpose, so they add up
    swap = (turn & TRANSPOSE) != 0
    stored_w, stored_h = np.asarray(widths).astype(np.int32), np.asarray(heights).astype(np.int32)
    upright = np.stack([np.where(swap, stored_w, stored_h), np.where(swap, stored_h, stored_w)], axis=1)
    extent = np.clip(view.box[:, 2:], 1, upright)
    corner = np.clip(view.box[:, :2], 0, upright - extent)
    corner = _mirrored(corner, extent, upright, upright_turn)
    crop = _mirrored(view.crop, np.full_like(view.crop, view.size), view.resize, upright_turn)
    box = np.concatenate([_swapped(corner, swap), _swapped(extent, swap)], axis=1)
    return Stored(stored_w, stored_h, box, _swapped(view.resize, swap), _swapped(crop, swap), turn, view.size)


def _mirrored(corner: Int32, extent: Int32, whole: Int32, turn: UInt8) -> Int32:
    """Corner of a window after the flips of `turn`. Shapes: (n, 2) [y, x] each."""
    flips = np.stack([(turn & VERTICAL) != 0, (turn & HORIZONTAL) != 0], axis=1)
    return np.where(flips, whole - corner - extent, corner)


def _swapped(pairs: Int32, swap: npt.NDArray[np.bool_]) -> Int32:
    """The two columns exchanged where `swap`."""
    return np.where(swap[:, None], pairs[:, ::-1], pairs)


def _no_flips(n: int) -> UInt8:
    return np.zeros(n, dtype=np.uint8)


def _as_u8(values: IntArray) -> UInt8:
    return np.asarray(values).astype(np.uint8)
