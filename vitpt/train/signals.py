"""Signals that stop a run at the next step boundary."""

import signal
from types import FrameType, TracebackType
from typing import Any, Self

from vitpt.errors import Exit

_PREEMPTING = (signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """While entered, SIGTERM, SIGUSR1 and SIGINT set a flag that the loop reads; a second SIGINT leaves at once.

    Attributes:
        received: 0, or the exit code that the signal asks for (75 preempted, 130 interrupted).
    """

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in (*_PREEMPTING, signal.SIGINT):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self.received == Exit.INTERRUPTED:
                raise KeyboardInterrupt
            self.received = Exit.INTERRUPTED
        elif not self.received:
            self.received = Exit.PREEMPTED
