"""`vitpt data`: what is in the shards, and which of it a run consumes when."""

from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitpt.cli.console import progress, result_json, result_table, say
from vitpt.cli.options import Json, Overrides
from vitpt.errors import VitptError

if TYPE_CHECKING:
    from vitpt.recipe.schema import Recipe
    from vitpt.stream.plan import Plan, Planner

_SHOWN_DRAWS = 6  # values of a draw that the table shows


def stream(
    recipe: Annotated[
        str,
        typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a shipped recipe.", show_default=False),
    ],
    override: Overrides = None,
    steps: Annotated[
        str,
        typer.Option(
            "--steps", metavar="A:B", help="Steps A to B - 1, counted from 0. Default: 0:10.", show_default=False
        ),
    ] = "0:10",
    samples: Annotated[
        bool,
        typer.Option(
            "--samples",
            help="List every sample: id, visit, box, flip, draws. Default: one line a step.",
            show_default=False,
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Recompute which data a run consumes in each step, without reading images.

    The digests are those of the run's digests.npy, whatever its number of processes was.
    """
    first, last = _step_range(steps)
    from vitpt.recipe.load import load_recipe, require_model

    loaded = load_recipe(recipe, override or ()).recipe
    require_model(loaded)
    planner = _planner(loaded)
    from vitpt.stream.digest import MODULUS, digest

    totals: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    with progress(last - first, "recomputing", "steps") as bar:
        for step in range(first, last):
            plans = [planner.plan(step, micro) for micro in range(planner.slots.micros)]
            total = sum(digest(plan) for plan in plans) % MODULUS
            totals.append({"step": step, "samples": planner.slots.batch, "digest": f"{total:016x}"})
            if samples:
                rows += [row for plan in plans for row in _sample_rows(step, plan)]
            bar.advance()
    if json:
        about = {
            "recipe": loaded.name,
            "seed": loaded.seed,
            "split": planner.split.name,
            "split_id": planner.split.split_id,
            "num_samples": planner.order.num_samples,
        }
        result_json(about | {"steps": totals} | ({"samples": rows} if samples else {}))
    elif samples:
        columns = ["step", "position", "id", "visit", "box", "flip", "draws"]
        result_table(None, columns, [[_shown(row[column]) for column in columns] for row in rows])
    else:
        result_table(None, ["step", "samples", "digest"], [list(total.values()) for total in totals])
    say(f"next: vitpt pretrain {quote(recipe)} --dry-run")


def _step_range(text: str) -> tuple[int, int]:
    """(A, B) of `A:B`."""
    first, colon, last = text.partition(":")
    from vitpt.recipe.schema import MAX_STEPS

    if not (colon and first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise VitptError(f"--steps {text}: expected A:B with A < B, such as 0:10")
    if int(last) > MAX_STEPS:
        raise VitptError(f"--steps {text}: a run has at most {MAX_STEPS:,} steps")
    return int(first), int(last)


def _planner(recipe: "Recipe") -> "Planner":
    """The planner of the recipe's training run, as one process would see it."""
    import torch

    from vitpt.dataset import open_dataset
    from vitpt.models.variants import config_from
    from vitpt.objectives import build_task
    from vitpt.stream.order import make_slots
    from vitpt.stream.plan import training_planner

    dataset = open_dataset(recipe.data.path)
    config = config_from(recipe.model)
    with torch.device("meta"):  # only its draws are wanted: no weights
        task = build_task(config, recipe.objective, max(1, len(dataset.classes)))
    slots = make_slots(recipe.train.global_batch_size, 1, 1024)
    split = dataset.split(recipe.data.split)
    return training_planner(recipe.data, recipe.model.res, recipe.seed, split, slots, 0, task.draws)


def _sample_rows(step: int, plan: "Plan") -> list[dict[str, Any]]:
    """One record a sample."""
    view = plan.views[0]
    return [
        {
            "step": step,
            "position": int(plan.positions[i]),
            "id": int(plan.ids[i]),
            "visit": int(plan.visits[i]),
            "box": view.box[i].tolist(),
            "flip": int(view.flip[i]),
            "draws": {name: values[i].tolist() for name, values in plan.draws.items()},
        }
        for i in range(len(plan.ids))
        if plan.ids[i] >= 0
    ]


def _shown(value: Any) -> Any:
    """A cell of the table: lists by their first values."""
    if isinstance(value, dict):
        return "  ".join(f"{name} {_shown(values)}" for name, values in value.items())
    if isinstance(value, list):
        more = f" ... {len(value)}" if len(value) > _SHOWN_DRAWS else ""
        return " ".join(map(str, value[:_SHOWN_DRAWS])) + more
    return value
