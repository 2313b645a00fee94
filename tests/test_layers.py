"""The architecture, checked on the source: who imports whom, sizes, and what is never imported where."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "vitpt"
MAX_MODULE_LINES = 420
MAX_FUNCTION_LINES = 70

# From the top down; a module imports from layers below its own only. Modules of one entry may import each other.
LAYERS: list[set[str]] = [
    {"__main__"},
    {"cli"},
    {"train"},
    {"evaluate", "convert"},
    {"stream", "objectives", "shard"},
    {"models", "checkpoint", "dataset"},
    {"recipe", "draws", "image", "storage"},
    {"fsio"},
    {"errors"},
    {"__init__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
NO_TORCH = {"recipe", "draws", "image", "storage", "fsio", "errors", "dataset", "shard", "__init__"}
TENSORS_ONLY = {"models", "objectives"}  # of the data side they see nothing but the draws

MODULES = sorted(ROOT.rglob("*.py"))


def name_of(path):
    """Return `stream` for vitpt/stream/order.py, `draws` for vitpt/draws.py."""
    return path.relative_to(ROOT).with_suffix("").parts[0]


def dotted(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path):
    """Yield the full name of everything a module imports, inside functions and for type checks too."""
    package = path.relative_to(ROOT.parent).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "importlib.import_module",
            "import_module",
            "__import__",
        ):
            yield ast.literal_eval(node.args[0])


def own(path):
    """Yield the first-level names of vitpt that a module imports; vitpt itself is `__init__`."""
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "vitpt":
            yield parts[1] if len(parts) > 1 and parts[1] in LEVEL else "__init__"


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_imports_point_downwards(path):
    name = name_of(path)
    assert name in LEVEL, f"vitpt/{name} is in no layer"
    wrong = sorted({other for other in own(path) if other != name and LEVEL[other] <= LEVEL[name]})
    assert wrong == [], f"{dotted(path)} imports {', '.join(wrong)} of its own layer or above"


@pytest.mark.parametrize("path", [path for path in MODULES if name_of(path) in NO_TORCH], ids=dotted)
def test_no_torch_at_rest(path):
    heavy = {name.split(".")[0] for name in imports(path)} & {
        "torch",
        "torchvision",
        "webdataset",
        "accelerate",
        "timm",
        "nvidia",
    }
    assert heavy == set()


@pytest.mark.parametrize("path", [path for path in MODULES if name_of(path) in TENSORS_ONLY], ids=dotted)
def test_models_and_objectives_see_no_data_side(path):
    assert set(own(path)) & {"stream", "shard", "dataset", "storage", "image", "checkpoint", "fsio"} == set()
    outside = {name.split(".")[0] for name in imports(path)} - {"vitpt"}
    assert outside & {"accelerate", "webdataset", "nvidia", "PIL", "typer", "rich"} == set()


@pytest.mark.parametrize("path", [path for path in MODULES if name_of(path) != "cli"], ids=dotted)
def test_only_the_command_line_prints_or_exits(path):
    calls = {ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)}
    assert calls & {"print", "sys.exit", "quit", "exit"} == set()
    assert {name.split(".")[0] for name in imports(path)} & {"typer", "rich", "click"} == set()


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_sizes(path):
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_MODULE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            # the parameters of a command are its options with their help, a table rather than logic
            first = node.body[0].lineno if name_of(path) == "cli" else node.lineno
            length = node.end_lineno - first + 1
            assert length <= MAX_FUNCTION_LINES, f"{dotted(path)}.{node.name} has {length} lines"


def test_command_modules_are_light_at_the_top():
    """Every TAB and every --help imports all of them."""
    heavy = {
        "torch",
        "accelerate",
        "webdataset",
        "nvidia",
        "numpy",
        "PIL",
        "pydantic",
        "yaml",
        "rich",
        "safetensors",
        "timm",
    }
    light = {"vitpt.cli", "vitpt.errors", "vitpt.__version__"}
    for path in (ROOT / "cli").glob("*.py"):
        tree = ast.parse(path.read_text())
        top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {name for node in top for name in _names(node)}
        assert {name.split(".")[0] for name in names} & heavy == set(), path.name
        ours = {name for name in names if name.split(".")[0] == "vitpt"}
        assert {name for name in ours if not any(name.startswith(prefix) for prefix in light)} == set(), path.name


def _names(node):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [f"{node.module}.{alias.name}" for alias in node.names]


def test_click_is_never_imported():
    """Typer brings its own copy: exceptions of the public one are not caught by it."""
    for path in MODULES:
        assert not {name for name in imports(path) if name.startswith(("click", "typer._click"))}
