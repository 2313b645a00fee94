import pytest
import torch
from oracles import ORACLES, formula

from vitpt.models.posembed import resize_pos_embed, sincos2d

CASES = ORACLES["posemb_resize"]["cases"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['old']}to{case['new']}")
def test_resize(case):
    old, new = case["old"], case["new"]
    table = formula((old, old, 2), 1, 0.1).reshape(1, old * old, 2)
    cls_row = torch.full((1, 1, 2), 7.0, dtype=torch.float64)
    resized = resize_pos_embed(torch.cat([cls_row, table], 1), (old, old), (new, new), has_cls=True)
    assert torch.equal(resized[:, :1], cls_row)
    grid = resized[0, 1:].reshape(new, new, 2)
    assert grid.sum().item() == pytest.approx(case["checksum_jax"], abs=5e-6)
    for place, values in case["probe_jax"].items():
        row, column = map(int, place.split(","))
        assert grid[row, column].tolist() == pytest.approx(values, abs=5e-6)
    if "jax" in case:
        assert torch.allclose(grid[:, :, 0], torch.tensor(case["jax"], dtype=torch.float64), atol=5e-6)


def test_float32_resize_loses_no_digit():
    table = formula((24, 24, 2), 1, 0.1).reshape(1, 576, 2)
    double = resize_pos_embed(table, (24, 24), (14, 14), has_cls=False)
    single = resize_pos_embed(table.float(), (24, 24), (14, 14), has_cls=False)
    assert single.dtype == torch.float32
    assert (single - double).abs().max() < 2e-7


def test_corners_stay_where_other_code_writes_zeros():
    table = torch.ones(1, 16 * 16, 3)  # a size at which the usual zoom routine leaves its grid by one rounding error
    resized = resize_pos_embed(table, (16, 16), (30, 30), has_cls=False)
    assert torch.allclose(resized, torch.ones(1, 900, 3))


def test_same_grid_is_bit_identical():
    table = torch.randn(1, 197, 8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(resize_pos_embed(table, (14, 14), (14, 14), has_cls=True), table)


def test_non_square_and_single_patch_grids():
    table = formula((2 * 3, 2), 1, 0.1)[None]
    resized = resize_pos_embed(table, (2, 3), (4, 3), has_cls=False).reshape(4, 3, 2)
    first, last = table[0, :3], table[0, 3:]
    assert torch.allclose(resized[1], first + (last - first) / 3)
    assert torch.allclose(resize_pos_embed(table[:, :1], (1, 1), (2, 2), has_cls=False), table[:, :1].expand(1, 4, 2))


def test_wrong_grid_is_refused():
    with pytest.raises(ValueError, match="do not make a grid"):
        resize_pos_embed(torch.zeros(1, 6, 2), (2, 2), (3, 3), has_cls=False)


def test_sincos2d():
    case = ORACLES["sincos2d"]
    table = sincos2d((case["h"], case["w"]), case["dim"])
    assert torch.allclose(table[0], torch.tensor(case["big_vision"]), atol=5e-6)
    large = sincos2d((14, 14), 384).double()
    assert large.sum().item() == pytest.approx(case["checksum_14x14_384_big_vision"], abs=2e-3)
