"""The wheel, the editable install and the source archive: what is in them, and that an installed copy stands on its own."""

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from running import environment

import vitpt

ROOT = Path(__file__).resolve().parents[1]
TINY = (
    *("model.width=16", "model.depth=1", "model.heads=2", "model.mlp=32", "model.patch=16"),
    *("train.steps=4", "train.global_batch_size=8", "schedule.warmup_steps=1", "data.threads=1", "log.every_steps=2"),
)


def checked(command, cwd, **env):
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=environment() | env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def build(kind: str, source: Path, out: Path) -> Path:
    checked([sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", out, source], out)
    (built,) = out.iterdir()
    return built


def files_below(folder: str) -> set[str]:
    """What the checkout has there, besides caches."""
    found = (path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in found}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Folder that the wheel was installed into."""
    target = tmp_path_factory.mktemp("installed") / "site"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-index",
        "--no-compile",
        "--disable-pip-version-check",
    ]
    checked([*pip, "--target", target, wheel], target.parent, PIP_CONFIG_FILE=os.devnull)
    return target


def test_the_wheel_holds_code_recipes_shards_licences_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        found = set(archive.namelist())
        shipped = {name: archive.read(name) for name in found if name.startswith("vitpt/_shipped/")}
    about = f"vitpt-{vitpt.__version__}.dist-info"
    described = {"METADATA", "WHEEL", "RECORD", "entry_points.txt"}
    described |= {"licenses/LICENSE", "licenses/shards/eurosat_mini/LICENSE.txt"}
    data = files_below("recipes") | files_below("shards")
    assert found == files_below("vitpt") | {f"vitpt/_shipped/{name}" for name in data} | {
        f"{about}/{n}" for n in described
    }
    assert all(shipped[f"vitpt/_shipped/{name}"] == (ROOT / name).read_bytes() for name in data)
    assert {
        "recipes/quickstart.yaml",
        "shards/eurosat_mini/manifest.json",
        "shards/eurosat_mini/val-000000.tar",
    } <= data
    assert wheel.name.endswith("-py3-none-any.whl")
    assert wheel.stat().st_size < 20e6


def test_dali_is_required_on_linux_alone(wheel):
    with zipfile.ZipFile(wheel) as archive:
        metadata = Parser().parsestr(archive.read(f"vitpt-{vitpt.__version__}.dist-info/METADATA").decode())
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    platforms = {
        ("linux", "x86_64"): True,
        ("linux", "aarch64"): True,
        ("linux", "ppc64le"): False,
        ("darwin", "arm64"): False,
        ("win32", "AMD64"): False,
    }
    by_platform = {}
    for system, machine in platforms:
        values = {"sys_platform": system, "platform_machine": machine, "extra": ""}
        required = map(Requirement, metadata.get_all("Requires-Dist"))
        by_platform[system, machine] = {r.name for r in required if r.marker is None or r.marker.evaluate(values)}
    everywhere = by_platform["darwin", "arm64"]
    assert {"torch", "accelerate", "simplejpeg", "pillow", "safetensors"} <= everywhere
    for platform, has_dali in platforms.items():
        dali = {name for name in by_platform[platform] if name.startswith("nvidia-dali")}
        assert len(dali) == has_dali, platform
        assert by_platform[platform] - dali == everywhere


def test_an_installed_copy_needs_no_checkout(installed, tmp_path):
    def run(*args):
        return checked([sys.executable, "-m", "vitpt", *args], tmp_path, PYTHONPATH=str(installed))

    overrides = [part for value in TINY for part in ("-o", value)]
    code = "import vitpt; from vitpt.fsio import shipped; print(vitpt.__file__, shipped('shards'), shipped('recipes'))"
    places = checked([sys.executable, "-c", code], tmp_path, PYTHONPATH=str(installed)).stdout.split()
    assert [Path(place).is_relative_to(installed) for place in places] == [True] * 3
    script = checked([installed / "bin/vitpt", "--version"], tmp_path, PYTHONPATH=str(installed))
    assert script.stdout == f"vitpt {vitpt.__version__}\n"
    names = {recipe["name"] for recipe in json.loads(run("recipe", "list", "--json").stdout)}
    assert names == {path.stem for path in (ROOT / "recipes").glob("*.yaml")}

    run("pretrain", "quickstart", *overrides)
    model = [part for value in TINY if not value.startswith("model.") for part in ("-o", value)]
    tuned = run("finetune", *model)
    assert tuned.stderr.startswith("fine-tuning runs/quickstart by recipe quickstart_finetune\n")
    result = json.loads(run("eval", "--json").stdout)
    assert (result["data"], result["samples"], result["bad"]) == ("bundled:eurosat_mini", 500, 0)
    assert result["checkpoint"].startswith("runs/quickstart_finetune/")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"]


def test_an_editable_install_takes_everything_from_the_checkout(tmp_path):
    code = "import sys; from hatchling.build import build_editable; build_editable(sys.argv[1])"
    checked([sys.executable, "-c", code, tmp_path], ROOT)
    (built,) = tmp_path.iterdir()
    with zipfile.ZipFile(built) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        assert names == ["_vitpt.pth"]
        assert Path(archive.read("_vitpt.pth").decode().strip()).samefile(ROOT)
    # what the .pth line does: the checkout on the path
    code = "from vitpt.fsio import shipped; from vitpt.dataset import open_dataset\n"
    code += "print(shipped('recipes')); print(open_dataset('bundled:eurosat_mini').root)"
    found = checked([sys.executable, "-c", code], tmp_path, PYTHONPATH=str(ROOT)).stdout.splitlines()
    assert found == [str(ROOT / "recipes"), str(ROOT / "shards/eurosat_mini")]


def test_the_source_archive_builds_the_same_wheel(wheel, tmp_path):
    for folder in ("archive", "source", "wheel"):
        (tmp_path / folder).mkdir()
    built = build("sdist", ROOT, tmp_path / "archive")
    with tarfile.open(built) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    found = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    for folder in ("vitpt", "recipes", "shards", "tests"):
        assert files_below(folder) <= found, folder
    assert not [name for name in found if "__pycache__" in name or name.startswith(("runs/", "dist/", "build/"))]
    again = build("wheel", source, tmp_path / "wheel")
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as two:
        names = [
            {i.filename: i.CRC for i in archive.infolist() if "RECORD" not in i.filename} for archive in (one, two)
        ]
    assert names[0] == names[1]
