"""Models between vitpt checkpoints, timm folders and Google's `.npz` files: exact, or refused."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vitpt import checkpoint
from vitpt.convert import google, timm
from vitpt.convert.weights import Weights, largest_difference, read_native, write_native
from vitpt.errors import Exit, VitptError
from vitpt.fsio import make_folder, parse_json, require_free_space

Format = Literal["native", "timm", "google"]


@dataclass(frozen=True)
class Conversion:
    """What a conversion did.

    Args:
        source: the folder or file that was read.
        source_format: its format.
        difference: largest absolute difference of features and logits on random images, between this package's model and an
            independent computation from the other format's file.
        parameters: numbers that were written.
        num_classes: classes of the head; 0 without one.
        notes: what did not come along, one sentence each.
    """

    source: Path
    source_format: Format
    difference: float
    parameters: int
    num_classes: int
    notes: tuple[str, ...]


def convert(source: Path, destination: Path, to: Format, *, drop_head: bool = False) -> Conversion:
    """Convert a model; the destination appears whole and checked, or not at all.

    Args:
        source: a run, a checkpoint folder, a timm folder or a `.npz` file.
        destination: a new folder, or a new file ending in `.npz` for `google`.
        to: the format to write.
        drop_head: write the backbone alone.

    Raises:
        VitptError: the destination exists, the source is missing (exit 2) or damaged (exit 3), or a part of the model has no
            place in the format.
    """
    if destination.exists():
        raise VitptError(f"{destination} exists already", hint="give a new name, or remove it first")
    if to == "google" and destination.suffix != ".npz":
        raise VitptError(f"{destination}: the name of a Google file ends in .npz")
    source, source_format = find_source(source)
    if source_format == to:
        raise VitptError(f"{source} is a {to} model already")
    weights, difference = _read(source, source_format)
    if drop_head:
        weights = weights.without_head()
    if to != "native" and weights.config.pos_embed != "learned":
        weights = weights.noting(f"positions ({weights.config.pos_embed}) are written as a table that can be trained")
    parameters = sum(value.numel() for value in (*weights.backbone.values(), *weights.head.values()))
    make_folder(destination.parent)
    require_free_space(destination.parent, 4 * parameters, "the converted model")
    if to == "native":
        write_native(weights, destination)
    elif to == "timm":
        difference = max(difference, timm.write(weights, destination))
    else:
        difference = max(difference, google.write(weights, destination))
        weights = weights.noting(*google.left_out(weights))
    return Conversion(source, source_format, difference, parameters, weights.num_classes, weights.notes)


def _read(source: Path, source_format: Format) -> tuple[Weights, float]:
    """The model of a file, and how far its outputs are from those computed from the file alone."""
    if source_format == "native":
        return read_native(source), 0.0
    module = timm if source_format == "timm" else google
    with _foreign(source):
        weights = module.read(source)
        # a file must mean what it was read as, before anything is written
        return weights, largest_difference(weights, lambda images: module.reference(source, images), source)


@contextmanager
def _foreign(source: Path) -> Iterator[None]:
    """Whatever goes wrong while another program's file is taken apart, names and shapes being anything, is the file's fault."""
    try:
        yield
    except VitptError as error:
        if error.exit_code == Exit.DATA:
            raise
        raise VitptError(f"{source}: {error.message}", hint=error.hint, exit_code=Exit.DATA) from None
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise VitptError(f"{source}: not a plain Vision Transformer ({reason})", exit_code=Exit.DATA) from error


def find_source(path: Path) -> tuple[Path, Format]:
    """The folder or file that a path means, and its format.

    Raises:
        VitptError: exit 2 when there is none.
    """
    if path.is_file():
        return path, "google"
    folder = checkpoint.find(path)
    try:
        described = parse_json((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        described = {}  # the checkpoint's own reader says what is wrong with it
    return folder, "timm" if isinstance(described, dict) and "architecture" in described else "native"


def to_timm(source: Path, destination: Path, *, drop_head: bool = False) -> float:
    """Write a timm folder; returns the largest difference of features and logits."""
    return convert(source, destination, "timm", drop_head=drop_head).difference


def to_google(source: Path, destination: Path, *, drop_head: bool = False) -> float:
    """Write a Google `.npz` file; returns the largest difference of features and logits."""
    return convert(source, destination, "google", drop_head=drop_head).difference


def from_timm(source: Path, destination: Path, *, drop_head: bool = False) -> float:
    """Write a checkpoint folder from a timm folder; returns the largest difference of features and logits."""
    return convert(source, destination, "native", drop_head=drop_head).difference


def from_google(source: Path, destination: Path, *, drop_head: bool = False) -> float:
    """Write a checkpoint folder from a Google `.npz` file; returns the largest difference of features and logits."""
    return convert(source, destination, "native", drop_head=drop_head).difference


__all__ = [
    "Conversion",
    "Format",
    "Weights",
    "convert",
    "find_source",
    "from_google",
    "from_timm",
    "to_google",
    "to_timm",
]
