"""`vitpt finetune`: train a classifier that starts from a checkpoint's backbone."""

from pathlib import Path
from typing import Annotated

import typer

from vitpt.cli.console import say
from vitpt.cli.options import Json, Overrides
from vitpt.cli.pretrain import DryRun, Out, run_job
from vitpt.errors import VitptError


def finetune(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE",
            help="A recipe file, or the name of a shipped recipe. Default: the one that the pretraining recipe names.",
            show_default=False,
        ),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="CHECKPOINT",
            help="A run, a checkpoint or a converted folder. Default: the newest pretraining run under ./runs.",
            show_default=False,
        ),
    ] = None,
    res: Annotated[
        int | None,
        typer.Option(
            "--res",
            metavar="PIXELS",
            help="Side of the images, the same as -o model.res=PIXELS. Default: the recipe's.",
            show_default=False,
        ),
    ] = None,
    override: Overrides = None,
    out: Out = None,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Fine-tune a classifier from a checkpoint; the same command goes on where a run stopped."""
    from vitpt.fsio import missing_path
    from vitpt.recipe.load import load_recipe
    from vitpt.train.runs import newest_run, recipe_of, successor_of

    overrides = [*(override or ()), *([f"model.res={res}"] if res is not None else [])]
    if source is None:
        source = newest_run(Path("runs"), "pretrain")
        if source is None:
            raise VitptError(
                "no pretraining run under ./runs to start from",
                hint="run `vitpt pretrain quickstart` first, or name a checkpoint with --from",
            )
    elif not source.exists():
        raise missing_path(source, "run, checkpoint or converted folder")
    if recipe is None:
        recipe = successor_of(source)
    say(f"fine-tuning {source} by recipe {recipe}")
    loaded = load_recipe(recipe, overrides)
    pretrained, path = recipe_of(source), loaded.recipe.data.path
    if pretrained is not None and pretrained.data.path != path:
        say(f"note: pretrained on {pretrained.data.path}, fine-tuned on {path} as the recipe says (-o data.path=DIR)")
    from vitpt.train.job import make_job, read_init

    run_job(make_job("finetune", loaded.recipe, out, read_init(source)), dry_run=dry_run, json=json)
