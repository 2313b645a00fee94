"""`vitpt convert`: models from and to timm folders and Google's `.npz` files."""

from enum import StrEnum
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from vitpt.cli.console import result_json, result_table, say
from vitpt.cli.options import Json


class Target(StrEnum):
    """Formats that can be written."""

    TIMM = "timm"
    GOOGLE = "google"
    NATIVE = "native"


def convert(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SRC", help="A run, a checkpoint folder, a timm folder or a Google .npz file.", show_default=False
        ),
    ],
    destination: Annotated[
        Path,
        typer.Argument(
            metavar="DST", help="What to write: a new folder, or a new .npz file for google.", show_default=False
        ),
    ],
    to: Annotated[Target, typer.Option("--to", help="Format to write. Required.", show_default=False)],
    drop_head: Annotated[
        bool,
        typer.Option(
            "--drop-head",
            help="Write the backbone without its classification head. Default: with it.",
            show_default=False,
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Convert a model to another format, checked by its own outputs."""
    from vitpt.convert import convert as run

    done = run(source, destination, to.value, drop_head=drop_head)
    say(f"read {done.source} ({done.source_format})")
    for note in done.notes:
        say(f"note: {note}")
    if json:
        result_json(
            {
                "source": str(done.source),
                "source_format": done.source_format,
                "destination": str(destination),
                "format": to.value,
                "parameters": done.parameters,
                "num_classes": done.num_classes,
                "largest_difference": done.difference,
                "notes": done.notes,
            }
        )
    else:
        columns = ["written", "format", "parameters", "classes", "largest difference"]
        row = [str(destination), to.value, done.parameters, done.num_classes or None, done.difference]
        result_table(None, columns, [row])
    say(f"next: {_next(destination, to, bool(done.num_classes))}")


def _next(destination: Path, to: Target, has_head: bool) -> str:
    """Name the command that uses what was written."""
    if to is Target.TIMM:
        name = f"local-dir:{destination}".replace("\\", r"\\").replace('"', r"\"")
        code = f'import timm; timm.create_model("{name}", pretrained=True)'
        return f"python -c {quote(code)}"
    written = quote(str(destination))
    if to is Target.GOOGLE:
        return f"vitpt convert {written} {quote(str(destination.with_suffix('')))} --to native"
    return f"vitpt eval {written} --data DIR" if has_head else f"vitpt finetune RECIPE --from {written}"
