"""`vitpt pretrain`: train a recipe from scratch, or go on where the run stopped."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitpt.cli.console import result_json, result_table, say
from vitpt.cli.options import Json, Overrides

if TYPE_CHECKING:
    from vitpt.train.job import Job

Out = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="DIR", help="Folder of the run. Default: runs/NAME of the recipe.", show_default=False
    ),
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Print the plan, train nothing, write nothing. Default: train.", show_default=False),
]


def pretrain(
    recipe: Annotated[
        str,
        typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a shipped recipe.", show_default=False),
    ],
    override: Overrides = None,
    out: Out = None,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Train a recipe from scratch; the same command goes on where a run stopped."""
    from vitpt.recipe.load import load_recipe, require_model

    loaded = load_recipe(recipe, override or ())
    require_model(loaded.recipe)
    from vitpt.train.job import make_job

    run_job(make_job("pretrain", loaded.recipe, out), dry_run=dry_run, json=json)


def run_job(job: "Job", *, dry_run: bool, json: bool) -> None:
    """Train a checked job, or only print its plan."""
    from vitpt.cli.training import reporting, tell_end, tell_plan
    from vitpt.train.claim import claimed
    from vitpt.train.job import is_finished, read_summary

    if dry_run:
        from vitpt.train.budget import plan_rows

        rows = plan_rows(job)
        if json:
            result_json(dict(rows))
        else:
            result_table(None, ["plan", ""], rows)
        return
    if is_finished(job):
        say(f"{job.folder} is finished; give a new --out to train again")
        tell_end(job, read_summary(job), json)
        return
    with claimed(job.folder):
        tell_plan(job)
        from vitpt.train.fit import train

        with reporting() as report:
            summary = train(job, report)
    tell_end(job, summary, json)
