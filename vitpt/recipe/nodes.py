"""YAML text to a tree of items that know where they stand; overrides are laid over that tree.

PyYAML finds the structure only. Scalars stay text: what `1e-3`, `no` or `010` mean is decided by the type of the field that reads them.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

try:
    from yaml import CSafeLoader as YamlLoader
except ImportError:  # PyYAML without libyaml: slower, same nodes
    from yaml import SafeLoader as YamlLoader  # type: ignore[assignment]

MAX_DEPTH = 20  # of nested collections; the deepest recipe has 4


@dataclass(frozen=True, order=True)
class Mark:
    """Where something was written; sorts file places before overrides, each in order."""

    override: int  # 0: in the file; else the how-manieth override
    line: int
    column: int
    text: str = field(compare=False)  # "FILE:LINE:COL" or "-o KEY=VALUE"

    def short(self) -> str:
        """Name the place beside another one of the same recipe."""
        return self.text if self.override else f"line {self.line}"


@dataclass(frozen=True, order=True)
class Problem:
    """One thing that is wrong with a recipe."""

    mark: Mark
    message: str

    def __str__(self) -> str:
        return f"{self.mark.text}: {self.message}"


@dataclass(frozen=True)
class Item:
    """A value: text, a list, or a mapping from key to (place of the key, value)."""

    mark: Mark
    value: "str | list[Item] | dict[str, tuple[Mark, Item]]"
    plain: bool = False  # a scalar without quotes

    @property
    def is_null(self) -> bool:
        """Whether the value is a written null."""
        return self.plain and self.value in ("null", "Null", "NULL", "~")

    @property
    def is_empty(self) -> bool:
        """Whether nothing was written."""
        return self.plain and self.value == ""

    def shown(self) -> str:
        """Show the value in a message: short, on one line."""
        if isinstance(self.value, dict):
            return "a mapping"
        if isinstance(self.value, list):
            return f"a list of {len(self.value)}"
        if self.is_empty:
            return "nothing"
        return self.value if self.is_null else quote(self.value)


def quote(text: str, limit: int = 60) -> str:
    """Put text into double quotes, control characters escaped and long text shortened."""
    shortened = text if len(text) <= limit else text[: limit - 3] + "..."
    quoted = json.dumps(shortened, ensure_ascii=False)
    return "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in quoted)


class _Tree:
    """Converts composed nodes, collecting problems."""

    def __init__(self, source: str, override: int) -> None:
        self.source = source
        self.override = override
        self.problems: list[Problem] = []

    def mark(self, mark: Any) -> Mark:
        line, column = (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)
        text = self.source if self.override else f"{self.source}:{line}:{column}"
        return Mark(self.override, line, column, text)

    def complain(self, mark: Any, message: str) -> None:
        self.problems.append(Problem(self.mark(mark), message))

    def scan(self, text: str) -> None:
        """Refuse what a recipe does not use, before anything recursive sees the text."""
        depth = 0
        for event in yaml.parse(text, Loader=YamlLoader):
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
                self.complain(event.start_mark, "anchors and aliases (& and *) are not supported; write the value out")
            tag = getattr(event, "tag", None)
            if tag not in (None, "!"):
                self.complain(event.start_mark, f"tags ({quote(tag)}) are not supported; the field decides on the type")
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
                if depth > MAX_DEPTH:
                    self.complain(event.start_mark, f"nested deeper than {MAX_DEPTH} levels; not a recipe")
                    return
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1

    def item(self, node: yaml.Node, path: str = "") -> Item:
        mark = self.mark(node.start_mark)
        if isinstance(node, yaml.ScalarNode):
            return Item(mark, node.value, plain=node.style not in ("'", '"', "|", ">"))
        if isinstance(node, yaml.SequenceNode):
            return Item(mark, [self.item(child, path) for child in node.value])
        mapping: dict[str, tuple[Mark, Item]] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self.complain(key_node.start_mark, "a key must be a word")
                continue
            key, key_mark = key_node.value, self.mark(key_node.start_mark)
            if key in mapping:
                message = f"{path}{shown_key(key)}: given twice, first at {mapping[key][0].short()}"
                self.problems.append(Problem(key_mark, message))
                continue
            mapping[key] = (key_mark, self.item(value_node, f"{path}{shown_key(key)}."))
        return Item(mark, mapping)


def shown_key(key: str) -> str:
    """Show a key in a message: as it is when it is a plain word, else quoted."""
    return key if re.fullmatch(r"[\w.-]{1,60}", key) else quote(key)


def parse(text: str, source: str, override: int = 0) -> tuple[Item | None, list[Problem]]:
    """Parse one YAML document.

    Args:
        text: the document.
        source: name of the file, or `-o KEY=VALUE`.
        override: 0 for a file, else the how-manieth override.

    Returns:
        The tree (None when there is none to work with) and the problems so far.
    """
    tree = _Tree(source, override)
    try:
        tree.scan(text)
        node = None if tree.problems else yaml.compose(text, Loader=YamlLoader)
    except yaml.MarkedYAMLError as err:
        problem = " ".join((err.problem or "cannot be read").split())
        if problem.startswith("but ") and err.context:
            problem = f"{err.context} {problem}"
        tree.complain(err.problem_mark or err.context_mark, f"not valid YAML: {problem}")
        return None, tree.problems
    except yaml.YAMLError as err:
        tree.complain(None, f"not valid YAML: {' '.join(str(err).split())}")
        return None, tree.problems
    return (None if node is None else tree.item(node)), tree.problems


def split_override(override: str) -> tuple[list[str], str] | None:
    """Split `optim.lr=1e-3` into (["optim", "lr"], "1e-3"); None when it has no such form."""
    key, equals, value = override.partition("=")
    parts = key.strip().split(".")
    return (parts, value) if equals and all(parts) else None


def apply_overrides(root: Item, overrides: Sequence[str]) -> tuple[Item, list[Problem]]:
    """Lay `KEY=VALUE` overrides over a recipe's tree; of two for one key the later one counts."""
    problems: list[Problem] = []
    for number, override in enumerate(overrides, 1):
        mark = Mark(
            number, 0, 0, f"-o {' '.join(shown_key(override).split())}" if "=" not in override else _named(override)
        )
        split = split_override(override)
        if split is None:
            problems.append(Problem(mark, "expected KEY=VALUE, such as optim.lr=1e-3"))
            continue
        item, wrong = parse(split[1], mark.text, number)
        problems += wrong
        if item is None and not wrong:
            item = Item(mark, "", plain=True)
        if item is None:
            continue
        changed = _replaced(root, split[0], mark, item)
        if changed is None:
            problems.append(Problem(mark, f"{'.'.join(split[0][:-1])}: has no keys below it"))
        else:
            root = changed
    return root, problems


def _named(override: str) -> str:
    """Name an override in a message, on one line and not too long."""
    line = quote(override, limit=80)[1:-1].replace('\\"', '"')
    return f"-o {line}"


def _replaced(item: Item, path: list[str], mark: Mark, value: Item) -> Item | None:
    """Return `item` with `value` at `path`; None when something on the way is not a mapping."""
    if not path:
        return value
    if item.is_null or item.is_empty:
        item = Item(mark, {})
    if not isinstance(item.value, dict):
        return None
    key_mark, old = item.value.get(path[0], (mark, Item(mark, {})))
    new = _replaced(old, path[1:], mark, value)
    if new is None:
        return None
    here = mark if len(path) == 1 else key_mark
    return Item(item.mark, item.value | {path[0]: (here, new)})
