"""Checkpoints: safetensors and JSON in one folder a step, written whole or not at all.

A checkpoint folder (format version 1) holds `model.safetensors` (`backbone.<timm name>`, `objective.<name>`), `config.json` (what the
model is and how it wants its pixels), and, when it belongs to a run, `optimizer.safetensors`, `ema.safetensors` and `state.json`
(step, samples seen, hashes; a sha256 of every other file). No pickle is ever written or loaded.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from vitpt import __version__
from vitpt.errors import Exit, VitptError
from vitpt.fsio import fsync_folder, remove_temporary_files, sha256_file, write_bytes, write_json, writing

FORMAT = "vitpt-checkpoint"
VERSION = 1
MODEL, EMA, OPTIMIZER = "model", "ema", "optimizer"
Tensors = Mapping[str, torch.Tensor]


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
                _write_tensors(temporary / f"{group}.safetensors", content)
            write_json(temporary / "config.json", _stamped(config))
            files = {path.name: sha256_file(path) for path in sorted(temporary.iterdir())}
            write_json(temporary / "state.json", {**_stamped(state), "files": files})
            fsync_folder(temporary)
            if final.exists():  # damaged, or it would have been resumed from
                shutil.rmtree(final)
            temporary.rename(final)
            fsync_folder(root)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    point(root, "LATEST", final.name)
    return final


def write_model(folder: Path, tensors: Tensors, config: Mapping[str, Any]) -> None:
    """Write a checkpoint folder that holds only a model: `model.safetensors` and `config.json`.

    Raises:
        VitptError: the folder exists already.
    """
    if folder.exists():
        raise VitptError(f"{folder} exists already", hint="give a new name, or remove it first")
    temporary = folder.parent / f".{folder.name}.{os.getpid()}"
    with writing(folder):
        try:
            temporary.mkdir(parents=True)
            _write_tensors(temporary / "model.safetensors", tensors)
            write_json(temporary / "config.json", _stamped(config))
            fsync_folder(temporary)
            temporary.rename(folder)
            fsync_folder(folder.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def point(root: Path, pointer: str, name: str) -> None:
    """Make the small file LATEST or BEST name a checkpoint folder."""
    write_bytes(root / pointer, f"{name}\n".encode())


def pointed(root: Path, pointer: str) -> Path | None:
    """The folder that LATEST or BEST names, if it is there."""
    try:
        folder = root / (root / pointer).read_text().strip()
    except OSError:
        return None
    return folder if (folder / "config.json").is_file() else None


def steps_saved(root: Path) -> list[tuple[int, Path]]:
    """All checkpoint folders under `root`, oldest first."""
    found = [(path.name.removeprefix("step-"), path) for path in root.glob("step-*") if path.is_dir()]
    return sorted((int(number), path) for number, path in found if number.isdigit())


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
    for name, digest in state["files"].items():
        path = folder / name
        if not path.is_file():
            raise VitptError(f"{path}: missing", exit_code=Exit.DATA)
        if sha256_file(path) != digest:
            raise VitptError(f"{path}: damaged (its sha256 is not the one in state.json)", exit_code=Exit.DATA)
    return state


def read_state(folder: Path) -> dict[str, Any]:
    """The content of state.json, its files not checked."""
    return _read_json(folder / "state.json")


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
        raise VitptError(
            f"{path}: no such file or folder", hint="give a run, a checkpoint folder or a converted folder"
        )
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
    config = _read_json(folder / "config.json")
    missing = {"model", "objective", "classes", "pixels"} - config.keys()
    if missing:
        raise VitptError(f"{folder / 'config.json'}: lacks {', '.join(sorted(missing))}", exit_code=Exit.DATA)
    return config


def load_tensors(folder: Path, group: str = MODEL) -> dict[str, torch.Tensor]:
    """Read one group of tensors into fresh memory.

    Raises:
        VitptError: exit 3 when the file is missing or damaged.
    """
    path = folder / f"{group}.safetensors"
    try:
        # clone: load_file maps the file, and a file replaced underneath a mapping ends the process
        return {name: tensor.clone() for name, tensor in load_file(path).items()}
    except FileNotFoundError:
        raise VitptError(f"{path}: missing", exit_code=Exit.DATA) from None
    except (OSError, SafetensorError) as error:
        raise VitptError(f"{path}: not a readable safetensors file ({error})", exit_code=Exit.DATA) from None


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


def _write_tensors(path: Path, tensors: Tensors) -> None:
    content = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    save_file(content, path, metadata={"format": "pt"})
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise VitptError(f"{path}: missing", exit_code=Exit.DATA) from None
    except (OSError, ValueError) as error:
        raise VitptError(f"{path}: not readable as JSON ({error})", exit_code=Exit.DATA) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise VitptError(f"{path}: not written by vitpt (expected format {FORMAT!r})", exit_code=Exit.DATA)
    if content.get("version") != VERSION:
        raise VitptError(
            f"{path}: format version {content.get('version')}, this vitpt reads version {VERSION}",
            hint=f"it was written by {content.get('written_by', 'an unknown version')}: install that version or a newer one",
            exit_code=Exit.DATA,
        )
    return content
