"""Cost of the data stream on the CPU: planning, the caller's thread, and images a second.

    python benchmarks/stream.py IMAGES.tar [--res 224] [--batch 256] [--threads 1]

IMAGES.tar holds JPEG files. Figures are medians; CPU seconds are of the whole process unless said otherwise.
"""

import argparse
import tarfile
import tempfile
import time
import zlib
from pathlib import Path

import numpy as np
import torch

from vitpt.dataset import Shard, Split
from vitpt.draws import Purpose, words
from vitpt.image import read_header, turned_size
from vitpt.recipe.schema import Data
from vitpt.stream.digest import digest
from vitpt.stream.loader import Loader
from vitpt.stream.order import make_slots
from vitpt.stream.plan import training_planner


def split_of(tar_path: Path, folder: Path) -> Split:
    """The JPEG files of a tar, indexed in a copy."""
    columns: dict[str, list[int]] = {name: [] for name in ("offset", "length", "width", "height", "orient", "crc32")}
    data = bytearray()
    with tarfile.open(tar_path) as tar:
        for member in tar:
            file = tar.extractfile(member) if member.isfile() else None
            if file is None:
                continue
            payload = file.read()
            header = read_header(payload)
            size = turned_size(header.width, header.height, header.orientation)
            values = (len(data), len(payload), *size, header.orientation, zlib.crc32(payload))
            for column, value in zip(columns.values(), values, strict=True):
                column.append(value)
            data += payload
    (folder / "images").write_bytes(data)
    n = len(columns["offset"])
    arrays = {name: np.array(values, np.int64) for name, values in columns.items()}
    empty = np.zeros(n, np.int64)
    return Split(
        name="train",
        split_id="",
        num_samples=n,
        num_labelled=0,
        root=folder,
        shards=(Shard("images", len(data), n, ""),),
        shard=empty,
        label=empty - 1,
        name_off=np.zeros(n + 1, np.int64),
        names=np.zeros(0, np.uint8),
        **arrays,
    )


def mpp_draws(seed: int, visits: np.ndarray, ids: np.ndarray) -> dict[str, np.ndarray]:
    """Three columns of 98 integers, as masked patch prediction has."""
    drawn = words(seed, visits, ids, Purpose.MPP_KINDS, 98)
    return {
        "positions": drawn.astype(np.uint8),
        "kinds": (drawn % 3).astype(np.uint8),
        "donors": drawn.astype(np.uint16),
    }


def median_us(action, samples: int, repeats: int = 30) -> float:
    """Microseconds a sample."""
    times = []
    for i in range(repeats):
        begin = time.perf_counter()
        action(i)
        times.append(time.perf_counter() - begin)
    return float(np.median(times)) / samples * 1e6


def planning(batch: int, res: int) -> None:
    """Microseconds a sample of plans and digests over a split of ImageNet-21k's size."""
    n = 13_153_500
    same = np.broadcast_to(np.int64(1), n)
    split = Split("train", "", n, n, Path(), (), same, same, same, same, same * 500, same * 375, same, same, same, same)
    for name, draws in (("no draws", lambda seed, visits, ids: {}), ("3 x 98 draws", mpp_draws)):
        planner = training_planner(Data(path="", flip="both"), res, 0, split, make_slots(batch, 1, batch), 0, draws)
        plan = planner.plan(0, 0)
        print(f"plan, batch {batch}, {name}: {median_us(lambda i, p=planner: p.plan(i, 0), batch):.2f} us a sample")
        print(f"digest, {name}: {median_us(lambda i, p=plan: digest(p), batch):.2f} us a sample")


def feeding(split: Split, batch: int, res: int, threads: int, decoder: str, passes: int) -> None:
    """Images a second, and what the caller's thread pays."""
    slots = make_slots(batch, 1, batch)
    planner = training_planner(Data(path="", flip="horizontal"), res, 0, split, slots, 0, mpp_draws)
    loader = Loader(
        planner, split, res, decoder=decoder, threads=threads, prefetch=2, crc="first", device=torch.device("cpu")
    )
    steps = max(3, passes * split.num_samples // batch)
    with loader.batches(0) as batches:
        next(batches)
        cpu, wall, own = time.process_time(), time.perf_counter(), time.thread_time()
        for _ in range(steps):
            next(batches)
        cpu, wall, own = time.process_time() - cpu, time.perf_counter() - wall, time.thread_time() - own
    images = steps * batch
    print(
        f"{loader.decoder_name}, {threads} threads, {images} images: {images / cpu:.0f} images a CPU second, "
        f"{images / wall:.0f} images/s wall, caller's thread {own / images * 1e6:.2f} us an image"
    )


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("images", type=Path)
    parser.add_argument("--res", type=int, default=224)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--decoders", nargs="+", default=["cpu", "dali_cpu"])
    parser.add_argument("--passes", type=int, default=8)
    arguments = parser.parse_args()
    planning(arguments.batch, arguments.res)
    with tempfile.TemporaryDirectory() as folder:
        split = split_of(arguments.images, Path(folder))
        for _ in range(2):
            for decoder in arguments.decoders:
                feeding(split, arguments.batch, arguments.res, arguments.threads, decoder, arguments.passes)


if __name__ == "__main__":
    main()
