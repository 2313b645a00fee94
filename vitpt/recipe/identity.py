"""What makes two recipes the same: result fields, their hash, their differences, and the recipe as YAML."""

from collections.abc import Mapping
from typing import Any

import yaml

from vitpt.fsio import canonical_json, sha256_bytes
from vitpt.recipe.schema import Recipe, Section


def result_fields(recipe: Recipe) -> dict[str, Any]:
    """Return the fields that decide what is learnt, by dotted key, as JSON values."""
    return dict(sorted(_results(recipe, "").items()))


def _results(section: Section, prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        extra = field.json_schema_extra
        if isinstance(extra, Mapping) and extra.get("role") == "execution":
            continue
        if isinstance(value, Section):
            found |= _results(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = list(value) if isinstance(value, tuple) else value
    return found


def recipe_hash(recipe: Recipe, extra: Mapping[str, str]) -> str:
    """Return the sha256, in hex, of everything in a recipe that decides what is learnt.

    Args:
        recipe: the recipe; its execution fields, such as paths and threads, do not count.
        extra: what else decides, such as the content id of the data or of the checkpoint that was loaded.
    """
    whole = {"recipe": result_fields(recipe), "extra": dict(extra)}
    return sha256_bytes(canonical_json(whole))


def result_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (dotted key, old value, new value) of each difference between two `result_fields`, sorted by key.

    A key that one side lacks has the value None there.
    """
    keys = sorted(set(old) | set(new))
    pairs = [(key, _json(old.get(key)), _json(new.get(key))) for key in keys]
    return [(key, before, after) for key, before, after in pairs if before != after]


def _json(value: Any) -> Any:
    """Normalise what a JSON round trip changes."""
    return list(value) if isinstance(value, tuple) else value


def dump_yaml(recipe: Recipe) -> str:
    """Return the resolved recipe, every default written out, as YAML that reads back to an equal recipe."""
    return yaml.safe_dump(_written(recipe), sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)


def _written(section: Section) -> dict[str, Any]:
    written: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if value is None and field.default is None:
            continue
        if isinstance(value, Section):
            value = _written(value)
        written[name] = list(value) if isinstance(value, tuple) else value
    return written
