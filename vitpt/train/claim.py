"""One launch a run folder: a second one would tear the first one's files apart."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vitpt.fsio import locked

LOCK = ".lock"


def first_process() -> bool:
    """Whether this process is the only one, or the first of a launcher's."""
    return os.environ.get("RANK", "0") in ("", "0")


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Keep other launches out of a run's folder while inside; the first process of a launch does it for all.

    Raises:
        VitptError: another launch trains into the folder, or it cannot be made (exit 2 or 4).
    """
    if not first_process():
        yield
        return
    with locked(folder / LOCK, f"{folder}: another run is training into this folder"):
        yield
