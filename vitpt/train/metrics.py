"""metrics.jsonl, digests.npy and bad_samples.jsonl of a run."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from vitpt.dataset import write_array
from vitpt.errors import Exit, VitptError
from vitpt.fsio import encode_json, parse_json, write_bytes, writing

Record = dict[str, Any]


class Report(Protocol):
    """Where a run tells what it does; only rank 0's is heard."""

    def say(self, line: str) -> None:
        """One line of text."""

    def begin(self, step: int, steps: int) -> None:
        """Training starts at `step` of `steps`."""

    def advance(self, step: int) -> None:
        """`step` steps are done."""

    def record(self, record: Record) -> None:
        """One line of metrics."""


class MetricsFile:
    """metrics.jsonl: one JSON object a step that logged or evaluated, no step twice.

    Attributes:
        damaged: lines that a resume could not use, besides one cut off by a crash.
    """

    def __init__(self, path: Path, done: int) -> None:
        """Open for appending after cutting back to step `done`."""
        self.path = path
        lines = _complete_lines(path)
        records = _objects(lines, "step")
        self.damaged = len(lines) - len(records)
        write_bytes(path, b"".join(lines[index] for index, record in records.items() if record["step"] <= done))

    def append(self, record: Record) -> None:
        """Append one record; JSON has no word for a number that is not finite, so it becomes null."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        with writing(self.path), self.path.open("ab") as file:
            file.write(encode_json(finite) + b"\n")


def read_metrics(path: Path) -> list[Record]:
    """All records of a metrics.jsonl; damaged lines, such as one cut off by a crash, are left out."""
    return list(_objects(_complete_lines(path), "step").values())


def _complete_lines(path: Path) -> list[bytes]:
    with writing(path):
        if not path.exists():
            return []
        return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def _objects(lines: list[bytes], key: str) -> dict[int, Record]:
    """The lines that are JSON objects with a number under `key`, by their index."""
    found = {}
    for index, line in enumerate(lines):
        try:
            record = parse_json(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get(key), int):
            found[index] = record
    return found


class DigestsFile:
    """digests.npy: the data digest of each step, uint64, 0 where the run has not been yet (or the file was damaged)."""

    def __init__(self, path: Path, steps: int) -> None:
        with writing(path):
            if not _holds_digests(path, steps):
                write_array(path, np.zeros(steps, np.uint64))
            self.values = np.load(path, mmap_mode="r+")

    def put(self, step: int, digests: Iterable[int]) -> None:
        """Store the digests of the steps that end before `step`."""
        new = np.fromiter(digests, np.uint64)
        self.values[step - len(new) : step] = new
        self.values.flush()


def _holds_digests(path: Path, steps: int) -> bool:
    try:
        values = np.load(path, mmap_mode="r")
    except (FileNotFoundError, ValueError, EOFError):
        return False
    return bool(values.shape == (steps,) and values.dtype == np.uint64)


class BadSamples:
    """bad_samples.jsonl: every distinct sample that could not be used, and the budget for them."""

    def __init__(self, path: Path, num_samples: int, max_fraction: float) -> None:
        self.path = path
        self.allowed = math.floor(num_samples * max_fraction)
        self.num_samples = num_samples
        self.ids = {record["id"] for record in _objects(_complete_lines(path), "id").values()}

    def add(self, samples: Iterable[Record], *, write: bool) -> None:
        """Count new bad samples (the same list on all processes); one process writes them.

        Raises:
            VitptError: exit 5, the budget is spent.
        """
        new = {sample["id"]: sample for sample in samples if sample["id"] not in self.ids}
        if not new:
            return
        self.ids |= new.keys()
        if write:
            with writing(self.path), self.path.open("ab") as file:
                file.writelines(json.dumps(new[key]).encode() + b"\n" for key in sorted(new))
        if len(self.ids) > self.allowed:
            last = new[max(new)]
            raise VitptError(
                f"{len(self.ids)} of {self.num_samples} samples could not be used, {self.allowed} are allowed "
                f"(data.max_bad_fraction); the last one: {last['name']} ({last['reason']})",
                hint=f"all of them are listed in {self.path}",
                exit_code=Exit.FAILED,
            )
