"""status.json: how a run stands, for people and launchers (which turn every child's exit code into 1)."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from vitpt.errors import Exit, Preempted, VitptError
from vitpt.fsio import make_folder, parse_json, write_json

_STATES = {Exit.PREEMPTED: "preempted", Exit.INTERRUPTED: "interrupted"}


class Progress(Protocol):
    """Something that knows how many steps are done."""

    step: int


@dataclass
class Status:
    """The state of a run; one process (rank 0) writes it. How many steps are done is known once the run is built."""

    folder: Path
    command: str
    writes: bool
    progress: Progress | None = None

    def write(self, state: str, exit_code: int | None = None, message: str = "") -> None:
        """Write status.json."""
        if self.writes:
            make_folder(self.folder)
            content = {
                "state": state,
                "step": None if self.progress is None else self.progress.step,
                "exit_code": exit_code,
                "message": message,
                "command": self.command,
            }
            write_json(self.folder / "status.json", {**content, "pid": os.getpid()})

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record running, then how the block ended."""
        self.write("running")
        try:
            yield
        except VitptError as error:
            self._at_end(_STATES.get(error.exit_code, "failed"), int(error.exit_code), error.message)
            raise
        except KeyboardInterrupt:
            self._at_end("interrupted", int(Exit.INTERRUPTED), "interrupted without a checkpoint of the last steps")
            raise
        except Preempted:
            self._at_end("preempted", int(Exit.PREEMPTED), "stopped by a signal outside the training loop")
            raise
        except BaseException as error:
            self._at_end("failed", int(Exit.UNEXPECTED), f"{type(error).__name__}: {error}")
            raise
        self.write("finished", int(Exit.DONE), "")

    def _at_end(self, state: str, exit_code: int, message: str) -> None:
        # the disk may be full: the error that ended the run matters more
        with suppress(OSError, VitptError):
            self.write(state, exit_code, message)


def read_status(folder: Path) -> dict[str, Any]:
    """The content of status.json, or {} when there is none that can be read."""
    try:
        content = parse_json((folder / "status.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
