"""Decoding with DALI, on the CPU or on the GPU: one graph, fed with our own bytes and boxes.

DALI 2.4 can end the process on a bad header or window, so every payload passes the gate first and is replaced where it does not.
What remains are damaged pixels: those raise, the culprit is found one by one, and the batch is fed again without it.
"""

import importlib
import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from vitpt.stream.decode_cpu import GREY, decode_window, new_decoder, put
from vitpt.stream.gate import BadImageError, Decoded, Payload, admit, as_ppm, nvimgcodec
from vitpt.stream.views import HORIZONTAL, TRANSPOSE, VERTICAL, Stored

UInt8 = npt.NDArray[np.uint8]
Int64 = npt.NDArray[np.int64]

ROUNDS = 3
"""How often a batch is fed before its failure is an error of the program."""


class DaliDecoder:
    """Decodes whole batches of at most `batch` payloads. One thread at a time.

    Args:
        batch: largest number of payloads.
        threads: DALI's own threads.
        device: where the pictures are made and stay.

    Raises:
        ImportError: DALI or nvImageCodec is not installed.
    """

    whole_batches = True

    def __init__(self, batch: int, threads: int, device: torch.device) -> None:
        self._codec = nvimgcodec()
        if self._codec is None:
            raise ImportError("nvImageCodec is not installed")
        self._batch, self._threads, self._device = batch, threads, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._pipelines: dict[tuple[int, bool], Any] = {}  # by size, and whether the graph cuts after the resize
        self._placeholder = _small_jpeg()

    def decode(self, payloads: Sequence[Payload | None], stored: Stored, out: torch.Tensor) -> Decoded:
        """Fill `out` with the pictures of payloads, which must stay unchanged meanwhile.

        Shapes: stored (n,), out (n, S, S, 3) uint8 on this decoder's device. Rows without a payload and bad ones become grey.

        Raises:
            RuntimeError: DALI fails although every payload can be decoded.
        """
        files, bad, converted = self._admitted(payloads, stored)
        without = {row for row, _ in bad} | {row for row, payload in enumerate(payloads) if payload is None}
        with torch.cuda.stream(self._stream):  # does nothing on the CPU
            pictures, culprits = self._pictures(files, stored, without)
            _turned_into(pictures, stored.turn, out)
            for row in without:
                out[row].fill_(GREY)
        if self._stream is not None:
            self._stream.synchronize()
        return Decoded(sorted(bad + culprits), converted)

    def close(self) -> None:
        """Free the pipelines; the next batch makes new ones."""
        self._pipelines.clear()

    def _admitted(
        self, payloads: Sequence[Payload | None], stored: Stored
    ) -> tuple[list[UInt8], list[tuple[int, str]], int]:
        """Files that DALI may see, bad rows with reasons, and the number of converted files."""
        files: list[UInt8] = []
        bad: list[tuple[int, str]] = []
        converted = 0
        for row, payload in enumerate(payloads):
            file = self._placeholder
            if payload is not None:
                try:
                    admitted = admit(payload, int(stored.width[row]), int(stored.height[row]), self._codec)
                    if admitted.pixels is None:
                        file = np.frombuffer(payload, dtype=np.uint8)
                    else:
                        file = as_ppm(admitted.pixels)
                        converted += 1
                except BadImageError as err:
                    bad.append((row, err.reason))
            files.append(file)
        return files, bad, converted

    def _pictures(
        self, files: list[UInt8], stored: Stored, without: set[int]
    ) -> tuple[torch.Tensor, list[tuple[int, str]]]:
        """The pictures, not yet turned, and the rows that had to be left out, which are added to `without`."""
        bad: list[tuple[int, str]] = []
        for _ in range(ROUNDS):
            try:
                return self._run(*self._left_out(files, stored, without)), bad
            except RuntimeError as err:
                self.close()  # a pipeline is not valid after an error
                failure = err
                culprits = self._culprits(files, stored, without)
            if not culprits:
                break
            bad += culprits
            without.update(row for row, _ in culprits)
        raise RuntimeError(f"DALI cannot decode a batch of {len(files)}: {failure}") from failure

    def _left_out(self, files: list[UInt8], stored: Stored, rows: set[int]) -> tuple[list[UInt8], Stored]:
        """The batch with a small good image in place of some rows."""
        if not rows:
            return files, stored
        index = sorted(rows)
        box, resize, crop = stored.box.copy(), stored.resize.copy(), stored.crop.copy()
        box[index], resize[index], crop[index] = (0, 0, 1, 1), stored.size, 0
        kept = [self._placeholder if row in rows else file for row, file in enumerate(files)]
        return kept, replace(stored, box=box, resize=resize, crop=crop)

    def _run(self, files: list[UInt8], stored: Stored) -> torch.Tensor:
        """The pictures, not yet turned: (n, S, S, 3) uint8, valid until the next run."""
        cut = bool((stored.resize != stored.size).any())
        kind = (stored.size, cut)
        pipeline = self._pipelines.get(kind)
        if pipeline is None:
            pipeline = self._pipelines[kind] = _pipeline(self._batch, self._threads, self._device, *kind)
        pipeline.feed_input("files", files)
        pipeline.feed_input("start", np.ascontiguousarray(stored.box[:, :2]))
        pipeline.feed_input("shape", np.ascontiguousarray(stored.box[:, 2:]))
        pipeline.feed_input("resize", stored.resize.astype(np.float32))
        if cut:
            pipeline.feed_input("crop", np.ascontiguousarray(stored.crop))
        (pictures,) = pipeline.run()  # without a stream the results are ready when it returns
        return torch.utils.dlpack.from_dlpack(pictures.as_tensor())

    def _culprits(self, files: list[UInt8], stored: Stored, without: set[int]) -> list[tuple[int, str]]:
        """The rows that nvImageCodec cannot decode, with reasons."""
        decoder = new_decoder(self._codec)
        found: list[tuple[int, str]] = []
        for row, file in enumerate(files):
            if row in without:
                continue
            try:
                decode_window(self._codec, decoder, self._codec.CodeStream(file), stored.box[row].tolist())
            except BadImageError as err:
                found.append((row, err.reason))
        return found


def _pipeline(batch: int, threads: int, device: torch.device, size: int, cut: bool) -> Any:
    """The graph: decode the window, resize it, cut the square where the resize leaves more. Feeds: files, start, shape, resize, crop."""
    dali: Any = importlib.import_module("nvidia.dali")
    fn, types = importlib.import_module("nvidia.dali.fn"), importlib.import_module("nvidia.dali.types")
    gpu = device.type == "cuda"
    pipeline = dali.Pipeline(
        batch_size=batch,
        num_threads=threads,
        device_id=(device.index or 0) if gpu else None,
        prefetch_queue_depth=1,  # the loader runs ahead, not DALI
    )
    with pipeline:
        # Integers given by name are absolute pixels; fractions or positions would be read as shares of the image.
        files = fn.external_source(name="files", dtype=types.UINT8, ndim=1, no_copy=True)
        start = fn.external_source(name="start", dtype=types.INT32, ndim=1)
        shape = fn.external_source(name="shape", dtype=types.INT32, ndim=1)
        resize = fn.external_source(name="resize", dtype=types.FLOAT, ndim=1)
        pictures = fn.decoders.image_slice(
            files,
            start=start,
            shape=shape,
            axes=[0, 1],
            device="mixed" if gpu else "cpu",
            output_type=types.RGB,
            adjust_orientation=False,
            jpeg_fancy_upsampling=True,  # as CPU decoders do
        )
        pictures = fn.resize(pictures, size=resize, interp_type=types.INTERP_LINEAR, antialias=True)
        if cut:
            crop = fn.external_source(name="crop", dtype=types.INT32, ndim=1)
            pictures = fn.slice(pictures, start=crop, shape=[size, size], axes=[0, 1])
        pipeline.set_outputs(pictures)
    pipeline.build()
    return pipeline


def _turned_into(pictures: torch.Tensor, turns: UInt8, out: torch.Tensor) -> None:
    """Write pictures (n, S, S, 3) to `out`, each turned by its code."""
    if not out.is_cuda:
        arrays = out.numpy()
        for row, turn in enumerate(turns.tolist()):
            put(pictures[row], turn, out[row], arrays[row])
        return
    for turn in np.unique(turns).tolist():  # a few large copies instead of one a picture
        rows = torch.from_numpy(np.flatnonzero(turns == turn)).to(out.device)
        some = pictures[rows]
        if turn & TRANSPOSE:
            some = some.transpose(1, 2)
        out[rows] = some.flip([dim for dim, bit in ((1, VERTICAL), (2, HORIZONTAL)) if turn & bit])


def _small_jpeg() -> UInt8:
    """A valid file for slots without a picture."""
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (GREY, GREY, GREY)).save(file, "JPEG")
    return np.frombuffer(file.getvalue(), dtype=np.uint8)
