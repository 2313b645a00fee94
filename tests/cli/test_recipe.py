"""`vitpt recipe`."""

import json

import pytest
from typer.testing import CliRunner

from vitpt.cli.app import app
from vitpt.recipe.load import load_recipe, shipped_recipes

runner = CliRunner()


def run(*args):
    return runner.invoke(app, ["recipe", *args])


def test_list():
    done = run("list")
    assert done.exit_code == 0
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names == ["name", *shipped_recipes()]
    assert "next: vitpt recipe show NAME" in done.stderr


def test_list_json():
    rows = json.loads(run("list", "--json").stdout)
    assert [row["name"] for row in rows] == list(shipped_recipes())
    quickstart = next(row for row in rows if row["name"] == "quickstart")
    assert quickstart["objective"] == "mpp"
    assert quickstart["model"] == "width 128, depth 4, patch 8 at 64"
    assert quickstart["purpose"].startswith("A first run")


def test_show_prints_the_file_as_it_is():
    done = run("show", "quickstart")
    assert done.exit_code == 0
    assert done.stdout == shipped_recipes()["quickstart"].read_text()


@pytest.mark.parametrize("args", [["--resolved"], ["-o", "optim.lr=1e-4"]])
def test_show_resolved_reads_back(tmp_path, args):
    path = tmp_path / "shown.yaml"
    path.write_text(run("show", "vit_b16_mpp", *args).stdout)
    overrides = [arg for arg in args if "=" in arg]
    assert load_recipe(path).recipe == load_recipe("vit_b16_mpp", overrides).recipe
    assert "max_bad_fraction" in path.read_text()


def test_show_unknown():
    done = run("show", "quikstart")
    assert done.exit_code == 2
    assert done.stdout == ""
    assert "Did you mean quickstart" in done.stderr


def test_check_good():
    done = run("check", "quickstart", "finetune_in1k_384")
    assert done.exit_code == 0
    assert done.stdout.splitlines() == [
        "quickstart: ok (mpp, width 128, depth 4, patch 8 at 64)",
        "finetune_in1k_384: ok (supervised, the checkpoint's at 384)",
    ]
    assert done.stderr == "next: vitpt finetune finetune_in1k_384 --dry-run\n"


def test_check_reports_every_error_of_every_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = shipped_recipes()["quickstart"].read_text()
    (tmp_path / "a.yaml").write_text(text.replace("lr: 1e-3", "lr: fast").replace("flip: both", "flip: bothe"))
    (tmp_path / "b.yaml").write_text("")
    done = run("check", "a.yaml", "quickstart", "b.yaml", "missing.yaml")
    assert done.exit_code == 2
    assert done.stdout.startswith("quickstart: ok")
    lines = done.stderr.splitlines()
    assert [line.split(": ")[1] for line in lines[:2]] == ["data.flip", "optim.lr"]
    assert lines[2:] == [
        "b.yaml:1:1: the file is empty; expected a recipe",
        '"missing.yaml": no such file and no such shipped recipe',
        lines[-1],
    ]


def test_check_json_is_one_document(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("")
    done = run("check", "quickstart", str(path), "--json")
    assert done.exit_code == 2
    good, bad = json.loads(done.stdout)
    assert good == {"recipe": "quickstart", "ok": True, "errors": []}
    assert (bad["ok"], bad["errors"]) == (False, [f"{path}:1:1: the file is empty; expected a recipe"])


def test_check_with_an_override():
    done = run("check", "quickstart", "-o", "model.res=60")
    assert done.exit_code == 2
    assert "-o model.res=60: model.res: 60 is not a multiple of the patch side 8" in done.stderr


def test_schema_describes_the_fields():
    schema = json.loads(run("schema").stdout)
    assert schema["$defs"]["AdamW"]["properties"]["lr"]["exclusiveMinimum"] == 0
    assert schema["$defs"]["AdamW"]["properties"]["lr"]["description"].startswith("peak learning rate")
    assert schema["additionalProperties"] is False
    assert set(schema["required"]) == {"name", "data", "objective", "optim", "train"}
