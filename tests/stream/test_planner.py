"""Plans and digests: pure, the same for every way to share the work, sensitive to everything that was consumed."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from making import make_split, no_draws

from vitpt.draws import Purpose, words
from vitpt.recipe.schema import Data, ShortCrop, Squash
from vitpt.stream.digest import MODULUS, digest, row_hashes
from vitpt.stream.order import make_slots
from vitpt.stream.plan import Plan, evaluation_planner, training_planner


def some_draws(seed, visits, ids):
    drawn = words(seed, visits, ids, Purpose.MPP_KINDS, 6)
    return {"kinds": (drawn[:, :3] % 3).astype(np.uint8), "donors": drawn[:, 3:].astype(np.int64)}


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    rng = np.random.default_rng(0)
    sizes = {i: (int(w), int(h)) for i, (w, h) in enumerate(rng.integers(8, 60, (53, 2)))}
    labels = [i % 5 - 1 for i in range(53)]
    return make_split(tmp_path_factory.mktemp("split"), [b"x"] * 53, labels, sizes)


def planner_of(split, batch=20, ranks=1, rank=0, micro=100, draws=some_draws, **data):
    return training_planner(Data(path="x", **data), 16, 9, split, make_slots(batch, ranks, micro), rank, draws)


def plans_of_step(split, step, ranks=1, micro=100, **options):
    planners = [planner_of(split, ranks=ranks, rank=rank, micro=micro, **options) for rank in range(ranks)]
    return [planner.plan(step, i) for planner in planners for i in range(planner.slots.micros)]


def test_plans_are_pure_functions_of_step_and_micro_batch(split):
    first, other = planner_of(split, micro=6), planner_of(split, micro=6)
    other.plan(7, 1)
    a, b = first.plan(3, 2), other.plan(3, 2)
    assert np.array_equal(a.ids, b.ids)
    assert np.array_equal(a.views[0].box, b.views[0].box)
    assert np.array_equal(a.draws["donors"], b.draws["donors"])


def test_positions_run_on_across_passes(split):
    plans = [planner_of(split).plan(step, 0) for step in range(4)]
    assert np.concatenate([plan.positions for plan in plans]).tolist() == list(range(80))
    assert np.concatenate([plan.visits for plan in plans]).tolist() == [0] * 53 + [1] * 27


def test_empty_slots_are_masked(split):
    plans = plans_of_step(split, 2, ranks=3, micro=4)
    assert {len(plan.ids) for plan in plans} == {4}
    empty = np.concatenate([plan.ids for plan in plans]) < 0
    assert empty.sum() == 3 * 2 * 4 - 20
    last = plans[-1]
    assert (last.rows[last.ids < 0] == -1).all()
    assert (last.positions[last.ids < 0] == -1).all()
    assert last.views[0].box[last.ids < 0].tolist() == [[0, 0, 1, 1]] * int((last.ids < 0).sum())
    assert len(last.draws["kinds"]) == 4


def test_filters_reach_the_order(split):
    plan = planner_of(split, batch=200, micro=200, labelled_only=True, fraction=0.5).plan(0, 0)
    assert (split.label[plan.rows] >= 0).all()
    assert len(set(plan.rows.tolist())) == round(0.5 * (split.label >= 0).sum())


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_evaluation_sees_every_sample_once(split, ranks):
    seen = []
    for rank in range(ranks):
        planner = evaluation_planner(ShortCrop(short=20), 16, 9, split, 5, ranks, rank, some_draws, True)
        plans = [planner.plan(step, 0) for step in range(planner.steps)]
        assert {len(plan.ids) for plan in plans} == {5}
        seen += [row for plan in plans for row in plan.rows.tolist() if row >= 0]
        assert all((plan.visits == 0).all() for plan in plans)
        assert all(plan.views[0].flip.max() == 0 for plan in plans)
    assert seen == np.flatnonzero(split.label >= 0).tolist()


def test_evaluation_draws_are_those_of_the_first_visit(split):
    planner = evaluation_planner(Squash(), 16, 4, split, 60, 1, 0, some_draws, False)
    plan = planner.plan(0, 0)
    ids = np.where(plan.ids >= 0, plan.ids, 0)
    want = some_draws(4, np.zeros(60, dtype=np.int64), ids)["donors"]
    assert np.array_equal(plan.draws["donors"][plan.ids >= 0], want[plan.ids >= 0])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 12), st.sampled_from([1, 2, 3, 4, 7, 8]), st.integers(1, 21))
def test_the_digest_does_not_depend_on_ranks_and_micro_batches(split, step, ranks, micro):
    together = sum(digest(plan) for plan in plans_of_step(split, step, ranks, micro)) % MODULUS
    assert together == digest(planner_of(split).plan(step, 0))


def changed(plan: Plan, what: str) -> Plan:
    """The plan with one number of one sample changed by one."""
    bump = np.zeros(len(plan.ids), dtype=np.int64)
    bump[3] = 1
    view = plan.views[0]
    if what in ("ids", "visits"):
        return replace(plan, **{what: getattr(plan, what) + bump})
    if what == "box":
        return replace(plan, views=(replace(view, box=view.box + bump.astype(np.int32)[:, None] * [0, 1, 0, 0]),))
    if what == "flip":
        return replace(plan, views=(replace(view, flip=view.flip ^ bump.astype(np.uint8)),))
    return replace(plan, draws=plan.draws | {what: plan.draws[what] + bump[:, None] * [0, 0, 1]})


def test_the_digest_sees_everything(split):
    plan = planner_of(split).plan(0, 0)
    others = [changed(plan, what) for what in ("ids", "visits", "box", "flip", "kinds", "donors")]
    renamed = replace(plan, draws={"kind": plan.draws["kinds"], "donors": plan.draws["donors"]})
    dropped = replace(plan, draws={"donors": plan.draws["donors"]})
    swapped = replace(plan, draws={"kinds": plan.draws["donors"], "donors": plan.draws["kinds"]})
    digests = [digest(other) for other in [plan, *others, renamed, dropped, swapped]]
    assert len(set(digests)) == len(digests)


def test_the_digest_ignores_field_order_integer_types_and_empty_slots(split):
    plan = plans_of_step(split, 0, ranks=3, micro=4)[-1]
    assert (plan.ids < 0).any()
    draws = {name: values.astype(np.int64) for name, values in reversed(plan.draws.items())}
    box = plan.views[0].box.copy()
    box[plan.ids < 0] += 7
    other = replace(plan, draws=draws, views=(replace(plan.views[0], box=box),))
    assert digest(other) == digest(plan)


def test_digests_never_change(split):
    """Stored digests can only be compared while these stay."""
    assert f"{digest(planner_of(split).plan(0, 0)):016x}" == DIGEST
    assert f"{digest(planner_of(split, draws=no_draws).plan(1, 0)):016x}" == DIGEST_WITHOUT_DRAWS


DIGEST = "7f95349bbaeac4c3"
DIGEST_WITHOUT_DRAWS = "f5e49866fa133be3"


@pytest.mark.parametrize("bad", [np.zeros((20, 2), np.float32), np.zeros(20, bool)])
def test_only_integers_are_hashed(split, bad):
    plan = planner_of(split, draws=lambda seed, visits, ids: {"noise": bad}).plan(0, 0)
    with pytest.raises(TypeError, match=r"draws\.noise"):
        digest(plan)


def test_row_hashes_spread():
    n = 100_000
    values = np.arange(n)
    hashes = row_hashes({"id": values, "box": np.stack([values % 7, values % 11], axis=1)})
    assert len(np.unique(hashes)) == n
    # One bit of the input moves about half of the output's bits.
    bits = np.unpackbits(
        (hashes ^ row_hashes({"id": values ^ 1, "box": np.stack([values % 7, values % 11], axis=1)})).view(np.uint8)
    )
    assert abs(bits.mean() - 0.5) < 0.01
