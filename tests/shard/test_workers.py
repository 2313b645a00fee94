"""Tasks in processes, some of which die."""

import multiprocessing
import os
import signal
import time
from contextlib import closing
from pathlib import Path

import pytest

from vitpt.errors import Exit, VitptError
from vitpt.shard.workers import check_stop, run_all

Task = tuple[str, int]


def work(task: Task) -> int:
    kind, value = task
    if kind == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif kind == "exit":
        os._exit(3)
    elif kind == "error":
        raise VitptError("this went wrong", hint="mend it", exit_code=Exit.DATA)
    elif kind == "long":
        while True:
            check_stop()
            time.sleep(0.01)
    return value * value


def died(task: Task) -> int:
    return -task[1]


def die_once(task: tuple[Path, int]) -> int:
    """Dies the first time that it is run, as under a memory shortage."""
    marker, value = task
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return value


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_dead_process_costs_its_own_task_only(jobs: int) -> None:
    kinds = {3: "segv", 4: "segv", 9: "exit", 19: "segv"}
    tasks = [(kinds.get(i, "square"), i) for i in range(20)]
    with closing(run_all(work, tasks, jobs, died)) as finished:
        results = dict(finished)
    assert results == {i: -i if i in kinds else i * i for i in range(20)}
    assert not multiprocessing.active_children()


def test_a_task_that_dies_by_accident_is_run_again(tmp_path: Path) -> None:
    tasks = [(tmp_path / "marker", i) for i in range(3)]
    with closing(run_all(die_once, tasks, 2, lambda task: -1)) as finished:
        assert dict(finished) == {0: 0, 1: 1, 2: 2}


def test_an_error_reaches_the_caller_whole() -> None:
    with closing(run_all(work, [("square", 2), ("error", 0)], 1, died)) as finished:
        assert next(finished) == (0, 4)
        with pytest.raises(VitptError) as raised:
            next(finished)
    assert (raised.value.message, raised.value.hint, raised.value.exit_code) == (
        "this went wrong",
        "mend it",
        Exit.DATA,
    )
    assert not multiprocessing.active_children()


def test_closing_early_ends_long_tasks() -> None:
    with closing(run_all(work, [("square", 1), *[("long", i) for i in range(5)]], 2, died)) as finished:
        assert next(finished) == (0, 1)
        began = time.monotonic()
    assert time.monotonic() - began < 30
    assert not multiprocessing.active_children()


def test_no_task() -> None:
    assert list(run_all(work, [], 2, died)) == []
