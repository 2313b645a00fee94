"""Work in separate processes, so that a file which ends its decoder's process costs one sample and not the job."""

import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait as wait_for_handles
from multiprocessing.synchronize import Event
from typing import TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")

_stop: Event | None = None


class StoppedError(Exception):
    """The parent asked this process to leave its task."""


def check_stop() -> None:
    """Leave the current task if the parent is stopping; called between files.

    Raises:
        StoppedError: it is.
    """
    if _stop is not None and _stop.is_set():
        raise StoppedError


def run_all(
    function: Callable[[Task], Result],
    tasks: Sequence[Task],
    jobs: int,
    on_death: Callable[[Task], Result],
) -> Generator[tuple[int, Result], None, None]:
    """Run `function` on every task in `jobs` processes; yields (index, result) in the order they finish.

    When a process dies, every task that was running is run again alone in a fresh process; one that kills its process again gets
    the result of `on_death`. Closing the iterator ends all processes: wrap it in `contextlib.closing`.
    """
    waiting = list(range(len(tasks)))[::-1]
    while waiting:
        suspects: list[int] = []
        yield from _run_until_death(function, tasks, waiting, jobs, suspects)
        for index in suspects:
            died: list[int] = []
            yield from _run_until_death(function, tasks, [index], 1, died)
            if died:
                yield index, on_death(tasks[index])


def _run_until_death(
    function: Callable[[Task], Result], tasks: Sequence[Task], waiting: list[int], jobs: int, suspects: list[int]
) -> Generator[tuple[int, Result], None, None]:
    """Work `waiting` off from its end; stops at the first dead process with the unfinished tasks in `suspects`."""
    context = multiprocessing.get_context("spawn")  # fork is unsafe with threads; spawn is the same everywhere
    stop = context.Event()
    pool = ProcessPoolExecutor(min(jobs, len(waiting)), context, _initialise, (stop,))
    running: dict[Future[Result], int] = {}
    try:
        while running or waiting:
            while waiting and len(running) < 2 * jobs:
                index = waiting.pop()
                running[_submit(pool, function, tasks[index])] = index
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            broken = False
            for future in done:
                if isinstance(future.exception(), BrokenProcessPool):
                    broken = True
                else:
                    yield running.pop(future), future.result()
            if broken:
                # what finished in the meantime is simply done again
                suspects += sorted(running.values())
                return
    except BrokenProcessPool:  # raised by submit: the process died between two rounds
        suspects += sorted([*running.values(), index])
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, function: Callable[[Task], Result], task: Task) -> "Future[Result]":
    # A process started here inherits the blocked signal: Ctrl-C reaches the parent alone, which then stops its children.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(function, task)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _initialise(stop: Event) -> None:
    global _stop
    _stop = stop
    warnings.simplefilter("ignore")  # of broken metadata: what matters is in the outcome
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    """End this process when its parent dies without a word (kill -9), where it would wait for tasks for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait_for_handles([parent.sentinel])
        os._exit(1)
