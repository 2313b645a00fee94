"""`vitpt recipe`: list, show and check recipes, and the JSON Schema for editors."""

import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitpt.cli.console import result_json, result_table, result_text, say
from vitpt.cli.options import Json, Overrides
from vitpt.errors import Exit, VitptError

if TYPE_CHECKING:
    from vitpt.recipe.schema import Recipe


def list_recipes(json: Json = False) -> None:
    """List the shipped recipes."""
    from vitpt.recipe.load import load_recipe, shipped_recipes

    rows = []
    for name, path in shipped_recipes().items():
        loaded = load_recipe(path)
        recipe = loaded.recipe
        rows.append(
            {
                "name": name,
                "purpose": _purpose(loaded.text),
                "objective": recipe.objective.kind,
                "model": model_summary(recipe),
            }
        )
    if json:
        result_json(rows)
        return
    columns = ["name", "purpose", "objective", "model"]
    result_table(None, columns, [[row[column] for column in columns] for row in rows])
    say("next: vitpt recipe show NAME")


def _purpose(text: str) -> str:
    """Return the first comment line of a recipe."""
    first = text.lstrip().split("\n", 1)[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def model_summary(recipe: "Recipe") -> str:
    """Name a recipe's model in a few words: `vit_b16 at 224`, `width 128, depth 4, patch 8 at 64`."""
    model = recipe.model
    if model.name is not None:
        return f"{model.name} at {model.res}"
    if model.width is not None:
        return f"width {model.width}, depth {model.depth}, patch {model.patch} at {model.res}"
    return f"the checkpoint's at {model.res}"


def show(
    recipe: Annotated[
        str,
        typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a shipped recipe.", show_default=False),
    ],
    override: Overrides = None,
    resolved: Annotated[
        bool,
        typer.Option("--resolved", help="Write out every default. Default: the file as it is.", show_default=False),
    ] = False,
) -> None:
    """Print a recipe."""
    from vitpt.recipe.load import dump_yaml, load_recipe

    loaded = load_recipe(recipe, override or ())
    result_text(dump_yaml(loaded.recipe) if resolved or override else loaded.text)


def check(
    recipes: Annotated[
        list[str],
        typer.Argument(metavar="RECIPE", help="Recipe files, or names of shipped recipes.", show_default=False),
    ],
    override: Overrides = None,
    json: Json = False,
) -> None:
    """Check recipes and print everything that is wrong with them."""
    from vitpt.recipe.load import load_recipe

    results: list[dict[str, Any]] = []
    command = "pretrain"
    for name in recipes:
        try:
            loaded = load_recipe(name, override or ())
        except VitptError as err:
            results.append({"recipe": name, "ok": False, "errors": str(err).split("\n")})
            if not json:
                for line in str(err).split("\n"):
                    say(line)
            continue
        command = "finetune" if loaded.recipe.model.name is None and loaded.recipe.model.width is None else "pretrain"
        summary = f"{loaded.recipe.objective.kind}, {model_summary(loaded.recipe)}"
        results.append({"recipe": name, "ok": True, "errors": []})
        if not json:
            result_text(f"{name}: ok ({summary})")
    if json:
        result_json(results)
    if not all(result["ok"] for result in results):
        raise typer.Exit(Exit.USAGE)
    say(f"next: vitpt {command} {shlex.quote(recipes[-1])} --dry-run")


def schema() -> None:
    """Print the JSON Schema of recipes."""
    from vitpt.recipe.schema import Recipe

    result_json({"$schema": "https://json-schema.org/draft/2020-12/schema"} | Recipe.model_json_schema())
