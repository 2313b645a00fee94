"""README and docs say what is there: commands, options, recipes, exit statuses, links."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from vitpt.cli.app import app
from vitpt.errors import Exit
from vitpt.recipe.load import load_recipe, shipped_recipes

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [
    ROOT / name
    for name in (
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "benchmarks/README.md",
        "shards/README.md",
        "docs/data-format.md",
        "docs/design.md",
        "docs/determinism.md",
    )
]
SETUP = (
    "python3 -m venv .venv && . .venv/bin/activate && pip install -e . && "
    "vitpt pretrain recipes/quickstart.yaml && vitpt finetune && vitpt eval",
    "python3 -m venv .venv && . .venv/bin/activate && pip install -e '.[dev]' && pytest",
)
ROOT_COMMAND = typer.main.get_command(app)


def page_id(path):
    return path.relative_to(ROOT).as_posix()


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def fenced(text: str) -> list[str]:
    """The content of fenced blocks that are shell commands: those without a language."""
    return re.findall(r"^```\n(.*?)\n```$", text, re.M | re.S)


def section(text: str, title: str) -> str:
    """What stands below a heading, up to the next one."""
    return re.split(r"^#+ ", text.split(f"\n## {title}\n", 1)[1], maxsplit=1, flags=re.M)[0]


def first_table(text: str) -> list[list[str]]:
    """The cells of a text's first table, without its two head lines."""
    table = re.search(r"(^\|.*\n)+", text, re.M)
    assert table is not None
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()[2:]]


def leaves(command=ROOT_COMMAND, path="vitpt") -> Iterator[tuple[str, typer.core.TyperCommand]]:
    """Every command that does something, with its whole name."""
    for name, inner in command.commands.items():
        if hasattr(inner, "commands"):
            yield from leaves(inner, f"{path} {name}")
        else:
            yield f"{path} {name}", inner


def vitpt_calls() -> list[str]:
    """Every call of vitpt in a block of shell commands, as its arguments."""
    calls = []
    for page in PAGES:
        for line in "\n".join(fenced(page.read_text())).splitlines():
            for part in re.split(r"&&|;|\||>| & |\bdo\b|#", line):
                found = re.search(r"(?:^|-m |until )\s*vitpt (.+)", part.strip())
                if found:
                    calls.append(found[1].strip())
    return calls


def test_readme_is_short_and_begins_with_the_two_commands():
    lines = README.splitlines()
    assert len(lines) <= 200
    assert lines[0] == "# vitpt"
    assert tuple(fenced(README)[0].splitlines()) == SETUP
    for command in SETUP:
        assert lines.count(command) == 1  # at the start of a line, where .ci/run looks for it
    assert lines.index(SETUP[1]) < 16


def test_recipe_table_lists_the_shipped_recipes():
    rows = first_table(section(README, "Recipes"))
    assert sorted(row[0].strip("`") for row in rows) == list(shipped_recipes())


def test_exit_statuses_are_all_explained():
    rows = first_table(section(README, "Resume and preemption"))
    assert [int(row[0]) for row in rows] == sorted(Exit)


@pytest.mark.parametrize("call", vitpt_calls())
def test_commands_parse(call):
    """As typed: known commands and options, values of the right type, recipes and keys that exist."""
    command, context, arguments = ROOT_COMMAND, None, shlex.split(call)
    while hasattr(command, "commands"):
        command = command.commands[arguments.pop(0)]
    context = command.make_context(call, arguments)  # raises on anything it does not know; runs nothing
    values = context.params
    recipe = values.get("recipe")
    # a file that an earlier command wrote is a copy of a shipped recipe
    names = [name for name in (recipe or "", *values.get("recipes", ())) if name and "runs/" not in name]
    for name in names:
        overrides = values.get("override") or []
        load_recipe("quickstart" if name in ("my.yaml", "short.yaml") else name, overrides)


def test_commands_were_found():
    assert len(vitpt_calls()) > 25


def test_every_command_is_documented():
    text = "\n".join(page.read_text() for page in PAGES)
    missing = [name for name, _ in leaves() if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text)]
    assert missing == []


@pytest.mark.parametrize(("name", "command"), list(leaves()), ids=[name for name, _ in leaves()])
def test_help_explains_every_option(name, command):
    assert command.help
    done = CliRunner().invoke(app, [*name.split()[1:], "--help"], env={"COLUMNS": "100"})
    assert done.exit_code == 0
    for parameter in command.params:
        assert len(parameter.help or "") > 10, parameter.name
        for option in (o for o in parameter.opts if o.startswith("--")):
            assert option in done.stdout


def test_no_option_is_invented():
    """Whatever the pages call an option of vitpt is one."""
    known = {option for _, command in leaves() for parameter in command.params for option in parameter.opts}
    known |= {option for parameter in ROOT_COMMAND.params for option in parameter.opts} | {"--help", "-h"}
    for page in PAGES:
        for code in re.findall(r"`([^`\n]+)`", without_code(page.read_text())):
            words = shlex.split(code, posix=False)
            if words and (words[0].startswith("--") or words[0] == "vitpt"):
                wrong = [word for word in words if re.fullmatch(r"--[a-z-]+", word) and word not in known]
                assert wrong == [], f"{page_id(page)}: `{code}`"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        if anchor:
            heads = re.findall(r"^#+ (.+)$", without_code(file.read_text()), re.M)
            anchors = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
            assert anchor in anchors, target


def test_no_path_of_a_machine_is_in_the_repository():
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    pattern = re.compile("(?<![\\w.~/-])/(?:" + "|".join(["home", "root", "Users", "work", "mnt"]) + ")/[a-z]")
    found = []
    for name in listed.decode().split("\0"):
        path = ROOT / name
        if name and path.suffix not in (".tar", ".npy", ".bin") and path.is_file():
            text = path.read_text(errors="replace")
            found += [f"{name}: {match[0]}" for match in pattern.finditer(text)]
    assert found == []
