"""Who decodes, and with how many threads."""

import importlib
import os
from typing import Any, Literal

import torch

from vitpt.errors import Exit, VitptError
from vitpt.stream.decode_cpu import CpuDecoder
from vitpt.stream.decode_dali import DaliDecoder
from vitpt.stream.gate import nvimgcodec

Decoder = CpuDecoder | DaliDecoder

MOST_THREADS = 8
"""Threads that `auto` takes at most: beyond, they mostly wait for each other."""

DALI_PACKAGE = "nvidia-dali-cuda130"


def choose(decoder: str, device: torch.device, threads: int) -> tuple[str, str]:
    """The decoder's name and why it is the one, as a sentence for a person.

    `auto` takes DALI on a GPU where both are there, else the CPU.

    Args:
        decoder: auto, dali_gpu, dali_cpu or cpu.
        device: where the pictures are wanted.
        threads: of the decoder.

    Raises:
        VitptError: what the recipe asks for is not there (exit 4).
    """
    missing = _dali_missing()
    if decoder == "auto":
        if device.type == "cuda" and missing is None:
            return "dali_gpu", f"auto: {device} and DALI are there"
        why = f"no GPU (device {device.type})" if device.type != "cuda" else missing
        return "cpu", f"auto: {why}; {_cpu_engine()}, {_count(threads)}"
    if decoder == "cpu":
        return "cpu", f"as asked; {_cpu_engine()}, {_count(threads)}"
    if decoder not in ("dali_gpu", "dali_cpu"):
        raise VitptError(f"data.decoder: {decoder!r}, expected auto, dali_gpu, dali_cpu or cpu")
    if missing is not None:
        raise VitptError(
            f"data.decoder {decoder}: {missing}",
            hint=f"install {DALI_PACKAGE} (Linux), or use -o data.decoder=cpu",
            exit_code=Exit.ENVIRONMENT,
        )
    if decoder == "dali_gpu" and device.type != "cuda":
        raise VitptError(
            f"data.decoder dali_gpu: needs a CUDA device, but this process runs on {device.type}",
            hint="use -o data.decoder=cpu (or dali_cpu)",
            exit_code=Exit.ENVIRONMENT,
        )
    return decoder, f"as asked; {_count(threads)}"


def resolve_threads(threads: int | Literal["auto"]) -> int:
    """Decoder threads of this process: `auto` leaves one core of its share of the machine to the main thread."""
    if threads != "auto":
        return threads
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return min(MOST_THREADS, max(1, cores // processes - 1))


def make_decoders(name: str, batch: int, threads: int, device: torch.device) -> list[Decoder]:
    """The decoders of one loader; each of several is used by one thread at a time.

    Args:
        name: as `choose` returned it.
        batch: slots of a micro-batch.
        threads: of the decoder.
        device: where the pictures are wanted.
    """
    if name == "cpu":
        return [CpuDecoder(nvimgcodec())]
    if name == "dali_cpu":
        return [DaliDecoder(batch, threads, torch.device("cpu"))]
    # Two, so that one batch's work on the host overlaps with the other's on the GPU.
    return [DaliDecoder(batch, max(1, threads // 2), device) for _ in range(2)]


def _dali_missing() -> str | None:
    """Why DALI cannot be used, or None."""
    try:
        importlib.import_module("nvidia.dali")
    except ImportError as err:
        return "DALI is not installed" if isinstance(err, ModuleNotFoundError) else f"DALI cannot be loaded ({err})"
    return None if nvimgcodec() is not None else "nvImageCodec, which DALI's input is checked with, is not installed"


def _cpu_engine() -> str:
    codec: Any = nvimgcodec()
    return "nvImageCodec decodes windows" if codec is not None else "simplejpeg and Pillow decode (no nvImageCodec)"


def _count(threads: int) -> str:
    return f"{threads} thread{'' if threads == 1 else 's'}"
