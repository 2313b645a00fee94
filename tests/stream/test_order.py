"""Every sample exactly once a pass, for any ranks and micro-batches; resuming anywhere gives the same suffix."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from making import make_split

from vitpt.errors import Exit, VitptError
from vitpt.stream.order import BlockOrder, GlobalOrder, make_slots, rows_in_use, rows_of

RANKS = [1, 2, 3, 4, 7, 8]


def dealt(order, start, stop):
    return order.deal(np.arange(start, stop))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9001), st.integers(0, 2**32 - 1))
@example(4096, 0)
@example(1, 5)
def test_every_sample_exactly_once_a_pass(n, seed):
    order = GlobalOrder(seed, None, n)
    ids, visits = dealt(order, 0, 3 * n)
    for visit in range(3):
        part = slice(visit * n, (visit + 1) * n)
        assert np.array_equal(np.sort(ids[part]), np.arange(n))
        assert (visits[part] == visit).all()
    if n > 20:
        assert not np.array_equal(ids[:n], ids[n : 2 * n])  # each pass has its own order


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 8123),
    st.integers(1, 700),
    st.sampled_from(RANKS),
    st.integers(1, 64),
    st.integers(0, 5),
    st.integers(0, 2**32 - 1),
)
def test_ranks_and_micro_batches_share_the_same_global_batch(n, batch, ranks, micro_batch_size, step, seed):
    order = GlobalOrder(seed, None, n)
    slots = make_slots(batch, ranks, micro_batch_size)
    ids = []
    for rank in range(ranks):
        for micro in range(slots.micros):
            offsets = slots.of(rank, micro)
            ids.append(order.deal(np.where(offsets < 0, -1, step * batch + offsets))[0])
    together = np.concatenate(ids)
    assert np.array_equal(together[together >= 0], dealt(order, step * batch, (step + 1) * batch)[0])


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6000), st.integers(0, 10**9), st.integers(1, 300))
def test_resuming_anywhere_gives_the_same_suffix(n, start, count):
    order = GlobalOrder(11, None, n)
    ids, visits = dealt(order, start, start + count)
    cut = count // 2
    resumed_ids, resumed_visits = dealt(GlobalOrder(11, None, n), start + cut, start + count)
    assert np.array_equal(ids[cut:], resumed_ids)
    assert np.array_equal(visits[cut:], resumed_visits)


def test_rows_and_source_are_in_the_ids():
    rows = np.array([3, 5, 9])
    ids, visits = GlobalOrder(0, rows, 3, source=2).deal(np.array([0, 1, 2, -1, 3]))
    assert np.array_equal(np.sort(ids[:3]), rows + (2 << 48))
    assert ids[3] == -1
    assert visits.tolist() == [0, 0, 0, 0, 1]
    assert set(rows_of(ids[:3]).tolist()) == {3, 5, 9}
    assert rows_of(ids[3:4]).tolist() == [-1]


def test_an_order_never_changes():
    """Runs can only be repeated while these stay."""
    ids, _ = GlobalOrder(0, None, 10).deal(np.arange(12))
    assert ids.tolist() == SMALL
    ids, _ = GlobalOrder(1, None, 1_281_167).deal(np.array([0, 1, 2, 1_281_167]))
    assert ids.tolist() == LARGE


SMALL = [6, 2, 7, 9, 8, 4, 5, 0, 3, 1, 1, 3]
LARGE = [239929, 877164, 953008, 143626]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 70), st.integers(1, 300))
@example(4096, 56, 64)
@example(9, 8, 100)
def test_slots_hold_each_row_once(batch, ranks, micro_batch_size):
    slots = make_slots(batch, ranks, micro_batch_size)
    assert slots.size <= micro_batch_size
    assert slots.micros == 1 or -(-batch // (ranks * (slots.micros - 1))) > micro_batch_size  # the fewest
    assert slots.size == -(-batch // (ranks * slots.micros))
    rows = np.concatenate([slots.of(rank, micro) for rank in range(ranks) for micro in range(slots.micros)])
    assert len(rows) == ranks * slots.micros * slots.size
    assert np.array_equal(rows[:batch], np.arange(batch))  # contiguous, the surplus at the end
    assert (rows[batch:] == -1).all()


@pytest.mark.parametrize("numbers", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_slots_refuse_nothing(numbers):
    with pytest.raises(ValueError, match="at least 1"):
        make_slots(*numbers)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 500), st.sampled_from(RANKS), st.integers(1, 40), st.booleans())
def test_block_order_deals_every_sample_once_and_contiguously(n, ranks, size, some):
    rows = np.arange(n) * 2 + 1 if some else None
    order = BlockOrder(rows, n, ranks, size)
    slots = make_slots(size * ranks, ranks, size)
    seen = []
    for rank in range(ranks):
        mine = []
        for step in range(order.steps):
            ids, visits = order.deal(step * slots.batch + slots.of(rank, 0))
            assert (visits == 0).all()
            mine.append(ids)
        mine = np.concatenate(mine)
        filled = mine[mine >= 0]
        assert np.array_equal(filled, mine[: len(filled)])  # the empty slots come last
        seen.append(filled)
    assert np.array_equal(np.concatenate(seen), np.arange(n) if rows is None else rows)


class TestRowsInUse:
    def split(self, tmp_path, labels):
        return make_split(tmp_path, [b"x"] * len(labels), labels, sizes=dict.fromkeys(range(len(labels)), (9, 9)))

    def test_all_rows_need_no_array(self, tmp_path):
        split = self.split(tmp_path, [0, 1, 2])
        assert rows_in_use(split, 1.0, False) is None
        assert rows_in_use(split, 1.0, True) is None

    def test_labelled_only(self, tmp_path):
        split = self.split(tmp_path, [0, -1, 2, -1])
        assert rows_in_use(split, 1.0, True).tolist() == [0, 2]
        with pytest.raises(VitptError, match="no labelled samples") as caught:
            rows_in_use(self.split(tmp_path / "none", [-1, -1]), 1.0, True)
        assert caught.value.exit_code == Exit.DATA

    def test_fractions_are_nested_and_exact(self, tmp_path):
        split = self.split(tmp_path, [i % 3 - 1 for i in range(300)])
        for labelled_only, available in ((False, 300), (True, 200)):
            before: set[int] = set()
            for fraction in (0.001, 0.1, 0.35, 0.5, 0.99):
                rows = rows_in_use(split, fraction, labelled_only)
                assert len(rows) == max(1, round(fraction * available))
                assert np.array_equal(rows, np.unique(rows))
                assert before <= set(rows.tolist())
                before = set(rows.tolist())
            if labelled_only:
                assert (split.label[sorted(before)] >= 0).all()
