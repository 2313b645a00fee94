"""Checkpoints: safetensors and JSON in one folder a step, written whole or not at all.

A checkpoint folder (format version 1) holds `model.safetensors` (`backbone.<timm name>`, `objective.<name>`), `config.json` (what the
model is and how it wants its pixels), and, when it belongs to a run, `optimizer.safetensors`, `ema.safetensors` and `state.json`
(step, samples seen, hashes; a sha256 of every other file). No pickle is ever written or loaded.
"""

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from vitpt import __version__
from vitpt.errors import Exit, VitptError
from vitpt.fsio import (
    encode_json,
    missing_path,
    parse_json,
    publish_folder,
    remove_temporary_files,
    sha256_file,
    write_bytes,
    write_json,
    writing,
)
from vitpt.recipe import schema

FORMAT = "vitpt-checkpoint"
VERSION = 1
MODEL, EMA, OPTIMIZER = "model", "ema", "optimizer"
Tensors = Mapping[str, torch.Tensor]

_FOLDER = re.compile(r"step-\d{8,}")
_Size = Annotated[int, Field(ge=1, le=1 << 20)]
_Share = Annotated[float, Field(ge=0, lt=1)]
_Positive = Annotated[float, Field(gt=0)]


class _Content(BaseModel):
    """What a file must hold, whoever wrote it; more is allowed."""

    model_config = ConfigDict(allow_inf_nan=False)


class _Model(_Content):
    """A `ViTConfig`, whose own checks come when it is built."""

    model_config = ConfigDict(allow_inf_nan=False, extra="forbid")
    width: _Size
    depth: _Size
    heads: _Size
    mlp: _Size
    patch: _Size
    res: _Size | tuple[_Size, _Size]
    pool: Literal["tok", "gap"]
    pos_embed: Literal["learned", "sincos2d", "none"]
    gelu: Literal["tanh", "erf"]
    dropout: _Share
    drop_path: _Share
    norm_eps: Annotated[float, Field(gt=0, lt=1)]


class _Pixels(_Content):
    res: _Size | tuple[_Size, _Size]
    mean: tuple[float, float, float]
    std: tuple[_Positive, _Positive, _Positive]
    crop: schema.EvalCrop
    interpolation: str


class _Config(_Content):
    """config.json."""

    model: _Model
    objective: Annotated[schema.Supervised | schema.Mpp, Field(discriminator="kind")] | None
    classes: list[str] | None
    pixels: _Pixels


class _Best(_Content):
    metric: str
    value: float
    step: int


class _State(_Content):
    """state.json of a run's checkpoint: what a resume reads."""

    step: Annotated[int, Field(ge=0)]
    files: dict[str, str]
    recipe_hash: str
    data_hash: str
    data_digest: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    best: _Best | None
    totals: dict[str, tuple[float, float]]
    pending: dict[str, Any] | None


def folder_name(step: int) -> str:
    """Name of the checkpoint folder of a step."""
    return f"step-{step:08d}"


def save(
    root: Path, step: int, tensors: Mapping[str, Tensors], state: Mapping[str, Any], config: Mapping[str, Any]
) -> Path:
    """Write the checkpoint of a step under `root` and point LATEST at it.

    Args:
        root: the run's `checkpoints` folder.
        step: optimizer updates done.
        tensors: group (`model`, `optimizer`, `ema`) -> name -> tensor.
        state: content of state.json, without the file hashes.
        config: content of config.json, without format and version.

    Returns:
        The folder, complete and synced under its final name.
    """
    final = root / folder_name(step)
    temporary = root / f".{final.name}.{os.getpid()}"
    with writing(root):
        root.mkdir(parents=True, exist_ok=True)
        remove_leftovers(root)
        try:
            temporary.mkdir()
            for group, content in tensors.items():
                write_tensors(temporary / f"{group}.safetensors", content)
            write_json(temporary / "config.json", _stamped(config))
            files = {path.name: sha256_file(path) for path in sorted(temporary.iterdir())}
            write_json(temporary / "state.json", {**_stamped(state), "files": files})
            if final.exists():  # damaged, or it would have been resumed from
                shutil.rmtree(final)
            publish_folder(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    point(root, "LATEST", final.name)
    return final


def write_model(folder: Path, tensors: Tensors, config: Mapping[str, Any]) -> None:
    """Write a checkpoint folder that holds only a model: `model.safetensors` and `config.json`.

    Raises:
        VitptError: the folder exists already (exit 2), or could not be read again (exit 3).
    """
    if folder.exists():
        raise VitptError(f"{folder} exists already", hint="give a new name, or remove it first")
    _require(encode_json(_stamped(config)), _Config, folder / "config.json")
    temporary = folder.parent / f".{folder.name}.{os.getpid()}"
    with writing(folder):
        try:
            temporary.mkdir(parents=True)
            write_tensors(temporary / "model.safetensors", tensors)
            write_json(temporary / "config.json", _stamped(config))
            publish_folder(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def point(root: Path, pointer: str, name: str) -> None:
    """Make the small file LATEST or BEST name a checkpoint folder."""
    write_bytes(root / pointer, f"{name}\n".encode())


def pointed(root: Path, pointer: str) -> Path | None:
    """The folder that LATEST or BEST names, if it is there."""
    try:
        name = (root / pointer).read_text(errors="replace").strip()
    except OSError:
        return None
    return root / name if _FOLDER.fullmatch(name) and (root / name / "config.json").is_file() else None


def steps_saved(root: Path) -> list[tuple[int, Path]]:
    """All checkpoint folders under `root`, oldest first."""
    found = [path for path in root.glob("step-*") if _FOLDER.fullmatch(path.name) and path.is_dir()]
    return sorted((int(path.name.removeprefix("step-")), path) for path in found)


def latest_good(root: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint whose files all verify, and one line for each newer one that does not."""
    damaged = []
    for _, path in reversed(steps_saved(root)):
        try:
            verify(path)
        except VitptError as error:
            damaged.append(error.message)
        else:
            return path, damaged
    return None, damaged


def verify(folder: Path) -> dict[str, Any]:
    """Check every file of a run's checkpoint against its sha256.

    Returns:
        The content of state.json.

    Raises:
        VitptError: exit 3, naming the damaged file.
    """
    state = read_state(folder)
    if folder_name(state["step"]) != folder.name:
        raise VitptError(f"{folder / 'state.json'}: damaged (it says step {state['step']})", exit_code=Exit.DATA)
    for name, digest in state["files"].items():
        path = folder / name
        if not path.is_file():
            raise VitptError(f"{path}: missing", exit_code=Exit.DATA)
        if sha256_file(path) != digest:
            raise VitptError(f"{path}: damaged (its sha256 is not the one in state.json)", exit_code=Exit.DATA)
    return state


def read_state(folder: Path) -> dict[str, Any]:
    """The content of state.json, its files not checked."""
    return _read_json(folder / "state.json", _State)


def prune(root: Path, keep_last: int) -> None:
    """Remove all but the newest `keep_last` checkpoints; BEST stays."""
    best = pointed(root, "BEST")
    for _, path in steps_saved(root)[:-keep_last]:
        if path != best:
            shutil.rmtree(path)


def remove_leftovers(root: Path) -> None:
    """Remove what a killed process left half-written."""
    for path in root.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)
    remove_temporary_files(root)


def find(path: Path) -> Path:
    """The checkpoint folder meant by a path: a run (its BEST, else its newest), a `checkpoints` folder, or a checkpoint itself.

    Raises:
        VitptError: exit 2 when there is none.
    """
    if not path.exists():
        raise missing_path(path, "file or folder")
    if (path / "config.json").is_file():
        return path
    for root in (path / "checkpoints", path):
        newest = steps_saved(root)
        folder = pointed(root, "BEST") or (newest[-1][1] if newest else None)
        if folder is not None:
            return folder
    raise VitptError(
        f"{path}: holds no checkpoint (looked for config.json and checkpoints/step-*)",
        hint="give a run, a checkpoint folder or a converted folder",
    )


def read_config(folder: Path) -> dict[str, Any]:
    """The content of config.json: model, objective, classes, pixels."""
    return _read_json(folder / "config.json", _Config)


def read_model_config(folder: Path) -> dict[str, Any]:
    """The content of config.json, compared with the shapes in the file of the weights: no number in it is made up.

    Raises:
        VitptError: exit 3 when one of the files is missing or damaged, or when they do not belong together.
    """
    config, path = read_config(folder), weights_file(folder)
    shapes = _shapes(path)
    model, blocks = config["model"], {name.split(".")[2] for name in shapes if name.startswith("backbone.blocks.")}
    found = {
        "width": shapes.get("backbone.patch_embed.proj.weight", [0])[0],
        "patch": shapes.get("backbone.patch_embed.proj.weight", [0])[-1],
        "mlp": shapes.get("backbone.blocks.0.mlp.fc1.bias", [0])[0],
        "depth": len(blocks),
    }
    for key, number in found.items():
        if model[key] != number:
            raise VitptError(
                f"{folder / 'config.json'}: model.{key} is {model[key]}, but {path.name} has {number}",
                exit_code=Exit.DATA,
            )
    supervised = (config["objective"] or {}).get("kind") == "supervised"
    heads = shapes.get("objective.head.bias") if supervised else None
    if config["classes"] is not None and heads is not None and len(config["classes"]) != heads[0]:
        raise VitptError(
            f"{folder / 'config.json'}: {len(config['classes'])} classes, but {path.name} has {heads[0]}",
            exit_code=Exit.DATA,
        )
    return config


def _shapes(path: Path) -> dict[str, list[int]]:
    """Shape of each tensor of a file, from its head."""
    try:
        path.open("rb").close()  # safetensors calls missing what it may not read
        with safe_open(path, "pt") as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from None


def load_tensors(folder: Path, group: str = MODEL) -> dict[str, torch.Tensor]:
    """Read one group of tensors into fresh memory.

    Raises:
        VitptError: exit 3 when the file is missing or damaged.
    """
    path = folder / f"{group}.safetensors"
    try:
        path.open("rb").close()
        # clone: load_file maps the file, and a file replaced underneath a mapping ends the process
        return {name: tensor.clone() for name, tensor in load_file(path).items()}
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from None


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights a checkpoint stands for: the moving average when the run kept one, else the model."""
    return load_tensors(folder, EMA if (folder / f"{EMA}.safetensors").is_file() else MODEL)


@torch.no_grad()
def load_into(parameters: Mapping[str, torch.nn.Parameter], tensors: Tensors, source: str) -> None:
    """Copy tensors into parameters of the same names.

    Raises:
        VitptError: a tensor is missing, unknown or of another shape (exit 3); `source` is named.
    """
    missing, unknown = sorted(parameters.keys() - tensors.keys()), sorted(tensors.keys() - parameters.keys())
    if missing or unknown:
        what = f"lacks {missing[0]}" if missing else f"has an unknown tensor {unknown[0]}"
        raise VitptError(f"{source}: {what}; these are not the weights of this model", exit_code=Exit.DATA)
    for name, parameter in parameters.items():
        if parameter.shape != tensors[name].shape:
            found, expected = tuple(tensors[name].shape), tuple(parameter.shape)
            raise VitptError(f"{source}: {name} has shape {found}, the model needs {expected}", exit_code=Exit.DATA)
        parameter.copy_(tensors[name])


def weights_file(folder: Path) -> Path:
    """The file that `load_weights` reads."""
    ema = folder / f"{EMA}.safetensors"
    return ema if ema.is_file() else folder / f"{MODEL}.safetensors"


def _stamped(content: Mapping[str, Any]) -> dict[str, Any]:
    return {"format": FORMAT, "version": VERSION, "written_by": f"vitpt {__version__}", **content}


def write_tensors(path: Path, tensors: Tensors) -> None:
    """Write a new safetensors file and flush it to the disk.

    Raises:
        OSError: the system refuses; safetensors tells it in words only.
    """
    content = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    try:
        save_file(content, path, metadata={"format": "pt"})
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _unreadable(path: Path, error: Exception) -> VitptError:
    if isinstance(error, FileNotFoundError):
        return VitptError(f"{path}: missing", exit_code=Exit.DATA)
    why = error.strerror if isinstance(error, OSError) else error
    what = f"not a readable safetensors file ({why})"
    return VitptError(f"{path}: {what}", exit_code=Exit.DATA)


def _read_json(path: Path, expected: type[_Content]) -> dict[str, Any]:
    try:
        data = path.read_bytes()
        content = parse_json(data)
    except FileNotFoundError:
        raise VitptError(f"{path}: missing", exit_code=Exit.DATA) from None
    except (OSError, ValueError) as error:
        raise VitptError(f"{path}: not readable as JSON ({error})", exit_code=Exit.DATA) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        foreign = isinstance(content, dict) and "architecture" in content
        raise VitptError(
            f"{path}: not written by vitpt (expected format {FORMAT!r})",
            hint="this is a timm folder: vitpt convert SRC DST --to native makes a checkpoint of it"
            if foreign
            else None,
            exit_code=Exit.DATA,
        )
    if content.get("version") != VERSION:
        raise VitptError(
            f"{path}: format version {content.get('version')}, this vitpt reads version {VERSION}",
            hint=f"it was written by {content.get('written_by', 'an unknown version')}: install that version or a newer one",
            exit_code=Exit.DATA,
        )
    _require(data, expected, path)
    return content


def _require(data: bytes, expected: type[_Content], path: Path) -> None:
    try:
        expected.model_validate_json(data, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "content"
        raise VitptError(f"{path}: damaged ({where}: {first['msg']})", exit_code=Exit.DATA) from None
