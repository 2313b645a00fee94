"""Loads a recipe: finds the file, reads it by the schema, and reports everything that is wrong with it at once."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vitpt.errors import VitptError
from vitpt.fsio import shipped
from vitpt.recipe.check import MODEL_NUMBERS, Known, cross_checks
from vitpt.recipe.identity import dump_yaml, recipe_hash, result_differences, result_fields
from vitpt.recipe.names import ALIASES, all_keys, nearest
from vitpt.recipe.nodes import Mark, Problem, apply_overrides, parse, quote
from vitpt.recipe.read import Reader
from vitpt.recipe.schema import Recipe

__all__ = [
    "LoadedRecipe",
    "dump_yaml",
    "find_recipe",
    "load_recipe",
    "recipe_hash",
    "require_model",
    "result_differences",
    "result_fields",
    "shipped_recipes",
]

MAX_BYTES = 2**20
_BINARY = frozenset(map(chr, range(32))) - set("\t\n\r") | {"\x7f"}


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe and where it came from.

    Attributes:
        recipe: the checked recipe, overrides included.
        path: the file.
        text: its text as it is on disk.
        overrides: the KEY=VALUE overrides laid over it.
    """

    recipe: Recipe
    path: Path
    text: str
    overrides: tuple[str, ...] = ()


def load_recipe(name_or_path: str | Path, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Load a recipe from a file or by the name of a shipped one.

    Args:
        name_or_path: an existing file, else the name of a shipped recipe.
        overrides: KEY=VALUE with a dotted key and a YAML value, such as `optim.lr=1e-3`.

    Raises:
        VitptError: exit code 2; one line for each thing that is wrong, in the order of the file.
    """
    path = find_recipe(str(name_or_path))
    text = _read_text(path)
    recipe, problems = read_recipe(text, str(path), overrides)
    if recipe is None:
        raise VitptError("\n".join(str(problem) for problem in problems))
    return LoadedRecipe(recipe, path, text, tuple(overrides))


def read_recipe(text: str, source: str, overrides: Sequence[str] = ()) -> tuple[Recipe | None, list[Problem]]:
    """Read a recipe's text; return the recipe, or None and everything that is wrong, in order."""
    source = quote(source, limit=4096)[1:-1]
    root, problems = parse(text, source)
    start = Mark(0, 1, 1, f"{source}:1:1")
    if root is None:
        return None, sorted(problems) or [Problem(start, "the file is empty; expected a recipe")]
    root, wrong = apply_overrides(root, overrides)
    if isinstance(root.value, dict) and not any(_is_known(key) for key in root.value):
        return None, [
            *problems,
            Problem(start, f"not a recipe: none of its keys is one of {', '.join(Recipe.model_fields)}"),
        ]
    reader = Reader()
    tree = reader.section(Recipe, root, mark=start)
    problems += wrong + reader.problems
    if isinstance(root.value, dict):
        problems += cross_checks(Known(reader.values, reader.marks, start))
    if problems:
        return None, sorted(problems, key=lambda problem: problem.mark)
    return Recipe.model_validate(tree), []


def _is_known(key: str) -> bool:
    word = key.lower()
    return word in ALIASES or any(word in (known, known.rpartition(".")[2]) for known in all_keys())


def shipped_recipes() -> dict[str, Path]:
    """Return the shipped recipes by name, sorted."""
    return {path.stem: path for path in sorted(shipped("recipes").glob("*.yaml"))}


def find_recipe(name: str) -> Path:
    """Return the recipe's file: an existing file, else a shipped recipe by name.

    `recipes/` before and `.yaml` after the name of a shipped recipe may be left out.

    Raises:
        VitptError: exit code 2; neither exists; names the nearest shipped recipes.
    """
    path = Path(name)
    try:
        is_folder = name != "" and path.is_dir()
        if path.exists() and not path.is_dir():
            return path
    except OSError as err:
        raise VitptError(f"{quote(name)}: {os.strerror(err.errno or 0)}") from err
    choices = shipped_recipes()
    stem = name.removeprefix("recipes/").removesuffix(".yaml").removesuffix(".yml")
    if stem in choices:
        return choices[stem]
    what = "is a folder, not a recipe" if is_folder else "no such file and no such shipped recipe"
    close = nearest(path.stem, choices, count=3)
    hint = f"Did you mean {' or '.join(close)}?" if close else f"Shipped recipes: {', '.join(choices)}."
    raise VitptError(f"{quote(name)}: {what}", hint=hint)


def _read_text(path: Path) -> str:
    shown = quote(str(path), limit=4096)[1:-1]
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as err:
        raise VitptError(f"{shown}: cannot be read: {os.strerror(err.errno or 0)}") from err
    if b"\0" in raw[:4096]:
        raise VitptError(f"{shown}: a binary file, not a recipe (expected YAML in UTF-8)")
    if len(raw) > MAX_BYTES:
        raise VitptError(f"{shown}: larger than {MAX_BYTES} bytes; not a recipe")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as err:
        line = raw.count(b"\n", 0, err.start) + 1
        column = err.start - raw.rfind(b"\n", 0, err.start)
        raise VitptError(
            f"{shown}:{line}:{column}: not UTF-8 (byte 0x{raw[err.start]:02x}); expected YAML in UTF-8"
        ) from err
    for number, line_text in enumerate(text.split("\n"), 1):
        bad = next((i for i, char in enumerate(line_text) if char in _BINARY), None)
        if bad is not None:
            code = ord(line_text[bad])
            raise VitptError(f"{shown}:{number}:{bad + 1}: control character 0x{code:02x}; expected YAML text")
    return text


def require_model(recipe: Recipe) -> None:
    """Refuse a recipe that does not say which model: only fine-tuning takes it from a checkpoint.

    Raises:
        VitptError: exit code 2.
    """
    if recipe.model.name is None and recipe.model.width is None:
        raise VitptError(
            f"model: neither name nor {', '.join(MODEL_NUMBERS)}; expected one of them (only `vitpt finetune` takes the model from a checkpoint)",
            hint="For example: model: {name: vit_b16, res: 224}",
        )
