"""Reads a tree of items by the types of the schema: text becomes numbers, words and lists, and everything wrong is collected."""

import re
import types
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from vitpt.recipe.names import NOTES, all_keys, either, nearest, sections_of, suggest_key
from vitpt.recipe.nodes import Item, Mark, Problem, quote, shown_key
from vitpt.recipe.schema import Section

_DIGITS = r"(?:0|[1-9](?:_?\d)*)"
_NUMBER = re.compile(rf"[-+]?(?:{_DIGITS}(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{{1,4}})?")
_NOT_FINITE = re.compile(r"[-+]?\.?(nan|inf|infinity)", re.IGNORECASE)
_LARGEST_INT = 2**63
_LIMITS = ("gt", "ge", "lt", "le")
_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


class WrongValueError(Exception):
    """The text does not fit the type; says what was found and expected, and where.

    Args:
        mark: place of the value, or of the element of a list, that is wrong.
        message: what was found and expected.
    """

    def __init__(self, mark: Mark, message: str) -> None:
        super().__init__(message)
        self.mark = mark


@dataclass(frozen=True)
class Spec:
    """One alternative of a field's type: the type itself, and the limits of a number."""

    base: Any
    limits: tuple[tuple[str, float], ...] = ()


def _limits(metadata: Any) -> tuple[tuple[str, float], ...]:
    flat = [m for extra in metadata for m in (extra.metadata if isinstance(extra, FieldInfo) else [extra])]
    return tuple((name, getattr(m, name)) for m in flat for name in _LIMITS if hasattr(m, name))


def specs(annotation: Any, limits: tuple[tuple[str, float], ...] = ()) -> tuple[Spec, ...]:
    """Unfold an annotation into its alternatives."""
    if get_origin(annotation) is Annotated:
        base, *extras = get_args(annotation)
        return specs(base, limits + _limits(extras))
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(spec for part in get_args(annotation) for spec in specs(part, limits))
    return (Spec(annotation, limits),)


def describe(alternatives: tuple[Spec, ...]) -> str:
    """Say what a field takes, for a message."""
    words = []
    for spec in alternatives:
        bounds = " and ".join(f"{_SIGNS[name]} {limit}" for name, limit in spec.limits)
        if get_origin(spec.base) is Literal:
            choices = get_args(spec.base)
            words += [choices[0]] if len(choices) == 1 else [f"one of {', '.join(choices)}"]
        elif get_origin(spec.base) is tuple:
            words.append(_describe_list(spec))
        elif spec.base in (int, float):
            words.append(f"{'an integer' if spec.base is int else 'a number'} {bounds}".strip())
        else:
            words.append({bool: "true or false", str: "text", types.NoneType: "null"}[spec.base])
    return either(words)


def _describe_list(spec: Spec) -> str:
    parts = get_args(spec.base)
    if parts[-1] is Ellipsis:
        return f"a list of {describe(specs(parts[0]))}s".replace("texts", "names")
    inner = describe(specs(parts[0])).removeprefix("a ").replace("number", "numbers")
    return f"a list of {len(parts)} {inner}"


def read_value(alternatives: tuple[Spec, ...], item: Item) -> Any:
    """Read an item as one of the alternatives.

    Raises:
        WrongValueError: no alternative fits; the message names what was found and expected.
    """
    expected = describe(alternatives)
    if item.is_empty:
        null = "; write null for none" if any(spec.base is types.NoneType for spec in alternatives) else ""
        raise WrongValueError(item.mark, f"nothing is written; expected {expected}{null}")
    for spec in alternatives:
        reader = _READERS[get_origin(spec.base) or spec.base]
        value = reader(spec, item)
        if value is not _NO_MATCH:
            return value
    raise WrongValueError(item.mark, f"found {item.shown()}; {_closest(alternatives, item)}expected {expected}")


_NO_MATCH = object()


def _read_null(spec: Spec, item: Item) -> Any:
    return None if item.is_null else _NO_MATCH


def _read_literal(spec: Spec, item: Item) -> Any:
    return item.value if item.value in get_args(spec.base) else _NO_MATCH


def _read_bool(spec: Spec, item: Item) -> Any:
    return (
        {"true": True, "false": False}.get(item.value, _NO_MATCH)
        if isinstance(item.value, str) and item.plain
        else _NO_MATCH
    )


def _read_text(spec: Spec, item: Item) -> Any:
    return item.value if isinstance(item.value, str) and item.value and not item.is_null else _NO_MATCH


def _read_number(spec: Spec, item: Item) -> Any:
    if not isinstance(item.value, str) or not item.plain or not _NUMBER.fullmatch(item.value):
        return _NO_MATCH
    exact = Decimal(item.value)
    if spec.base is int:
        if abs(exact) >= _LARGEST_INT or exact != exact.to_integral_value():
            return _NO_MATCH
        value: float = int(exact)
    else:
        value = float(exact)
        if value in (float("inf"), float("-inf")):
            return _NO_MATCH
    return value if _within(value, spec.limits) else _NO_MATCH


def _within(value: float, limits: tuple[tuple[str, float], ...]) -> bool:
    holds = {"gt": value.__gt__, "ge": value.__ge__, "lt": value.__lt__, "le": value.__le__}
    return all(holds[name](limit) for name, limit in limits)


def _read_list(spec: Spec, item: Item) -> Any:
    if not isinstance(item.value, list):
        return _NO_MATCH
    parts = get_args(spec.base)
    parts = (parts[0],) * len(item.value) if parts[-1] is Ellipsis else parts
    if len(parts) != len(item.value):
        return _NO_MATCH
    return tuple(read_value(specs(part), child) for part, child in zip(parts, item.value, strict=True))


_READERS: dict[Any, Callable[[Spec, Item], Any]] = {
    types.NoneType: _read_null,
    Literal: _read_literal,
    bool: _read_bool,
    str: _read_text,
    int: _read_number,
    float: _read_number,
    tuple: _read_list,
}


def _closest(alternatives: tuple[Spec, ...], item: Item) -> str:
    """Return the nearest valid value as `did you mean X? `, or why a number is none, or nothing."""
    if not isinstance(item.value, str):
        return ""
    text = item.value
    choices = [c for spec in alternatives if get_origin(spec.base) is Literal for c in get_args(spec.base)]
    close = nearest(text.strip().lower().replace("-", "_"), choices)
    if close:
        return f"did you mean {close[0]}? "
    if any(spec.base is bool for spec in alternatives):
        words = {
            "yes": "true",
            "on": "true",
            "1": "true",
            "no": "false",
            "off": "false",
            "0": "false",
            "true": "true",
            "false": "false",
        }
        return f"did you mean {words[text.lower()]}? " if text.lower() in words else ""
    if any(spec.base in (int, float) for spec in alternatives):
        if not item.plain and _NUMBER.fullmatch(text):
            return "a number is written without quotes; "
        if _NOT_FINITE.fullmatch(text) or (_NUMBER.fullmatch(text) and float(text) in (float("inf"), float("-inf"))):
            return "a number must be finite; "
        if re.fullmatch(r"[-+]?0\d+", text):
            return "a number has no leading zero; "
    return ""


class Reader:
    """Reads a recipe tree into nested dicts of the values that were written.

    Attributes:
        problems: everything that was wrong.
        values: every good value by dotted key, defaults included; bad and missing ones are absent.
        marks: where each written value stands, by dotted key.
    """

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.values: dict[str, Any] = {}
        self.marks: dict[str, Mark] = {}

    def complain(self, mark: Mark, message: str) -> None:
        """Add a problem."""
        self.problems.append(Problem(mark, message))

    def section(self, model: type[Section], item: Item, path: str = "", mark: Mark | None = None) -> dict[str, Any]:
        """Read a mapping by a section's fields.

        Args:
            model: the section.
            item: its value.
            path: its dotted key, "" at the top.
            mark: where its key stands: missing fields are reported there.
        """
        mapping = self._mapping(item, path)
        if mapping is None:
            return {}
        fields = model.model_fields
        for key, (key_mark, _) in mapping.items():
            if key not in fields:
                self.complain(key_mark, _other_kind(model, mapping, path, key) or _unknown(path, key, list(fields)))
        written = {}
        for name, field in fields.items():
            dotted = f"{path}.{name}" if path else name
            if name in mapping:
                key_mark, value = mapping[name]
                self.marks[dotted] = value.mark
                written[name] = self._field(field, value, dotted, key_mark)
            elif field.is_required():
                self.complain(mark or item.mark, f"{dotted}: missing; {_needed(field)}")
            else:
                self._default(dotted, field.get_default())
        return written

    def _mapping(self, item: Item, path: str) -> dict[str, tuple[Mark, Item]] | None:
        if isinstance(item.value, dict):
            return item.value
        what = (
            f"{path}: found {item.shown()}; expected a mapping of keys"
            if path
            else f"found {item.shown()}; expected a mapping of keys"
        )
        self.complain(item.mark, what + (" (leave the section out for its defaults)" if item.is_empty else ""))
        return None

    def _field(self, field: FieldInfo, item: Item, dotted: str, mark: Mark) -> Any:
        sections = sections_of(field)
        if sections:
            nullable = type(None) in get_args(field.annotation)
            if item.is_null and nullable:
                self.values[dotted] = None
                return None
            if len(sections) == 1:
                return self.section(sections[0], item, dotted, mark)
            return self._union(field, sections, item, dotted, mark)
        try:
            value = read_value(specs(field.annotation, _limits(field.metadata)), item)
        except WrongValueError as err:
            self.complain(err.mark, f"{dotted}: {err}")
            return None
        self.values[dotted] = value
        return value

    def _union(
        self, field: FieldInfo, sections: tuple[type[Section], ...], item: Item, dotted: str, mark: Mark
    ) -> dict[str, Any]:
        """Read a section whose `kind` says which one it is."""
        kinds = {str(section.model_fields["kind"].default): section for section in sections}
        if not isinstance(item.value, dict):
            self.complain(
                item.mark, f"{dotted}: found {item.shown()}; expected a mapping such as {{kind: {next(iter(kinds))}}}"
            )
            return {}
        if "kind" in item.value:
            try:
                kind = read_value((Spec(Literal[tuple(kinds)]),), item.value["kind"][1])
            except WrongValueError as err:
                self.complain(err.mark, f"{dotted}.kind: {err}")
                return {}
        elif field.is_required():
            self.complain(mark, f"{dotted}.kind: missing; expected one of {', '.join(kinds)}")
            return {}
        else:
            kind = field.get_default().kind
        return {"kind": kind} | self.section(kinds[kind], item, dotted, mark)

    def _default(self, dotted: str, value: Any) -> None:
        if isinstance(value, Section):
            for name in type(value).model_fields:
                self._default(f"{dotted}.{name}", getattr(value, name))
        else:
            self.values[dotted] = value


def _needed(field: FieldInfo) -> str:
    sections = sections_of(field)
    if not sections:
        text = f"expected {describe(specs(field.annotation, _limits(field.metadata)))}"
        return f"{text}: {field.description}" if field.description else text
    needed = [name for name, inner in sections[0].model_fields.items() if inner.is_required()]
    if len(sections) > 1:
        return "expected a section with kind: " + either(
            str(section.model_fields["kind"].default) for section in sections
        )
    return f"expected a section with {', '.join(needed)}"


def _other_kind(model: type[Section], mapping: dict[str, tuple[Mark, Item]], path: str, key: str) -> str | None:
    """Say that a key belongs to another kind of the same section; None when it does not."""
    dotted = f"{path}.{key}"
    if "kind" not in model.model_fields or dotted not in all_keys():
        return None
    kind = model.model_fields["kind"].default
    more = ", ..." if len(model.model_fields) > 1 else ""
    overridden = "kind" in mapping and mapping["kind"][0].override
    advice = f"; replace the whole section: -o '{path}={{kind: {kind}{more}}}'" if overridden else ""
    return f"{dotted}: belongs to another kind than {kind}, which has {', '.join(model.model_fields)}{advice}"


def _unknown(path: str, key: str, siblings: list[str]) -> str:
    dotted = f"{path}.{shown_key(key)}" if path else shown_key(key)
    if key == "<<":
        return f"{dotted}: merge keys (<<) are not supported; write the values out"
    suggestions = suggest_key(path, key, siblings)
    if not suggestions:
        return f"{dotted}: unknown key; expected one of {', '.join(siblings)}"
    if suggestions == [key] and "." in key:
        section, _, name = key.rpartition(".")
        return f"{quote(key)}: unknown key; write {name} below {section}, as {section}: {{{name}: ...}}"
    note = NOTES.get(suggestions[0]) if key != suggestions[0].rpartition(".")[2] else None
    return f"{dotted}: unknown key; did you mean {either(suggestions)}?" + (f" ({note})" if note else "")
