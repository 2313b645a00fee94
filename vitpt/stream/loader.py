"""Batches of pixels, decoded ahead by threads. What is delivered depends on the plans alone."""

import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Literal

import numpy as np
import torch

from vitpt.dataset import Split
from vitpt.stream.choose import Decoder, choose, make_decoders, resolve_threads
from vitpt.stream.gate import Decoded
from vitpt.stream.plan import Plan, Planner
from vitpt.stream.reader import Arena, CrcPolicy, Reader
from vitpt.stream.views import Stored, stored


@dataclass(frozen=True)
class BadSample:
    """A sample that could not be read or decoded: its slot has weight 0.

    Attributes:
        id: sample id.
        name: original path.
        shard: tar file.
        offset: of the image in the tar, bytes.
        reason: one line for a person.
    """

    id: int
    name: str
    shard: str
    offset: int
    reason: str


@dataclass
class Batch:
    """One micro-batch; valid until the next one is asked for, since its memory is used again.

    Attributes:
        plan: what was asked for.
        images: one uint8 tensor (m, S, S, 3) a view, on the device.
        labels: (m,) int64 on the device; -1 where there is none.
        weights: (m,) float32 on the device; 0 for empty slots and bad samples.
        draws: the plan's draws on the device.
        bad: samples that could not be decoded.
        wait_s: how long the caller was blocked, seconds.
    """

    plan: Plan
    images: tuple[torch.Tensor, ...]
    labels: torch.Tensor
    weights: torch.Tensor
    draws: dict[str, torch.Tensor]
    bad: list[BadSample]
    wait_s: float


class Loader:
    """Reads and decodes one rank's micro-batches ahead of the caller.

    Args:
        planner: makes the plans.
        split: where the samples lie.
        size: side of the pictures, pixels.
        decoder: auto, dali_gpu, dali_cpu or cpu.
        threads: decoder threads, or "auto".
        prefetch: micro-batches decoded ahead.
        crc: when payloads are checked against the index's crc32.
        device: where batches are wanted.

    Attributes:
        decoder_name: who decodes.
        decoder_why: why, as a sentence.
        threads: decoder threads.
        converted: delivered samples that had to be converted from an unusual format.
        bad: delivered samples that could not be decoded.

    Raises:
        VitptError: the decoder is not there (exit 4).
    """

    def __init__(
        self,
        planner: Planner,
        split: Split,
        size: int,
        *,
        decoder: str,
        threads: int | Literal["auto"],
        prefetch: int,
        crc: CrcPolicy,
        device: torch.device,
    ) -> None:
        self.planner, self.split, self.size = planner, split, size
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.threads, self.prefetch, self.crc, self.device = resolve_threads(threads), prefetch, crc, device
        self.decoder_name, self.decoder_why = choose(decoder, device, self.threads)
        self.converted = 0
        self.bad = 0

    @contextmanager
    def batches(self, start_step: int, end_step: int | None = None) -> Iterator[Iterator[Batch]]:
        """The micro-batches of steps [start_step, end_step), step by step; endless when neither it nor the plans end.

        Leaving the context, however, stops the threads and frees the memory. What goes wrong in a thread is raised by `next`.
        """
        run = _Run(self, start_step, self.planner.steps if end_step is None else end_step)
        try:
            yield run
        finally:
            run.close()


@dataclass
class _Buffer:
    """Memory of one micro-batch, used again and again."""

    images: tuple[torch.Tensor, ...] = ()
    arenas: dict[int, Arena] = field(default_factory=dict)  # by first row of a chunk
    in_use: Any = None  # CUDA event: the device is done with the memory


@dataclass
class _Job:
    """A planned micro-batch on its way."""

    plan: Plan
    labels: torch.Tensor
    draws: dict[str, torch.Tensor]
    parts: list["Future[Decoded]"]


class _Run(Iterator[Batch]):
    """The threads and memory of one pass over steps.

    `prefetch` + 1 buffers go round: one with the caller, the others being filled. Planning, reading and decoding run in the
    pool; the caller's thread only waits and hands over.
    """

    def __init__(self, loader: Loader, start_step: int, end_step: int | None) -> None:
        self._loader = loader
        planner = loader.planner
        self._todo = _steps(start_step, end_step, planner.slots.micros)
        self._reader = Reader(loader.split, loader.crc)
        self._local = threading.local()
        decoders = make_decoders(loader.decoder_name, planner.slots.size, loader.threads, loader.device)
        self._decoders: SimpleQueue[Decoder] = SimpleQueue()
        for decoder in decoders:
            self._decoders.put(decoder)
        self._all_decoders = decoders
        self._pool = _threads(loader.threads, "vitpt-loader", loader.device)
        self._decode_pool = (
            _threads(len(decoders), "vitpt-decode", loader.device) if decoders[0].whole_batches else None
        )
        self._copies = _copy_stream(loader.device) if loader.decoder_name != "dali_gpu" else None
        self._free: deque[_Buffer] = deque(_Buffer() for _ in range(loader.prefetch + 1))
        self._jobs: deque[tuple[_Buffer, Future[_Job]]] = deque()
        self._held: _Buffer | None = None
        self._submit()

    def __next__(self) -> Batch:
        begin = time.perf_counter()
        self._take_back()
        self._submit()
        if not self._jobs:
            raise StopIteration
        buffer, planned = self._jobs.popleft()
        job = planned.result()
        outcomes = [part.result() for part in job.parts]
        wait_s = time.perf_counter() - begin
        self._held = buffer
        return self._deliver(buffer, job, outcomes, wait_s)

    def close(self) -> None:
        """Stop all threads, close files, free memory."""
        self._todo = iter(())
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._decode_pool is not None:
            self._decode_pool.shutdown(wait=True, cancel_futures=True)
        for decoder in self._all_decoders:
            decoder.close()
        self._reader.close()
        self._jobs.clear()
        self._free.clear()
        self._held = None
        self._local = threading.local()

    def _take_back(self) -> None:
        """Take the last batch's memory back from the caller."""
        if self._held is None:
            return
        if self._loader.device.type == "cuda" and self._copies is None:
            self._held.in_use = torch.cuda.current_stream(self._loader.device).record_event()
        self._free.append(self._held)
        self._held = None

    def _submit(self) -> None:
        """Start as many micro-batches as there is memory for."""
        while self._free:
            following = next(self._todo, None)
            if following is None:
                return
            buffer = self._free.popleft()
            self._jobs.append((buffer, self._pool.submit(self._start, buffer, *following)))

    def _start(self, buffer: _Buffer, step: int, micro: int) -> _Job:
        """Plan a micro-batch and start reading and decoding it."""
        loader = self._loader
        plan = loader.planner.plan(step, micro)
        rows = plan.rows
        filled = rows >= 0
        safe = np.where(filled, rows, 0)
        labels = np.where(filled, loader.split.label[safe], -1).astype(np.int64)
        views = tuple(_stored_view(loader.split, plan, i, safe, filled) for i in range(len(plan.views)))
        if buffer.in_use is not None:
            buffer.in_use.synchronize()
        if not buffer.images:
            buffer.images = tuple(self._memory(len(rows), view.size) for view in views)
        chunk = 16 if len(rows) >= 16 * loader.threads else 8
        parts = [slice(first, min(first + chunk, len(rows))) for first in range(0, len(rows), chunk)]
        if self._decode_pool is None:
            futures = [self._pool.submit(self._read_and_decode, plan, views, buffer.images, part) for part in parts]
        else:
            for part in parts:
                buffer.arenas.setdefault(part.start, Arena())
            reads = [self._pool.submit(self._read, plan, part, buffer.arenas[part.start]) for part in parts]
            futures = [self._decode_pool.submit(self._decode_whole, reads, views, buffer.images)]
        draws = {name: self._pinned(torch.from_numpy(values)) for name, values in plan.draws.items()}
        return _Job(plan, self._pinned(torch.from_numpy(labels)), draws, futures)

    def _read(self, plan: Plan, part: slice, arena: Arena) -> list[memoryview | str | None]:
        return self._reader.read(plan.rows[part], plan.visits[part], arena)

    def _read_and_decode(
        self, plan: Plan, views: tuple[Stored, ...], images: tuple[torch.Tensor, ...], part: slice
    ) -> Decoded:
        """Read and decode some rows in this thread, whose buffers are used again."""
        arena = getattr(self._local, "arena", None)
        if arena is None:
            arena = self._local.arena = Arena()
        read = self._read(plan, part, arena)
        outcome = self._decode(self._all_decoders[0], read, [view[part] for view in views], [i[part] for i in images])
        return Decoded([(part.start + row, reason) for row, reason in outcome.bad], outcome.converted)

    def _decode_whole(
        self,
        reads: list["Future[list[memoryview | str | None]]"],
        views: tuple[Stored, ...],
        images: tuple[torch.Tensor, ...],
    ) -> Decoded:
        """Decode a whole micro-batch once all of it was read."""
        read = [payload for part in reads for payload in part.result()]
        decoder = self._decoders.get()
        try:
            return self._decode(decoder, read, list(views), list(images))
        finally:
            self._decoders.put(decoder)

    @staticmethod
    def _decode(
        decoder: Decoder, read: list[memoryview | str | None], views: list[Stored], images: list[torch.Tensor]
    ) -> Decoded:
        bad = {row: reason for row, reason in enumerate(read) if isinstance(reason, str)}
        payloads = [None if isinstance(payload, str) else payload for payload in read]
        converted = 0
        for view, out in zip(views, images, strict=True):
            decoded = decoder.decode(payloads, view, out)
            converted = max(converted, decoded.converted)
            for row, reason in decoded.bad:
                bad.setdefault(row, reason)
        return Decoded(sorted(bad.items()), converted)

    def _deliver(self, buffer: _Buffer, job: _Job, outcomes: list[Decoded], wait_s: float) -> Batch:
        """The batch on the device, its bad samples named."""
        plan, split = job.plan, self._loader.split
        weights = (plan.ids >= 0).astype(np.float32)
        bad: list[BadSample] = []
        for outcome in outcomes:
            self._loader.converted += outcome.converted
            for slot, reason in outcome.bad:
                weights[slot] = 0
                bad.append(_bad_sample(split, int(plan.ids[slot]), int(plan.rows[slot]), reason))
        self._loader.bad += len(bad)
        host = [*buffer.images, job.labels, self._pinned(torch.from_numpy(weights)), *job.draws.values()]
        tensors = self._to_device(buffer, host)
        views = len(buffer.images)
        draws = dict(zip(job.draws, tensors[views + 2 :], strict=True))
        return Batch(plan, tuple(tensors[:views]), tensors[views], tensors[views + 1], draws, bad, wait_s)

    def _to_device(self, buffer: _Buffer, host: list[torch.Tensor]) -> list[torch.Tensor]:
        device = self._loader.device
        if device.type == "cpu":
            return host
        if self._copies is None:  # the images are there already
            return [tensor.to(device, non_blocking=True) for tensor in host]
        # A stream of its own lets the copy overlap with the step before, which may still be running on the device.
        with torch.cuda.stream(self._copies):
            tensors = [tensor.to(device, non_blocking=True) for tensor in host]
            buffer.in_use = self._copies.record_event()
        current = torch.cuda.current_stream(device)
        current.wait_stream(self._copies)
        for tensor in tensors:
            tensor.record_stream(current)
        return tensors

    def _memory(self, slots: int, size: int) -> torch.Tensor:
        """Uninitialised (slots, S, S, 3) uint8 where the decoder writes."""
        shape = (slots, size, size, 3)
        if self._loader.decoder_name == "dali_gpu":
            return torch.empty(shape, dtype=torch.uint8, device=self._loader.device)
        return torch.empty(shape, dtype=torch.uint8, pin_memory=self._loader.device.type == "cuda")

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory() if self._loader.device.type == "cuda" else tensor


def _steps(start: int, end: int | None, micros: int) -> Iterator[tuple[int, int]]:
    """(step, micro-batch) in the order of delivery."""
    step = start
    while end is None or step < end:
        for micro in range(micros):
            yield step, micro
        step += 1


def _stored_view(split: Split, plan: Plan, index: int, safe_rows: np.ndarray, filled: np.ndarray) -> Stored:
    """A view of the plan in stored pixels; an empty slot looks at an image of one pixel."""
    view = plan.views[index]
    width = np.where(filled, split.width[safe_rows], 1).astype(np.int32)
    height = np.where(filled, split.height[safe_rows], 1).astype(np.int32)
    lying = view.orient >= 5  # the index has upright sizes
    return stored(view, np.where(lying, height, width), np.where(lying, width, height))


def _bad_sample(split: Split, sample: int, row: int, reason: str) -> BadSample:
    shard = split.shards[int(split.shard[row])].file
    return BadSample(sample, split.sample_name(row), shard, int(split.offset[row]), reason)


def _threads(count: int, name: str, device: torch.device) -> ThreadPoolExecutor:
    """A pool whose threads use this device; else each would open a context on the first GPU for its pinned memory."""
    if device.type == "cuda":
        return ThreadPoolExecutor(count, name, torch.cuda.set_device, (device,))
    return ThreadPoolExecutor(count, name)


def _copy_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
