"""Runs on disk: which there are, and what they say of themselves."""

from pathlib import Path

from vitpt.errors import VitptError
from vitpt.recipe.load import load_recipe
from vitpt.recipe.schema import Recipe
from vitpt.train.status import read_status


def run_of(path: Path) -> Path | None:
    """The run that a path is, or that a checkpoint folder lies in."""
    for folder in (path, path.parent, path.parent.parent):
        if (folder / "recipe.yaml").is_file() and (folder / "data.json").is_file():
            return folder
    return None


def recipe_of(path: Path) -> Recipe | None:
    """The resolved recipe of the run that a path belongs to."""
    folder = run_of(path)
    return load_recipe(folder / "recipe.yaml").recipe if folder else None


def newest_run(root: Path, command: str | None = None, *, classifier: bool = False) -> Path | None:
    """The run under `root` that was active last and has a checkpoint.

    Args:
        root: folder that holds runs.
        command: only runs of `pretrain` or `finetune`.
        classifier: only runs whose objective has classes.
    """
    found = []
    for status in root.glob("*/status.json"):
        folder = status.parent
        if command is not None and read_status(folder).get("command") != command:
            continue
        if not any(folder.glob("checkpoints/step-*/config.json")):
            continue
        if classifier and (recipe := recipe_of(folder)) is not None and recipe.objective.kind != "supervised":
            continue
        found.append((status.stat().st_mtime_ns, folder))
    return max(found)[1] if found else None


def successor_of(source: Path) -> str:
    """The fine-tuning recipe that the run of a checkpoint names.

    Raises:
        VitptError: it names none.
    """
    recipe = recipe_of(source)
    if recipe is None or recipe.finetune is None:
        why = (
            "belongs to no run"
            if recipe is None
            else f"was trained by {recipe.name!r}, which names no `finetune:` recipe"
        )
        raise VitptError(
            f"RECIPE is needed: {source} {why}",
            hint="for example: vitpt finetune finetune_in1k_384 --from " + str(source),
        )
    return recipe.finetune
