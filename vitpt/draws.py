"""Every random number that decides data: Philox4x32-10 in numpy, keyed by what the number is for.

A draw belongs to a sample and a visit, not to a process or a moment: any rank, thread or restart that asks for it gets the same
number. Nothing here depends on the CPU's libm or on how a sort orders equal keys.
"""

from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.integer]
Words = npt.NDArray[np.uint32]

ROUND_KEYS = 6
"""Words of a permutation's key: one a Feistel round. Fewer than four rounds leave patterns; six have a margin."""

_SMALL = 4096  # below this a permutation is a sort of hashes: small Feistel blocks are hard to trust
_LOW_32 = np.uint64(0xFFFFFFFF)
_SHIFT_32 = np.uint64(32)
_CHUNK = 8192  # counters worked on at once: the round's arrays then stay in the cache


class Purpose(IntEnum):
    """What a draw is for. Numbers are part of the recipe's meaning: never renumbered, never reused."""

    ORDER = 1  # order of the samples in a pass
    FRACTION = 2  # which samples a fraction of the data takes
    CROP = 3
    FLIP = 4
    DROP_PATH = 5
    MPP_POSITIONS = 6  # which patches are corrupted
    MPP_KINDS = 7  # how a patch is corrupted
    MPP_DONORS = 8  # which patch replaces it
    WRITE = 9  # order of the samples in training shards
    SPLIT = 10  # which samples become the validation split
    DROPOUT = 11  # seed of element dropout, per step, rank and micro-batch


def philox(counter: IntArray, key: Sequence[int] | IntArray) -> Words:
    """Philox4x32-10 of each counter under one key.

    Shapes: counter (n, 4), key (2,), both in [0, 2^32); returns (n, 4) uint32.
    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), section 3.3 and table 2.
    """
    columns = [np.ascontiguousarray(counter[:, i], dtype=np.uint64) for i in range(4)]
    return np.stack(_philox_rounds(columns, int(key[0]), int(key[1])), axis=1).astype(np.uint32)


def _philox_rounds(
    columns: list[npt.NDArray[np.uint64]], key_low: int, key_high: int
) -> tuple[npt.NDArray[np.uint64], ...]:
    """Ten rounds on four columns of 32-bit words kept in 64 bits, so that a product's high half is a shift away."""
    c0, c1, c2, c3 = columns
    for i in range(10):
        # The key is bumped by the golden ratio and sqrt(3) - 1 each round.
        k0 = np.uint64((key_low + i * 0x9E3779B9) & 0xFFFFFFFF)
        k1 = np.uint64((key_high + i * 0xBB67AE85) & 0xFFFFFFFF)
        p0 = c0 * np.uint64(0xD2511F53)
        p1 = c2 * np.uint64(0xCD9E8D57)
        c0 = p1 >> _SHIFT_32
        c0 ^= c1
        c0 ^= k0
        c2 = p0 >> _SHIFT_32
        c2 ^= c3
        c2 ^= k1
        p1 &= _LOW_32
        p0 &= _LOW_32
        c1, c3 = p1, p0
    return c0, c1, c2, c3


def words(seed: int, visits: IntArray, ids: IntArray, purpose: Purpose, count: int, view: int = 0) -> Words:
    """`count` random 32-bit words for each sample and visit.

    The key is (seed, purpose), the counter (id low, id high, visit, view << 24 | block): a word depends on nothing else.

    Shapes: visits (n,), ids (n,) int64; returns (n, count) uint32.

    Raises:
        ValueError: the seed has more than 32 bits, or view or count do not fit the counter.
    """
    if not 0 <= seed < 1 << 32:
        raise ValueError(f"seed {seed} is not in [0, 2^32)")
    blocks = -(-count // 4)
    if not (0 <= view < 256 and 0 <= blocks <= 1 << 24):
        raise ValueError(f"view {view} and count {count} do not fit the counter")
    samples = np.asarray(ids).astype(np.int64, copy=False).view(np.uint64)
    passes = np.asarray(visits).astype(np.uint64)
    block_words = np.arange(blocks, dtype=np.uint64) | np.uint64(view << 24)
    out = np.empty((len(samples), blocks, 4), dtype=np.uint32)
    rows = max(1, _CHUNK // max(1, blocks))
    for start in range(0, len(samples), rows):
        part = slice(start, start + rows)
        # (rows, blocks), written out so that every column of the counter is contiguous
        shape = out[part].shape[:2]
        low = np.broadcast_to((samples[part] & _LOW_32)[:, None], shape)
        high = np.broadcast_to((samples[part] >> _SHIFT_32)[:, None], shape)
        visit = np.broadcast_to((passes[part] & _LOW_32)[:, None], shape)
        block = np.broadcast_to(block_words, shape)
        for i, column in enumerate(_philox_rounds([low, high, visit, block], seed, int(purpose))):
            out[part, :, i] = column
    return out.reshape(len(samples), blocks * 4)[:, :count]


def uniforms(
    seed: int, visits: IntArray, ids: IntArray, purpose: Purpose, count: int, view: int = 0
) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1): `words`, the upper 24 bits of each, times 2^-24 (exact in float32 too).

    Shapes: as `words`; returns (n, count) float64.
    """
    upper = words(seed, visits, ids, purpose, count, view) >> np.uint32(8)
    scaled: npt.NDArray[np.float64] = upper * np.float64(2.0**-24)
    return scaled


def permutation_key(seed: int, purpose: Purpose, visit: int = 0) -> Words:
    """The key of one permutation: (6,) uint32. `visit` tells the passes over the data apart."""
    key: Words = words(seed, np.array([visit]), np.array([0]), purpose, ROUND_KEYS)[0]
    return key


def permute(index: IntArray, n: int, key: Sequence[int] | IntArray) -> npt.NDArray[np.int64]:
    """Where a keyed permutation of [0, n) sends each index.

    No table: six Feistel rounds on the smallest even number of bits that holds n, applied again while the result is n or more
    (cycle walking). Below 4,096 a sort of hashes.

    Shapes: index (m,), values in [0, n); key (6,), words of `permutation_key`; returns (m,) int64.

    Raises:
        ValueError: the key has not six words, or an index is outside [0, n).
    """
    if len(key) != ROUND_KEYS:
        raise ValueError(f"a permutation's key has {ROUND_KEYS} words, not {len(key)}")
    values = np.asarray(index).astype(np.int64, copy=False)
    if len(values) and (values.min() < 0 or values.max() >= n):
        raise ValueError(f"an index is outside [0, {n})")
    round_keys = tuple(int(word) for word in key)
    if n < _SMALL:
        return _small_permutation(n, round_keys)[values]
    half = (int(n - 1).bit_length() + 1) // 2
    out = _feistel(values, half, round_keys)
    walking = np.flatnonzero(out >= n)
    while len(walking):
        moved = _feistel(out[walking], half, round_keys)
        out[walking] = moved
        walking = walking[moved >= n]
    return out


@lru_cache(maxsize=64)
def _small_permutation(n: int, key: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """The whole permutation of [0, n), n < 4096: indices sorted by a hash whose low bits are the index, so no two are equal."""
    counter = np.zeros((n, 4), dtype=np.uint64)
    counter[:, 0] = np.arange(n)
    counter[:, 1:] = key[2:5]
    hashes = philox(counter, key[:2]).astype(np.uint64)
    sortable = (hashes[:, 0] << _SHIFT_32 | hashes[:, 1]) & np.uint64(2**64 - _SMALL) | counter[:, 0]
    table = (np.sort(sortable) & np.uint64(_SMALL - 1)).astype(np.int64)
    table.setflags(write=False)
    return table


def _feistel(values: npt.NDArray[np.int64], half: int, key: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """A keyed bijection of [0, 4^half)."""
    mask = np.uint32((1 << half) - 1)
    left = (values >> half).astype(np.uint32)
    right = (values & int(mask)).astype(np.uint32)
    for word in key:
        mixed = _mix(right ^ np.uint32(word))
        mixed &= mask
        mixed ^= left
        left, right = right, mixed
    return left.astype(np.int64) << half | right.astype(np.int64)


def _mix(x: Words) -> Words:
    """A bijection of 32 bits in which every input bit moves about half of the output bits. Works in place."""
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return x
