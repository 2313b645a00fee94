import copy
import json

import pytest
import torch

from vitpt import checkpoint
from vitpt.errors import Exit, VitptError
from vitpt.models.variants import ViTConfig

MODEL = ViTConfig(width=4, depth=1, heads=2, mlp=8, patch=2, res=4)
PIXELS = {"res": 4, "mean": [0.5] * 3, "std": [0.5] * 3, "crop": {"kind": "squash"}, "interpolation": "bilinear"}
CONFIG = {"model": MODEL.to_dict(), "objective": {"kind": "mpp"}, "classes": None, "pixels": PIXELS}
TENSORS = {
    "backbone.patch_embed.proj.weight": (4, 3, 2, 2),
    "backbone.blocks.0.mlp.fc1.bias": (8,),
}
STATE = {
    "recipe_hash": "a",
    "data_hash": "b",
    "data_digest": "0123456789abcdef",
    "best": {"metric": "val/loss", "value": 2, "step": 5},
    "totals": {"loss": [1.5, 2]},
    "pending": None,
}


def save(root, step, value=1.0):
    tensors = {"model": {"w": torch.full((3,), value)}, "optimizer": {"w:step": torch.tensor(float(step))}}
    return checkpoint.save(root, step, tensors, {"step": step, **STATE}, CONFIG)


def test_round_trip(tmp_path):
    folder = save(tmp_path, 5)
    assert folder.name == "step-00000005"
    assert checkpoint.verify(folder)["step"] == 5
    assert torch.equal(checkpoint.load_tensors(folder)["w"], torch.ones(3))
    assert checkpoint.pointed(tmp_path, "LATEST") == folder
    assert checkpoint.read_config(folder)["objective"] == {"kind": "mpp"}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "config.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damage_of_any_file_is_found_and_an_older_checkpoint_taken(tmp_path, name, damage):
    older = save(tmp_path, 5)
    path = save(tmp_path, 10) / name
    content = path.read_bytes()
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(content[:-1] if damage == "cut" else content[:-1] + bytes([content[-1] ^ 1]))
    found, damaged = checkpoint.latest_good(tmp_path)
    assert found == older
    assert len(damaged) == 1
    assert name in damaged[0]


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("step", [None, "5", -5, 6, 10**9, 5.5, True]),
        ("files", [None, "x", 3, [1], {"model.safetensors": None}]),
        ("data_digest", [None, "x", 5, "0" * 15]),
        ("best", ["x", 1, {}, {"metric": "val/loss", "value": None, "step": 5}]),
        ("totals", [None, [1], {"loss": 1}, {"loss": [1]}]),
        ("pending", ["x", 1, [1]]),
        ("recipe_hash", [None, 5]),
        ("data_hash", [None, {"a": 1}]),
    ],
)
def test_a_damaged_state_is_found_and_an_older_checkpoint_taken(tmp_path, key, values):
    older, newer = save(tmp_path, 5), save(tmp_path, 10)
    state = json.loads((newer / "state.json").read_text())
    lacking = {name: value for name, value in state.items() if name != key}
    for wrong in (lacking, *({**state, key: value} for value in values)):
        (newer / "state.json").write_text(json.dumps(wrong))
        found, damaged = checkpoint.latest_good(tmp_path)
        assert found == older
        assert len(damaged) == 1
        assert damaged[0].startswith(f"{newer / 'state.json'}: damaged (")
        assert "\n" not in damaged[0]


@pytest.mark.parametrize("name", ["", "x" * 5000, "../checkpoints/step-00000005", "step-5", ".", "a\0b", b"\xff\xfe"])
def test_a_damaged_pointer_points_nowhere(tmp_path, name):
    newest = save(tmp_path / "checkpoints", 5)
    (tmp_path / "checkpoints" / "BEST").write_bytes(name if isinstance(name, bytes) else name.encode())
    assert checkpoint.pointed(tmp_path / "checkpoints", "BEST") is None
    assert checkpoint.find(tmp_path) == newest


def test_saving_a_step_again_replaces_a_damaged_folder(tmp_path):
    (save(tmp_path, 5) / "model.safetensors").write_bytes(b"")
    save(tmp_path, 5, value=2.0)
    found, damaged = checkpoint.latest_good(tmp_path)
    assert damaged == []
    assert checkpoint.load_tensors(found)["w"][0] == 2.0


def test_prune_keeps_the_newest_and_the_best(tmp_path):
    for step in (5, 10, 15, 20):
        save(tmp_path, step)
    checkpoint.point(tmp_path, "BEST", checkpoint.folder_name(5))
    checkpoint.prune(tmp_path, 2)
    assert [step for step, _ in checkpoint.steps_saved(tmp_path)] == [5, 15, 20]


def test_leftovers_of_a_killed_process_are_removed_and_never_taken(tmp_path):
    (tmp_path / ".step-00000007.123").mkdir(parents=True)
    (tmp_path / ".step-00000007.123" / "model.safetensors").write_bytes(b"half")
    assert checkpoint.latest_good(tmp_path) == (None, [])
    save(tmp_path, 8)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["LATEST", "step-00000008"]


def test_find(tmp_path):
    run = tmp_path / "run"
    for step in (5, 10):
        save(run / "checkpoints", step)
    assert checkpoint.find(run).name == "step-00000010"
    checkpoint.point(run / "checkpoints", "BEST", checkpoint.folder_name(5))
    assert checkpoint.find(run).name == "step-00000005"
    assert checkpoint.find(run / "checkpoints" / "step-00000010").name == "step-00000010"


@pytest.mark.parametrize("what", ["missing", "empty folder"])
def test_find_nothing(tmp_path, what):
    path = tmp_path / "x"
    if what == "empty folder":
        path.mkdir()
    with pytest.raises(VitptError, match=str(path)) as caught:
        checkpoint.find(path)
    assert caught.value.exit_code == Exit.USAGE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "format version 2"),
        ({"format": "other"}, "not written by vitpt"),
        (None, "not readable as JSON"),
    ],
)
def test_foreign_config_is_refused_in_one_line(tmp_path, change, message):
    path = save(tmp_path, 5) / "config.json"
    path.write_text("{" if change is None else json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(VitptError, match=message) as caught:
        checkpoint.read_config(path.parent)
    assert caught.value.exit_code == Exit.DATA
    assert "\n" not in caught.value.message


def wrong_configs():
    for key in CONFIG:
        yield (key,), ...
        yield (key,), 3
        if key != "objective":
            yield (key,), {"kind": "mpp"}
    for key in CONFIG["model"]:
        yield ("model", key), ...
        yield from ((("model", key), value) for value in (None, "x", -1, [], 10**12))
    for key in ("width", "depth", "heads", "mlp", "patch", "res"):
        yield from ((("model", key), value) for value in (0, 1.5, 1001))
    yield ("model", "window"), 3
    yield ("objective", "kind"), "moco"
    yield from ((("classes",), value) for value in ("abc", [1], {"a": 0}))
    for key in ("mean", "std"):
        yield from ((("pixels", key), value) for value in (..., [0.5], [0.5] * 4, ["a"] * 3, [float("nan")] * 3))
    yield ("pixels", "std"), [0, 0, 0]
    yield ("pixels", "crop"), {"kind": "five"}


def test_a_wrong_config_is_refused_in_one_line(tmp_path):
    path = tmp_path / "m" / "config.json"
    tensors = {name: torch.zeros(shape) for name, shape in TENSORS.items()}
    checkpoint.write_model(path.parent, tensors, CONFIG)
    right = json.loads(path.read_text())
    for keys, value in wrong_configs():
        wrong = copy.deepcopy(right)
        section = wrong[keys[0]] if keys[1:] else wrong
        if value is ...:
            del section[keys[-1]]
        else:
            section[keys[-1]] = value
        path.write_text(json.dumps(wrong))
        with pytest.raises(VitptError, match=f"{path}: ") as caught:
            ViTConfig.from_dict(checkpoint.read_model_config(path.parent)["model"], str(path))
        assert caught.value.exit_code == Exit.DATA, keys
        assert "\n" not in caught.value.message
    path.write_text(json.dumps(right))
    assert checkpoint.read_model_config(path.parent) == right


def test_classes_are_as_many_as_the_head_has(tmp_path):
    described = {**CONFIG, "objective": {"kind": "supervised"}, "classes": ["a", "b"]}
    tensors = {name: torch.zeros(shape) for name, shape in TENSORS.items()} | {"objective.head.bias": torch.zeros(3)}
    checkpoint.write_model(tmp_path / "m", tensors, described)
    with pytest.raises(VitptError, match=r"2 classes, but model.safetensors has 3") as caught:
        checkpoint.read_model_config(tmp_path / "m")
    assert caught.value.exit_code == Exit.DATA


def test_unreadable_tensors(tmp_path):
    folder = save(tmp_path, 5)
    (folder / "model.safetensors").write_bytes(b"not tensors at all")
    with pytest.raises(VitptError, match="not a readable safetensors file") as caught:
        checkpoint.load_tensors(folder)
    assert caught.value.exit_code == Exit.DATA


def test_write_model_never_overwrites(tmp_path):
    checkpoint.write_model(tmp_path / "m", {"w": torch.ones(2)}, CONFIG)
    assert checkpoint.find(tmp_path / "m") == tmp_path / "m"
    with pytest.raises(VitptError, match="exists already"):
        checkpoint.write_model(tmp_path / "m", {"w": torch.zeros(2)}, CONFIG)
    assert checkpoint.load_tensors(tmp_path / "m")["w"][0] == 1


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "lacks weight"),
        ({"weight": torch.zeros(2, 3), "more": torch.zeros(1)}, "unknown tensor more"),
        ({"weight": torch.zeros(3, 2)}, r"shape \(3, 2\), the model needs \(2, 3\)"),
    ],
)
def test_wrong_tensors_are_named(tensors, message):
    parameters = dict(torch.nn.Linear(3, 2, bias=False).named_parameters())
    with pytest.raises(VitptError, match=message):
        checkpoint.load_into(parameters, tensors, "x")
