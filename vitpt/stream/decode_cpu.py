"""Decoding on the CPU: only the window, then an antialiased resize, straight into the batch.

nvImageCodec decodes a window of a JPEG without the pixels outside it; where it is missing simplejpeg and Pillow decode the whole
image first. All are libjpeg-turbo inside and give the same pixels.
"""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from vitpt.image import ImageError, to_rgb
from vitpt.stream.gate import JPEG_START, BadImageError, Decoded, Payload, admit, nvimgcodec
from vitpt.stream.views import HORIZONTAL, TRANSPOSE, VERTICAL, Stored

UInt8 = npt.NDArray[np.uint8]

GREY = 128
"""Value of all pixels of a slot without a picture."""

# Torch starts a team of threads for 32,768 elements and more; decoding threads must not each start one.
_SERIAL_ELEMENTS = 32_767


class CpuDecoder:
    """Decodes payloads in the calling thread; may be called by several threads at once.

    Args:
        codec: the nvImageCodec module, or None to use simplejpeg and Pillow.
    """

    whole_batches = False  # the loader hands over chunks of a batch, to several threads

    def __init__(self, codec: Any = None) -> None:
        self._codec = codec
        self._threads = threading.local()

    def decode(self, payloads: Sequence[Payload | None], stored: Stored, out: torch.Tensor) -> Decoded:
        """Fill `out` with the pictures of payloads.

        Shapes: stored (n,), out (n, S, S, 3) uint8 on the CPU. Rows without a payload and bad ones become grey.
        """
        bad: list[tuple[int, str]] = []
        converted = 0
        rows = out.numpy()
        boxes, widths, heights = stored.box.tolist(), stored.width.tolist(), stored.height.tolist()
        for i, payload in enumerate(payloads):
            if payload is None:
                rows[i] = GREY
                continue
            try:
                window, was_converted = self._window(payload, widths[i], heights[i], boxes[i])
            except BadImageError as err:
                bad.append((i, err.reason))
                rows[i] = GREY
                continue
            converted += was_converted
            square = resized(window, stored.resize[i].tolist(), stored.crop[i].tolist(), stored.size)
            put(square, int(stored.turn[i]), out[i], rows[i])
        return Decoded(bad, converted)

    def close(self) -> None:
        """Free the decoders of all threads."""
        self._threads = threading.local()

    def _window(self, payload: Payload, width: int, height: int, box: list[int]) -> tuple[UInt8, bool]:
        """The box of an image: (h, w, 3) uint8, and whether the image had to be converted."""
        admitted = admit(payload, width, height, self._codec)
        if admitted.pixels is not None:
            return _cut(admitted.pixels, box), True
        if admitted.stream is None:
            return _cut(_whole_image(payload, width, height), box), False
        return decode_window(self._codec, self._decoder(), admitted.stream, box), False

    def _decoder(self) -> Any:
        """This thread's decoder: one used by two threads gives wrong pictures."""
        decoder = getattr(self._threads, "decoder", None)
        if decoder is None:
            decoder = self._threads.decoder = new_decoder(self._codec)
        return decoder


def new_decoder(codec: Any) -> Any:
    """An nvImageCodec decoder for one thread. Without the list of back ends it needs a GPU driver."""
    return codec.Decoder(
        device_id=codec.NVIMGCODEC_DEVICE_CPU_ONLY,
        max_num_cpu_threads=1,
        backends=[codec.Backend(codec.BackendKind.CPU_ONLY)],
    )


def decode_window(codec: Any, decoder: Any, stream: Any, box: Sequence[int]) -> UInt8:
    """Decode a window [y, x, h, w] of stored pixels: (h, w, 3) uint8.

    Raises:
        BadImageError: the image data are damaged or missing.
    """
    y, x, h, w = box
    try:
        part = stream.get_sub_code_stream(region=codec.Region(y, x, y + h, x + w))
        image = decoder.decode(part, params=codec.DecodeParams(apply_exif_orientation=False))
    except RuntimeError as err:
        raise BadImageError("cannot be decoded") from err
    if image is None:
        raise BadImageError("damaged or cut off image data")
    pixels: UInt8 = np.asarray(image)  # no copy; dlpack would need a GPU driver
    if pixels.shape != (h, w, 3):
        raise BadImageError(f"decoded to {pixels.shape}, expected {(h, w, 3)}")
    return pixels


def resized(window: UInt8, resize: Sequence[int], crop: Sequence[int], size: int) -> torch.Tensor:
    """Resize a window (h, w, 3) to `resize` (antialiased bilinear) and cut the square at `crop`: (S, S, 3) uint8."""
    # The batch dimension comes first, so that torch sees a channels-last picture and writes one.
    picture = torch.from_numpy(window)[None].permute(0, 3, 1, 2)
    if picture.shape[2:] != tuple(resize):
        picture = F.interpolate(picture, tuple(resize), mode="bilinear", antialias=True)
    y, x = crop
    return picture[0].permute(1, 2, 0)[y : y + size, x : x + size]


def put(square: torch.Tensor, turn: int, out: torch.Tensor, out_array: UInt8) -> None:
    """Turn a square (S, S, 3) and write it to a row of the batch, given as tensor and as array of the same memory."""
    if turn == 0:
        np.copyto(out_array, square.numpy())
        return
    if turn & TRANSPOSE:
        square = square.transpose(0, 1)
    size = square.shape[0]
    flips = [dim for dim, bit in ((0, VERTICAL), (1, HORIZONTAL)) if turn & bit]
    step = max(1, _SERIAL_ELEMENTS // (3 * size))
    for top in range(0, size, step):
        bottom = min(top + step, size)
        part = square[size - bottom : size - top] if turn & VERTICAL else square[top:bottom]
        out[top:bottom].copy_(part.flip(flips))


def _cut(pixels: UInt8, box: Sequence[int]) -> UInt8:
    """A window as its own array: torch takes its fast path only for pixels that lie side by side."""
    y, x, h, w = box
    return np.ascontiguousarray(pixels[y : y + h, x : x + w])


def _whole_image(payload: Payload, width: int, height: int) -> UInt8:
    """All pixels of an image, as stored, without nvImageCodec."""
    data = bytes(payload)
    pixels: UInt8 | None = None
    if data.startswith(JPEG_START):
        pixels = _by_simplejpeg(data)
    try:
        # simplejpeg refuses what libjpeg only warns about; Pillow decides then, as nvImageCodec would.
        pixels = to_rgb(data, apply_orientation=False) if pixels is None else pixels
    except ImageError as err:
        raise BadImageError(err.reason) from err
    if pixels.shape != (height, width, 3):
        raise BadImageError(f"decoded to {pixels.shape}, expected {(height, width, 3)}")
    return pixels


def _by_simplejpeg(data: bytes) -> UInt8 | None:
    try:
        import simplejpeg
    except ImportError:
        return None
    try:
        pixels: UInt8 = simplejpeg.decode_jpeg(data, colorspace="RGB", fastdct=False, fastupsample=False)
    except ValueError:
        return None
    return pixels


def cpu_decoder() -> CpuDecoder:
    """The fastest decoder for CPUs that this machine has."""
    return CpuDecoder(nvimgcodec())
