"""The command line: which commands there are, and the border where errors become one message and an exit status."""

import errno
import os
import signal
import sys
from collections.abc import Callable
from inspect import Parameter, signature
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from vitpt import __version__
from vitpt.cli import convert, data, evaluate, finetune, pretrain, recipe, shard
from vitpt.cli.console import escape_name, write_line
from vitpt.errors import Exit, Preempted, VitptError


class ErrorBorder(TyperGroup):
    """Turns the failures a person can do something about into one message on stderr and an exit status.

    Everything else is a bug and keeps its traceback (exit status 1).
    """

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Read the command line."""
        return _reported(super().make_context, *args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        return _reported(super().invoke, ctx)


def _reported(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return _one_line(function, *args, **kwargs)
    except typer.Exit:
        raise
    except Exception:
        if not _stopped_by:
            raise
        # a signal in the middle of an import leaves a module half done, and what fails is that
        fail(*_STOPPED[_stopped_by[0]])


def _one_line(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        require_working_folder()
        result = function(*args, **kwargs)
        sys.stdout.flush()
        return result
    except VitptError as err:
        fail(err.exit_code, str(err))
    except KeyboardInterrupt:
        fail(*_STOPPED[signal.SIGINT])
    except Preempted:
        fail(*_STOPPED[_stopped_by[0]])
    except MemoryError:
        fail(Exit.ENVIRONMENT, "out of memory")
    except BrokenPipeError:
        # Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(Exit.PIPE_CLOSED) from None
    except OSError as err:
        status = status_of(err)
        if status is None:
            raise
        where = f"{err.filename}: " if err.filename else ""
        fail(status, f"{where}{os.strerror(err.errno or 0)}")
    except EOFError as err:
        raise RuntimeError(f"unexpected end: {err}") from err  # Click takes it for a user who left a prompt
    except RuntimeError as err:
        if not is_out_of_memory(err):
            raise
        fail(
            Exit.ENVIRONMENT,
            str(err).split("\n", 1)[0],
            "Try a smaller -o train.micro_batch_size; the result stays the same.",
        )


_STOPPED: dict[int, tuple[Exit, str, str | None]] = {
    signal.SIGINT: (Exit.INTERRUPTED, "interrupted", None),
    signal.SIGTERM: (Exit.PREEMPTED, "stopped by SIGTERM", "Run the same command again."),
    signal.SIGUSR1: (Exit.PREEMPTED, "stopped by SIGUSR1", "Run the same command again."),
}
_stopped_by: list[int] = []  # as they came


def status_of(err: OSError) -> Exit | None:
    """Exit status of what the system refused; None when it is a bug's business."""
    if err.errno in (errno.ENOSPC, errno.EDQUOT):
        return Exit.ENVIRONMENT
    if err.filename is None:
        return None
    if err.errno in (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR):
        return Exit.USAGE
    return Exit.ENVIRONMENT if err.errno in (errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ESTALE) else None


def require_working_folder() -> None:
    """Refuse to start in a folder that was removed, where no relative path means anything.

    Raises:
        VitptError: exit 2.
    """
    try:
        Path.cwd()
    except FileNotFoundError:
        raise VitptError("the working folder does not exist any more", hint="cd to another one") from None


def is_out_of_memory(err: RuntimeError) -> bool:
    """Whether an error is torch's way of saying that a GPU or the machine has no memory left."""
    return type(err).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator: can't allocate memory" in str(err)


def fail(code: Exit, message: str, hint: str | None = None) -> None:
    """Print a message, and a hint on a line of its own, and end with an exit status."""
    rank = os.environ.get("RANK", "0")
    prefix = "" if rank in ("", "0") else f"[rank {rank}] "
    text = f"{message}\n{hint}" if hint else message
    for line in text.split("\n"):
        write_line(sys.stderr, prefix + escape_name(line))
    raise typer.Exit(code)


def _examples(*lines: str) -> str:
    # \b keeps the lines as they are
    return "\b\n" + "\n".join(["Examples:", *(f"  {line}" for line in lines)])


def _print_version(wanted: bool) -> None:
    if wanted:
        write_line(sys.stdout, f"vitpt {__version__}")
        raise typer.Exit


_SETTINGS: dict[str, Any] = {
    "rich_markup_mode": None,
    "context_settings": {"help_option_names": ["-h", "--help"], "max_content_width": 100},
}

app = typer.Typer(
    cls=ErrorBorder,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    epilog=_examples("vitpt pretrain quickstart", "vitpt shard photos"),
    **_SETTINGS,
)


@app.callback(help="Pretrain Vision Transformers on your own images.")
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_print_version, is_eager=True, show_default=False
        ),
    ] = False,
) -> None:
    pass


def _add(parent: typer.Typer, function: Callable[..., None], name: str, text: str, *examples: str) -> None:
    """Add a command; its options are the function's parameters, its help is `text` and copyable examples."""
    required = any(parameter.default is Parameter.empty for parameter in signature(function).parameters.values())
    parent.command(name, help=text, epilog=_examples(*examples), no_args_is_help=required)(function)


def _add_group(name: str, text: str) -> typer.Typer:
    group = typer.Typer(no_args_is_help=True, **_SETTINGS)
    app.add_typer(group, name=name, help=text)
    return group


_add(
    app,
    shard.shard,
    "shard",
    "Write a folder of images as shards.",
    "vitpt shard photos",
    "vitpt shard photos /data/photos-shards --val-fraction 0.05 -j 8",
)
_add(
    app,
    pretrain.pretrain,
    "pretrain",
    "Pretrain a Vision Transformer by a recipe.",
    "vitpt pretrain quickstart",
    "torchrun --nproc-per-node 8 -m vitpt pretrain vit_b16_mpp -o data.path=/data/photos-shards",
)
_add(
    app,
    finetune.finetune,
    "finetune",
    "Fine-tune a pretrained checkpoint on labelled images.",
    "vitpt finetune",
    "vitpt finetune eurosat_finetune --from runs/eurosat_mpp",
)
_add(
    app,
    evaluate.evaluate,
    "eval",
    "Evaluate a checkpoint on a split.",
    "vitpt eval",
    "vitpt eval runs/eurosat_finetune --split val --json",
)
_add(
    app,
    convert.convert,
    "convert",
    "Convert a model from and to timm folders and Google's .npz files.",
    "vitpt convert runs/eurosat_finetune eurosat-timm --to timm",
    "vitpt convert ViT-B_16.npz vit_b16 --to native",
)

_data = _add_group("data", "Look into shards and at what a run reads of them.")
_add(
    _data,
    data.stream,
    "stream",
    "Recompute which data a run consumes in each step.",
    "vitpt data stream quickstart --steps 0:5",
    "vitpt data stream quickstart --steps 100:101 --samples --json",
)

_recipe = _add_group("recipe", "List, show and check recipes.")
_add(_recipe, recipe.list_recipes, "list", "List the shipped recipes.", "vitpt recipe list", "vitpt recipe list --json")
_add(
    _recipe,
    recipe.show,
    "show",
    "Print a recipe.",
    "vitpt recipe show quickstart > my.yaml",
    "vitpt recipe show vit_b16_mpp -o optim.lr=1e-4 --resolved",
)
_add(
    _recipe,
    recipe.check,
    "check",
    "Check recipes and print everything that is wrong with them.",
    "vitpt recipe check my.yaml",
    "vitpt recipe check recipes/*.yaml --json",
)
_add(
    _recipe,
    recipe.schema,
    "schema",
    "Print the JSON Schema of recipes, for editors.",
    "vitpt recipe schema > recipe.schema.json",
    "vitpt recipe schema | less",
)


class _Interrupt(KeyboardInterrupt):
    """Ctrl-C by another name: Python remembers a plain KeyboardInterrupt that has passed through `exec` (of a dataclass, say) and
    ends the process by the signal, whatever its status was to be."""


def _stop(number: int, frame: FrameType | None) -> None:
    _stopped_by.append(number)
    raise _Interrupt if number == signal.SIGINT else Preempted


def main() -> None:
    """Run the command line: the console entry point."""
    # closed by whoever started this process: what is written to them is for nobody
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    for number in _STOPPED:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _stop)
    app(prog_name="vitpt")
