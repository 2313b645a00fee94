"""Boxes, flips and turns against plain references; what a decoder cuts out of stored pixels is what the view says."""

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torchvision.transforms.v2 import functional as reference

from vitpt import image
from vitpt.draws import Purpose, uniforms
from vitpt.recipe.schema import RandomResizedCrop, ShortCrop, Squash
from vitpt.stream.decode_cpu import put
from vitpt.stream.views import (
    View,
    evaluation_view,
    exponential,
    random_resized_box,
    stored,
    training_view,
)

SIZES = [(500, 375), (375, 500), (100, 1000), (640, 640), (33, 47)]


def view_of(crop, flip, widths, heights, seed=0, size=24, visit=0):
    n = len(widths)
    ids, visits = np.arange(n), np.full(n, visit)
    return training_view(crop, flip, size, seed, ids, visits, np.array(widths), np.array(heights), np.ones(n, np.uint8))


def test_exponential_is_exact_to_the_last_digits():
    x = np.concatenate([np.linspace(-30, 30, 100_001), np.linspace(-0.3, 0.3, 10_001)])
    assert np.abs(exponential(x) / np.exp(x) - 1).max() < 1e-15
    assert exponential(np.zeros(1))[0] == 1


def torchvision_rule(crop, width, height, u):
    """RandomResizedCrop.get_params in scalar Python, its random numbers given: [y, x, h, w]."""
    log_ratio = math.log(crop.ratio[0]), math.log(crop.ratio[1])
    for i in range(10):
        area = width * height * (crop.area[0] + u[2 * i] * (crop.area[1] - crop.area[0]))
        ratio = math.exp(log_ratio[0] + u[2 * i + 1] * (log_ratio[1] - log_ratio[0]))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return [int(u[20] * (height - h + 1)), int(u[21] * (width - w + 1)), h, w]
    w, h = width, height
    if width / height < min(crop.ratio):
        h = round(w / min(crop.ratio))
    elif width / height > max(crop.ratio):
        w = round(h * max(crop.ratio))
    return [(height - h) // 2, (width - w) // 2, h, w]


@pytest.mark.parametrize(
    "crop",
    [RandomResizedCrop(), RandomResizedCrop(area=(0.08, 1.0)), RandomResizedCrop(area=(0.3, 0.9), ratio=(0.5, 3.0))],
)
def test_boxes_follow_the_rule(crop):
    rng = np.random.default_rng(1)
    widths, heights = rng.integers(4, 1500, 800), rng.integers(4, 1500, 800)
    u = uniforms(5, np.zeros(800, dtype=np.int64), np.arange(800), Purpose.CROP, 22)
    boxes = random_resized_box(crop, u, widths, heights)
    want = [torchvision_rule(crop, int(w), int(h), row.tolist()) for w, h, row in zip(widths, heights, u, strict=True)]
    assert boxes.tolist() == want


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_boxes_are_distributed_as_by_a_plain_generator(width, height):
    crop, n = RandomResizedCrop(), 3000
    boxes = view_of(crop, "none", [width] * n, [height] * n).box
    plain = random.Random(width)
    want = np.array([torchvision_rule(crop, width, height, [plain.random() for _ in range(22)]) for _ in range(n)])
    for measure in (
        lambda b: b[:, 2] * b[:, 3],
        lambda b: b[:, 3] / b[:, 2],
        lambda b: b[:, 0],
        lambda b: b[:, 1],
    ):
        assert stats.ks_2samp(measure(boxes), measure(want)).pvalue > 1e-3


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 3000),
    st.integers(1, 3000),
    st.tuples(st.floats(0.001, 1), st.floats(0.001, 1)).map(sorted),
    st.tuples(st.floats(0.05, 20), st.floats(0.05, 20)).map(sorted),
    st.integers(0, 2**32 - 1),
)
def test_boxes_lie_inside(width, height, area, ratio, seed):
    crop = RandomResizedCrop(area=tuple(area), ratio=tuple(ratio))
    y, x, h, w = view_of(crop, "both", [width] * 40, [height] * 40, seed).box.T
    assert (h >= 1).all()
    assert (w >= 1).all()
    assert (y >= 0).all()
    assert (x >= 0).all()
    assert (y + h <= height).all()
    assert (x + w <= width).all()


def test_every_position_can_be_reached():
    boxes = view_of(RandomResizedCrop(area=(0.2, 0.25), ratio=(1.0, 1.0)), "none", [8] * 2000, [8] * 2000).box
    assert set(boxes[boxes[:, 3] == 4][:, 1].tolist()) == {0, 1, 2, 3, 4}


def test_views_never_change():
    """Runs can only be repeated while these stay."""
    view = view_of(RandomResizedCrop(), "both", [500, 375, 64], [375, 500, 64], seed=7, visit=2)
    assert view.box.tolist() == BOXES
    assert view.flip.tolist() == FLIPS


BOXES = [[70, 39, 221, 206], [56, 83, 173, 146], [3, 2, 54, 42]]
FLIPS = [1, 3, 2]


@pytest.mark.parametrize(("flip", "codes"), [("none", {0}), ("horizontal", {0, 1}), ("both", {0, 1, 2, 3})])
def test_flips(flip, codes):
    n = 4000
    flips = view_of(Squash(), flip, [9] * n, [9] * n).flip
    found, counts = np.unique(flips, return_counts=True)
    assert set(found.tolist()) == codes
    assert np.abs(counts / n - 1 / len(codes)).max() < 0.03


def test_flips_do_not_move_the_boxes():
    widths, heights = [200] * 50, [100] * 50
    boxes = [view_of(RandomResizedCrop(), flip, widths, heights).box for flip in ("none", "horizontal", "both")]
    assert np.array_equal(boxes[0], boxes[1])
    assert np.array_equal(boxes[0], boxes[2])


@pytest.mark.parametrize("flip", ["none", "horizontal"])
def test_squash_takes_everything(flip):
    view = view_of(Squash(), flip, [31, 40], [17, 9], size=24)
    assert view.box.tolist() == [[0, 0, 17, 31], [0, 0, 9, 40]]
    assert view.resize.tolist() == [[24, 24]] * 2
    assert view.crop.tolist() == [[0, 0]] * 2


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 400), st.integers(1, 400), st.integers(1, 64), st.integers(1, 64))
def test_short_crop_is_torchvisions_resize_and_center_crop(width, height, short, size):
    short = max(short, size)
    view = evaluation_view(ShortCrop(short=short), size, np.array([width]), np.array([height]), np.array([1]))
    assert view.box.tolist() == [[0, 0, height, width]]
    # A picture of row numbers tells where the centre crop was taken.
    resized = reference.resize(torch.zeros(1, height, width), [short])
    h, w = resized.shape[1:]
    assert view.resize.tolist() == [[h, w]]
    rows, columns = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    square = reference.center_crop(torch.stack([rows, columns]), [size])
    assert view.crop.tolist() == [square[:, 0, 0].tolist()]


def test_short_crop_enlarges_small_images():
    view = evaluation_view(ShortCrop(short=16), 24, np.array([10]), np.array([5]), np.array([1]))
    assert view.resize.tolist() == [[24, 48]]
    assert view.crop.tolist() == [[0, 12]]


@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(1, 8), st.integers(0, 3), st.integers(3, 12), st.integers(3, 12))
def test_stored_views_end_upright(data, orient, flip, width, height):
    """Cut, crop and turn of the stored pixels are cut, crop and flips of the upright ones, for every orientation."""
    pixels = np.arange(width * height * 3, dtype=np.int64).reshape(height, width, 3).astype(np.uint8)
    upright = image.turn(pixels, orient)
    whole_h, whole_w = upright.shape[:2]
    h, w = data.draw(st.integers(2, whole_h)), data.draw(st.integers(2, whole_w))
    y, x = data.draw(st.integers(0, whole_h - h)), data.draw(st.integers(0, whole_w - w))
    size = data.draw(st.integers(1, min(h, w)))
    crop_y, crop_x = data.draw(st.integers(0, h - size)), data.draw(st.integers(0, w - size))
    want = upright[y + crop_y : y + crop_y + size, x + crop_x : x + crop_x + size]
    want = want[:: -1 if flip & 2 else 1, :: -1 if flip & 1 else 1]
    view = View(
        box=np.array([[y, x, h, w]], np.int32),
        flip=np.array([flip], np.uint8),
        orient=np.array([orient], np.uint8),
        resize=np.array([[h, w]], np.int32),
        crop=np.array([[crop_y, crop_x]], np.int32),
        size=size,
    )
    part = stored(view, np.array([width]), np.array([height]))
    y, x, h, w = part.box[0]
    assert part.resize[0].tolist() == [h, w]
    window = torch.from_numpy(pixels[y : y + h, x : x + w])
    y, x = part.crop[0]
    out = torch.empty(size, size, 3, dtype=torch.uint8)
    put(window[y : y + size, x : x + size], int(part.turn[0]), out, out.numpy())
    assert np.array_equal(out.numpy(), want)


def test_boxes_beyond_the_image_are_clamped():
    view = View(
        box=np.array([[-5, 90, 300, 20], [50, 50, 10, 0]], np.int32),
        flip=np.zeros(2, np.uint8),
        orient=np.ones(2, np.uint8),
        resize=np.full((2, 2), 8, np.int32),
        crop=np.zeros((2, 2), np.int32),
        size=8,
    )
    assert stored(view, np.array([100, 40]), np.array([60, 30])).box.tolist() == [[0, 80, 60, 20], [20, 39, 10, 1]]
