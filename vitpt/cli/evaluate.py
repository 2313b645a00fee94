"""`vitpt eval`: top-1, top-5 and loss of a classifier, every sample counted once."""

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from vitpt.cli.console import progress, result_json, result_table, say
from vitpt.cli.options import Json
from vitpt.errors import VitptError


def evaluate(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A run, a checkpoint or a converted folder. Default: the newest run under ./runs with a classification head.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="DIR", help="Shards to evaluate on. Default: the run's.", show_default=False),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option("--split", metavar="NAME", help="Split to evaluate on. Default: val.", show_default=False),
    ] = None,
    batch: Annotated[
        int,
        typer.Option(
            "--batch", min=1, metavar="IMAGES", help="Images a process runs at once. Default: 64.", show_default=False
        ),
    ] = 64,
    decoder: Annotated[
        str,
        typer.Option(
            "--decoder", metavar="NAME", help="auto, dali_gpu, dali_cpu or cpu. Default: auto.", show_default=False
        ),
    ] = "auto",
    json: Json = False,
) -> None:
    """Evaluate a classifier."""
    from vitpt.fsio import missing_path
    from vitpt.train.runs import newest_run, recipe_of

    if checkpoint is None:
        checkpoint = newest_run(Path("runs"), classifier=True)
        if checkpoint is None:
            raise VitptError(
                "no run with a classification head under ./runs to evaluate",
                hint="run `vitpt finetune` first, or name a checkpoint",
            )
    elif not checkpoint.exists():
        raise missing_path(checkpoint, "run, checkpoint or converted folder")
    recipe = recipe_of(checkpoint)
    path = data or (recipe.data.path if recipe else None)
    if path is None:
        raise VitptError(
            f"--data is needed: {checkpoint} belongs to no run", hint="name the folder of shards to evaluate on"
        )
    wanted = split or (recipe.eval.split if recipe and recipe.eval and data is None else "val")
    from vitpt.evaluate.standalone import evaluate_checkpoint

    with progress(None, "evaluating", "batches") as bar:
        result = evaluate_checkpoint(
            checkpoint, path, wanted, batch=batch, decoder=decoder, say=say, advance=lambda: bar.advance(1)
        )
    if json:
        result_json(result)
        return
    shown = ("checkpoint", "data", "split", "samples", "unlabelled", "bad", "top1", "top5", "loss")
    result_table(None, ["", "value"], [(key, result[key]) for key in shown if key in result])
    say(f"next: vitpt convert {quote(str(checkpoint))} {quote(checkpoint.resolve().name)}-timm --to timm")
