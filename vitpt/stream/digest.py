"""One 64-bit number that says which samples were consumed, and how they were cut, flipped and drawn.

Each sample's integers are hashed; the digest of any set of samples is the sum of their hashes mod 2^64. So the digest of a step
is the same for every number of ranks, micro-batch size and order of summation.
"""

import hashlib
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from vitpt.draws import philox
from vitpt.stream.plan import Plan

UInt64 = npt.NDArray[np.uint64]

MODULUS = 1 << 64


def digest(plan: Plan) -> int:
    """The digest of a plan's samples, in [0, 2^64); empty slots do not count.

    Covers id, visit, each view's box and flip, and every draw; a field counts under its name.

    Raises:
        TypeError: a draw is not an integer array.
    """
    fields: dict[str, npt.NDArray[np.integer]] = {"id": plan.ids, "visit": plan.visits}
    for i, view in enumerate(plan.views):
        fields[f"view{i}.box"] = view.box
        fields[f"view{i}.flip"] = view.flip
    fields.update({f"draws.{name}": values for name, values in plan.draws.items()})
    hashes = row_hashes(fields)
    return int(np.sum(hashes[plan.ids >= 0], dtype=np.uint64))


def row_hashes(fields: dict[str, npt.NDArray[np.integer]]) -> UInt64:
    """A 64-bit hash of each row of named integer arrays: the sum of value times an odd constant of its column, then mixed.

    The order of the fields does not matter, their names and values do; their integer types do not.

    Shapes: each field (n, ...); returns (n,) uint64.

    Raises:
        TypeError: a field is not an integer array.
    """
    total: UInt64 | None = None
    for name, values in fields.items():
        if values.dtype.kind not in "iu":
            raise TypeError(f"field {name!r} is {values.dtype}: only integers are hashed")
        columns = values.reshape(len(values), -1)
        constants, own = _constants(name, columns.shape[1])
        # Multiplication and addition wrap mod 2^64; negative numbers count as 2^64 minus their size.
        part = np.einsum("ij,j->i", columns.astype(np.int64).view(np.uint64), constants)
        part += own
        total = part if total is None else total + part
    return np.zeros(0, np.uint64) if total is None else _mixed(total)


@lru_cache(maxsize=256)
def _constants(name: str, columns: int) -> tuple[UInt64, np.uint64]:
    """Odd constants of a field's columns, and one for the field itself."""
    key = np.frombuffer(hashlib.sha256(name.encode()).digest()[:8], dtype="<u4")
    counter = np.zeros((columns + 1, 4), dtype=np.uint64)
    counter[:, 0] = np.arange(columns + 1)
    high, low = philox(counter, key)[:, :2].astype(np.uint64).T
    numbers = high << np.uint64(32) | low | np.uint64(1)
    numbers.setflags(write=False)
    return numbers[1:], numbers[0]


def _mixed(x: UInt64) -> UInt64:
    """A bijection of 64 bits in which every input bit moves about half of the output bits."""
    x ^= x >> np.uint64(32)
    x *= np.uint64(0xD6E8FEB86659FD93)
    x ^= x >> np.uint64(32)
    x *= np.uint64(0xD6E8FEB86659FD93)
    x ^= x >> np.uint64(32)
    return x
