"""The one exception a user may see, and the table of exit codes."""

from enum import IntEnum


class Exit(IntEnum):
    """Exit status of every command."""

    DONE = 0
    UNEXPECTED = 1  # a bug: traceback
    USAGE = 2  # usage, recipe or path wrong: nothing was started
    DATA = 3  # data missing, damaged or refused
    ENVIRONMENT = 4  # no decoder, disk full, no memory
    FAILED = 5  # diverged, or the budget of bad samples is spent
    PREEMPTED = 75  # saved: run the same command again (EX_TEMPFAIL of sysexits.h)
    INTERRUPTED = 130  # Ctrl-C
    PIPE_CLOSED = 141  # whoever read the output went away (128 + SIGPIPE, as in a shell)


class Preempted(BaseException):
    """SIGTERM or SIGUSR1 came where nothing has to be saved: like KeyboardInterrupt, only files are put in order."""


class VitptError(Exception):
    """A failure that the command line reports without a traceback.

    Args:
        message: what was found, where (file:line or key), and what was expected.
        hint: what to do next, if there is something to do.
        exit_code: exit status of the command.
    """

    def __init__(self, message: str, *, hint: str | None = None, exit_code: Exit = Exit.USAGE) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message
