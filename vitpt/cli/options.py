"""Options that several commands share. What they mean is said here once."""

from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--override",
        "-o",
        metavar="KEY=VALUE",
        help="Change one recipe value, such as -o optim.lr=1e-3; may be repeated, of two for one key the later counts. Default: none.",
        show_default=False,
    ),
]

Json = Annotated[
    bool,
    typer.Option(
        "--json", help="Print the result as one JSON document on stdout. Default: a table.", show_default=False
    ),
]
