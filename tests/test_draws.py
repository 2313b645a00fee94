"""Random numbers: known answers, independence of grouping, permutations."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from vitpt import draws
from vitpt.draws import Purpose

ALL_ONES = 0xFFFFFFFF


# Known answers of the Random123 distribution (kat_vectors, philox4x32 10).
@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ([0, 0, 0, 0], (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([ALL_ONES] * 4, (ALL_ONES, ALL_ONES), [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter, key, answer):
    assert draws.philox(np.array([counter], dtype=np.uint32), key).tolist() == [answer]


def test_words_are_philox_of_the_documented_counter():
    sample, visit, view = (3 << 40) + 17, 5, 2
    got = draws.words(7, np.array([visit]), np.array([sample]), Purpose.CROP, 6, view)
    counters = [[sample & ALL_ONES, sample >> 32, visit, view << 24 | block] for block in (0, 1)]
    want = draws.philox(np.array(counters, dtype=np.uint64), (7, Purpose.CROP)).reshape(-1)[:6]
    assert got.tolist() == [want.tolist()]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2**55), st.integers(0, 2**32 - 1)), min_size=1, max_size=40),
    st.integers(1, 40),
    st.integers(0, 2**32 - 1),
    st.data(),
)
def test_words_do_not_depend_on_grouping_or_count(samples, count, seed, data):
    ids, visits = (np.array(column) for column in zip(*samples, strict=True))
    together = draws.words(seed, visits, ids, Purpose.FLIP, count)
    cut = data.draw(st.integers(0, len(ids)))
    parts = [draws.words(seed, visits[s], ids[s], Purpose.FLIP, count) for s in (slice(0, cut), slice(cut, None))]
    assert np.array_equal(together, np.concatenate(parts))
    assert np.array_equal(together, draws.words(seed, visits, ids, Purpose.FLIP, count + 9)[:, :count])


def test_large_requests_equal_small_ones():
    ids, visits = np.arange(5000), np.arange(5000) % 3
    all_at_once = draws.words(1, visits, ids, Purpose.CROP, 22)
    assert np.array_equal(all_at_once[4321:4323], draws.words(1, visits[4321:4323], ids[4321:4323], Purpose.CROP, 22))


def test_seed_purpose_visit_view_and_id_all_change_the_words():
    one, zero = np.array([1]), np.array([0])
    streams = [
        draws.words(1, zero, zero, Purpose.CROP, 8),
        draws.words(2, zero, zero, Purpose.CROP, 8),
        draws.words(1, one, zero, Purpose.CROP, 8),
        draws.words(1, zero, one, Purpose.CROP, 8),
        draws.words(1, zero, one << 32, Purpose.CROP, 8),
        draws.words(1, zero, zero, Purpose.FLIP, 8),
        draws.words(1, zero, zero, Purpose.CROP, 8, view=1),
    ]
    assert len({stream.tobytes() for stream in streams}) == len(streams)


def test_purposes_are_never_renumbered():
    assert [(p.name, p.value) for p in Purpose] == [
        ("ORDER", 1),
        ("FRACTION", 2),
        ("CROP", 3),
        ("FLIP", 4),
        ("DROP_PATH", 5),
        ("MPP_POSITIONS", 6),
        ("MPP_KINDS", 7),
        ("MPP_DONORS", 8),
        ("WRITE", 9),
        ("SPLIT", 10),
        ("DROPOUT", 11),
    ]


def test_uniforms_are_uniform_and_uncorrelated():
    u = draws.uniforms(0, np.zeros(50_000, dtype=np.int64), np.arange(50_000), Purpose.CROP, 3)
    assert u.min() >= 0
    assert u.max() < 1
    assert stats.kstest(u.ravel(), "uniform").pvalue > 1e-3
    correlations = [np.corrcoef(u[:, 0], u[:, 1])[0, 1], np.corrcoef(u[:-1, 0], u[1:, 0])[0, 1]]
    assert np.abs(correlations).max() < 5 / np.sqrt(50_000)
    assert np.array_equal(u, u.astype(np.float32))  # exact in float32


@pytest.mark.parametrize(("seed", "view", "count"), [(-1, 0, 1), (2**32, 0, 1), (0, 256, 1), (0, -1, 1), (0, 0, 2**27)])
def test_words_refuse_what_does_not_fit_the_counter(seed, view, count):
    with pytest.raises(ValueError, match=r"2\^32|counter"):
        draws.words(seed, np.array([0]), np.array([0]), Purpose.CROP, count, view)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40_000), st.integers(0, 2**32 - 1), st.integers(0, 1000))
def test_permute_is_a_bijection(n, seed, visit):
    key = draws.permutation_key(seed, Purpose.ORDER, visit)
    everything = draws.permute(np.arange(n), n, key)
    assert np.array_equal(np.sort(everything), np.arange(n))
    some = np.array([n - 1, 0, n // 2])
    assert np.array_equal(draws.permute(some, n, key), everything[some])


@pytest.mark.parametrize("n", [4095, 4096, 4097, 65_536, 65_537, 13_153_500, 2**40 + 1])
def test_permute_around_powers_of_four(n):
    key = draws.permutation_key(3, Purpose.WRITE)
    images = draws.permute(np.linspace(0, n - 1, 4095).astype(np.int64), n, key)
    assert images.min() >= 0
    assert images.max() < n
    assert len(np.unique(images)) == 4095


@pytest.mark.parametrize("n", [1000, 50_000])
def test_permutations_look_random(n):
    keys = [draws.permutation_key(seed, Purpose.ORDER) for seed in range(40)]
    all_images = [draws.permute(np.arange(n), n, key) for key in keys]
    # A random permutation has one fixed point and two neighbouring pairs on average (Poisson): 40 keys, five deviations.
    fixed = sum(int((images == np.arange(n)).sum()) for images in all_images)
    neighbours = sum(int((np.abs(np.diff(images)) == 1).sum()) for images in all_images)
    assert abs(fixed - 40) < 5 * np.sqrt(40)
    assert abs(neighbours - 80) < 5 * np.sqrt(80)
    first_tenth = np.concatenate([images[: n // 10] for images in all_images])
    assert stats.kstest(first_tenth / n, "uniform").pvalue > 1e-3


def test_permute_values_never_change():
    """Runs are only repeatable while these stay."""
    key = draws.permutation_key(0, Purpose.ORDER)
    assert key.tolist() == KEY_OF_SEED_0
    assert draws.permute(np.arange(6), 10, key).tolist() == SMALL_OF_SEED_0
    assert draws.permute(np.arange(4), 1_281_167, key).tolist() == LARGE_OF_SEED_0


KEY_OF_SEED_0 = [4259200523, 4202584246, 864087110, 3637861455, 2528280204, 679636239]
SMALL_OF_SEED_0 = [6, 2, 7, 9, 8, 4]
LARGE_OF_SEED_0 = [301182, 187492, 472635, 70623]


def test_permute_refuses_wrong_input():
    key = draws.permutation_key(0, Purpose.ORDER)
    with pytest.raises(ValueError, match="6 words"):
        draws.permute(np.arange(3), 3, key[:4])
    for index in (-1, 5000):
        with pytest.raises(ValueError, match="outside"):
            draws.permute(np.array([index]), 5000, key)
