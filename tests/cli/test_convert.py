import json

import pytest
import torch
from small_checkpoint import write_checkpoint
from typer.testing import CliRunner

from vitpt import checkpoint
from vitpt.cli.app import app
from vitpt.errors import Exit
from vitpt.recipe import schema

torch.set_num_threads(1)


def _run(*args):
    return CliRunner().invoke(app, ["convert", *map(str, args)])


@pytest.fixture
def native(tmp_path):
    write_checkpoint(tmp_path / "native")
    return tmp_path / "native"


def test_every_direction(tmp_path, native):
    steps = [
        (native, tmp_path / "timm", "timm", f'timm.create_model("local-dir:{tmp_path / "timm"}", pretrained=True)\''),
        (tmp_path / "timm", tmp_path / "back", "native", "next: vitpt eval"),
        (tmp_path / "back", tmp_path / "model.npz", "google", "--to native"),
        (tmp_path / "model.npz", tmp_path / "again", "native", "next: vitpt eval"),
    ]
    for source, destination, to, following in steps:
        result = _run(source, destination, "--to", to)
        assert result.exit_code == Exit.DONE, result.output
        assert destination.exists()
        last = result.stderr.splitlines()[-1]
        assert last.startswith("next: ")
        assert following in last
        assert str(destination) in result.stdout
        assert "largest difference" in result.stdout
    first, last = (checkpoint.load_tensors(folder) for folder in (native, tmp_path / "again"))
    assert first.keys() == last.keys()
    assert all(torch.equal(value, last[name]) for name, value in first.items())


def test_json_is_one_document_and_names_what_is_left_out(tmp_path, native):
    result = _run(native, tmp_path / "model.npz", "--to", "google", "--drop-head", "--json")
    found = json.loads(result.stdout)
    assert found["num_classes"] == 0
    assert found["largest_difference"] < 1e-5
    assert found["source_format"] == "native"
    tensors = checkpoint.load_tensors(native)
    assert found["parameters"] == sum(value.numel() for name, value in tensors.items() if name.startswith("backbone."))
    assert found["notes"] == ["the classification head is left out"]
    assert "note: the classification head is left out" in result.stderr


def test_a_run_stands_for_its_best_checkpoint(tmp_path):
    for step in (10, 20):
        task = write_checkpoint(tmp_path / f"model{step}")
        with torch.no_grad():
            task.objective.head.bias.fill_(step)
        config = {
            key: value for key, value in checkpoint.read_config(tmp_path / f"model{step}").items() if key != "format"
        }
        root = tmp_path / "run/checkpoints"
        checkpoint.save(root, step, {"model": task.state_dict()}, {"step": step}, config)
    checkpoint.point(root, "BEST", checkpoint.folder_name(10))
    result = _run(tmp_path / "run", tmp_path / "model.npz", "--to", "google")
    assert result.exit_code == Exit.DONE, result.output
    assert "moving average" not in result.stderr
    _run(tmp_path / "model.npz", tmp_path / "back", "--to", "native")
    assert checkpoint.load_tensors(tmp_path / "back")["objective.head.bias"].tolist() == [10.0] * 5


def test_the_moving_average_is_preferred_and_named(tmp_path):
    task = write_checkpoint(tmp_path / "model")
    average = {name: value / 2 for name, value in task.state_dict().items()}
    config = checkpoint.read_config(tmp_path / "model")
    checkpoint.save(tmp_path / "run/checkpoints", 3, {"model": task.state_dict(), "ema": average}, {}, config)
    result = _run(tmp_path / "run", tmp_path / "timm", "--to", "timm")
    assert "moving average" in result.stderr
    _run(tmp_path / "timm", tmp_path / "back", "--to", "native")
    written = checkpoint.load_tensors(tmp_path / "back")
    assert all(torch.equal(value, average[name]) for name, value in written.items())


def test_headless_model_points_to_fine_tuning(tmp_path):
    write_checkpoint(tmp_path / "mpp", schema.Mpp())
    _run(tmp_path / "mpp", tmp_path / "timm", "--to", "timm")
    result = _run(tmp_path / "timm", tmp_path / "back", "--to", "native")
    assert result.stderr.splitlines()[-1] == f"next: vitpt finetune RECIPE --from {tmp_path / 'back'}"


def test_existing_destination_is_kept(tmp_path, native):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/photo").write_text("precious")
    result = _run(native, tmp_path / "mine", "--to", "timm")
    assert result.exit_code == Exit.USAGE
    assert result.stderr.splitlines()[0] == f"{tmp_path / 'mine'} exists already"
    assert (tmp_path / "mine/photo").read_text() == "precious"


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["nothing", "out", "--to", "timm"], Exit.USAGE, "no such file or folder"),
        (["native", "out", "--to", "onnx"], Exit.USAGE, "onnx"),
        (["native", "out"], Exit.USAGE, "--to"),
        (["native", "out", "--to", "google"], Exit.USAGE, ".npz"),
        (["native", "out", "--to", "native"], Exit.USAGE, "already"),
        (["native/config.json", "out", "--to", "native"], Exit.DATA, "not a readable .npz file"),
    ],
)
def test_errors(tmp_path, native, monkeypatch, args, code, message):
    monkeypatch.chdir(tmp_path)
    result = _run(*args)
    assert result.exit_code == code
    assert message in result.stderr
    assert result.stdout == ""
    assert not (tmp_path / "out").exists()


def test_representation_layer_needs_drop_head(tmp_path):
    write_checkpoint(tmp_path / "deep", schema.Supervised(representation=True))
    result = _run(tmp_path / "deep", tmp_path / "timm", "--to", "timm")
    assert result.exit_code == Exit.USAGE
    assert "--drop-head" in result.stderr
    assert _run(tmp_path / "deep", tmp_path / "timm", "--to", "timm", "--drop-head").exit_code == Exit.DONE
