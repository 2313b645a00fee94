"""What a person and a script see: messages and progress on stderr, results on stdout.

Only rank 0 speaks. Control characters are written only to a terminal. Rich is imported only where a terminal needs it.
"""

import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TextIO

PLAIN_INTERVAL_S = 10.0  # least time between two progress lines in a log file
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def speaks() -> bool:
    """Whether this process prints: the only one, or rank 0 of a launcher's."""
    return os.environ.get("RANK", "0") in ("", "0")


def escape_name(text: str) -> str:
    r"""Make a file name or other foreign text safe to print: control characters become `\x1b` or `\u202e`."""

    def escaped(match: re.Match[str]) -> str:
        code = ord(match[0])
        return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"

    return _CONTROL.sub(escaped, text)


def write_line(stream: TextIO, text: str) -> None:
    """Write text and a newline at once, so that lines of several processes do not mix.

    A message that nobody can read any more (a terminal hung up, a pipe closed, a log's disk full) must not end the work it tells of:
    then stderr stays silent. A result that cannot be written is an error.
    """
    try:
        stream.write(f"{text}\n")
        stream.flush()
    except OSError:
        if stream is not sys.stderr:
            raise
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115


def say(line: str) -> None:
    """Print one line on stderr."""
    if speaks():
        write_line(sys.stderr, escape_name(line))


def result_json(obj: Any) -> None:
    """Print one JSON document on stdout; a number that is not finite becomes null."""
    if speaks():
        write_line(sys.stdout, json.dumps(_finite(obj), indent=2, ensure_ascii=False, allow_nan=False))


def _finite(obj: Any) -> Any:
    if isinstance(obj, dict):
        return {str(key): _finite(value) for key, value in obj.items()}
    if isinstance(obj, list | tuple):
        return [_finite(value) for value in obj]
    return None if isinstance(obj, float) and not math.isfinite(obj) else obj


def result_text(text: str) -> None:
    """Print text on stdout as it is: for results that are themselves a file's content."""
    if speaks():
        write_line(sys.stdout, text.removesuffix("\n"))


def result_table(title: str | None, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table on stdout: boxed by Rich on a terminal, elsewhere aligned text that no width cuts.

    Args:
        title: a line above the table, or None.
        columns: headings.
        rows: one cell a column; floats are shown with 6 significant digits, None as an empty cell.
    """
    if not speaks():
        return
    cells = [[_cell(value) for value in row] for row in rows]
    numeric = [bool(rows) and all(isinstance(row[i], int | float | None) for row in rows) for i in range(len(columns))]
    if is_terminal(sys.stdout):
        _rich_table(title, columns, cells, numeric)
        return
    widths = [max(len(line[i]) for line in [list(columns), *cells]) for i in range(len(columns))]
    lines = [title] if title else []
    for line in [list(columns), *cells]:
        padded = [
            cell.rjust(w) if right else cell.ljust(w) for cell, w, right in zip(line, widths, numeric, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    write_line(sys.stdout, "\n".join(lines))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else escape_name(str(value))


def _rich_table(
    title: str | None, columns: Sequence[str], cells: Sequence[Sequence[str]], numeric: Sequence[bool]
) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title) if title else None, title_justify="left", box=SIMPLE_HEAD)
    for column, right in zip(columns, numeric, strict=True):
        table.add_column(Text(column), justify="right" if right else "left", overflow="fold")
    for line in cells:
        table.add_row(*map(Text, line))
    Console().print(table)


def is_terminal(stream: TextIO) -> bool:
    """Whether a stream is a terminal that understands cursor movement."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


class Progress(Protocol):
    """What `progress` yields."""

    def advance(self, n: int = 1, **fields: Any) -> None:
        """Count `n` more; `fields` are shown behind the rate until they are given again."""


class _Counter:
    """Counts and says how far, how fast and how long still."""

    def __init__(self, total: int | None, description: str, unit: str, start: int) -> None:
        self.total = total
        self.description = escape_name(description)
        self.unit = unit
        self.start = start
        self.done = start
        self.fields: dict[str, Any] = {}
        self.began = time.monotonic()

    def advance(self, n: int = 1, **fields: Any) -> None:
        self.done += n
        self.fields |= fields

    def status(self) -> str:
        elapsed = max(time.monotonic() - self.began, 1e-9)
        rate = (self.done - self.start) / elapsed
        count = f"{self.done:,}" if self.total is None else f"{self.done:,}/{self.total:,}"
        parts = [f"{count} {self.unit}"]
        if self.done > self.start:
            parts.append(f"{rate:.3g} {self.unit}/s" if rate < 1000 else f"{rate:,.0f} {self.unit}/s")
            if self.total is not None and self.done < self.total:
                parts.append(f"{_duration((self.total - self.done) / rate)} left")
        if self.total is None or self.done >= self.total:
            parts.append(f"{_duration(elapsed)} taken")
        parts += [f"{name} {_cell(value)}" for name, value in self.fields.items()]
        return ", ".join(parts)


def _duration(seconds: float) -> str:
    """Show 75.2 as `1:15`, 3675 as `1:01:15`."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


class _PlainLines(_Counter):
    """Progress for a log file: a line now and then, and one at the end."""

    def __init__(self, total: int | None, description: str, unit: str, start: int) -> None:
        super().__init__(total, description, unit, start)
        self.said = self.began
        self.said_done: int | None = None

    def advance(self, n: int = 1, **fields: Any) -> None:
        super().advance(n, **fields)
        if time.monotonic() - self.said >= PLAIN_INTERVAL_S:
            self.said = time.monotonic()
            self.say()

    def say(self) -> None:
        if self.done != self.said_done:
            say(f"{self.description}: {self.status()}")
        self.said_done = self.done


@contextmanager
def progress(
    total: int | None, description: str, unit: str, *, start: int = 0, plain: bool = True
) -> Iterator[Progress]:
    """Show progress on stderr: a bar on a terminal, elsewhere a plain line at most every 10 s and one at the end.

    Lines given to `say` meanwhile appear above the bar.

    Args:
        total: units of the whole work; None when it is not known.
        description: what is being done.
        unit: what is counted, in the plural, such as `images`.
        start: units already done earlier; they do not count for the rate.
        plain: False prints nothing where there is no terminal, for commands that print lines of their own.
    """
    if speaks() and is_terminal(sys.stderr):
        with _bar(total, description, unit, start) as bar:
            yield bar
        return
    if not (speaks() and plain):
        yield _Counter(total, description, unit, start)
        return
    lines = _PlainLines(total, description, unit, start)
    yield lines
    lines.say()


@contextmanager
def _bar(total: int | None, description: str, unit: str, start: int) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[status]}", markup=False),
    )
    # Rich moves what is printed to stderr meanwhile above the bar; stdout is for results and stays as it is.
    with RichProgress(*columns, console=Console(stderr=True), redirect_stdout=False) as rich:

        class Bar(_Counter):
            def advance(self, n: int = 1, **fields: Any) -> None:
                super().advance(n, **fields)
                rich.update(task, completed=self.done, status=self.status())

        bar = Bar(total, description, unit, start)
        task = rich.add_task(bar.description, total=total, completed=start, status=bar.status())
        yield bar
