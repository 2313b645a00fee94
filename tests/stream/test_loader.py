"""The loader delivers what the plans say, whatever the threads and the prefetch depth; it ends clean, and bad samples keep their slot."""

import itertools
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from making import encoded, make_split, no_draws, photo, photos

from vitpt.draws import Purpose, words
from vitpt.recipe.schema import Data, Squash
from vitpt.stream.decode_cpu import GREY
from vitpt.stream.gate import nvimgcodec
from vitpt.stream.loader import Loader
from vitpt.stream.order import make_slots
from vitpt.stream.plan import evaluation_planner, training_planner
from vitpt.stream.reader import Arena, Reader

CPU = torch.device("cpu")
SIZE = 32
DALI = pytest.param("dali_cpu", marks=pytest.mark.skipif(nvimgcodec() is None, reason="nvImageCodec is not installed"))


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    return make_split(tmp_path_factory.mktemp("split"), photos(60))


def some_draws(seed, visits, ids):
    return {"kinds": words(seed, visits, ids, Purpose.MPP_KINDS, 3).astype(np.int64)}


def loader_of(
    split,
    *,
    batch=40,
    micro=14,
    ranks=1,
    rank=0,
    decoder="cpu",
    threads=2,
    prefetch=2,
    crc="first",
    draws=some_draws,
    device=CPU,
):
    slots = make_slots(batch, ranks, micro)
    planner = training_planner(Data(path="x", flip="both"), SIZE, 5, split, slots, rank, draws)
    return Loader(planner, split, SIZE, decoder=decoder, threads=threads, prefetch=prefetch, crc=crc, device=device)


def kept(batch):
    """What a batch holds, copied before the next one takes its memory."""
    return {
        "ids": batch.plan.ids,
        "images": batch.images[0].clone(),
        "labels": batch.labels.clone(),
        "weights": batch.weights.clone(),
        "kinds": batch.draws["kinds"].clone() if "kinds" in batch.draws else None,
        "bad": batch.bad,
    }


def run(loader, start=0, end=3):
    with loader.batches(start, end) as batches:
        return [kept(batch) for batch in batches]


def same(a, b):
    return all(
        np.array_equal(x["ids"], y["ids"])
        and all(torch.equal(x[key], y[key]) for key in ("images", "labels", "weights", "kinds"))
        for x, y in zip(a, b, strict=True)
    )


def threads_of_loaders():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("vitpt-")]


@pytest.fixture(scope="module")
def expected(split):
    return run(loader_of(split, threads=1, prefetch=1))


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("prefetch", [1, 3])
def test_threads_and_prefetch_change_nothing(split, expected, threads, prefetch):
    assert same(run(loader_of(split, threads=threads, prefetch=prefetch)), expected)


def test_batches_are_what_the_plans_say(split, expected):
    planner = loader_of(split).planner
    plans = [planner.plan(step, micro) for step in range(3) for micro in range(3)]
    assert len(expected) == len(plans)
    for batch, plan in zip(expected, plans, strict=True):
        assert np.array_equal(batch["ids"], plan.ids)
        assert batch["images"].shape == (14, SIZE, SIZE, 3)
        assert batch["images"].dtype == torch.uint8
        filled = torch.from_numpy(plan.ids >= 0)
        assert torch.equal(batch["weights"], filled.float())
        labels = np.where(plan.ids >= 0, split.label[np.maximum(plan.rows, 0)], -1)
        assert batch["labels"].tolist() == labels.tolist()
        assert batch["labels"].dtype == torch.int64
        assert np.array_equal(batch["kinds"].numpy(), plan.draws["kinds"])
        assert (batch["images"][~filled] == GREY).all()
        assert batch["bad"] == []
    assert sum(int((batch["weights"] == 0).sum()) for batch in expected) == 3 * (3 * 14 - 40)


@pytest.mark.parametrize("decoder", [DALI])
def test_decoders_agree(split, expected, decoder):
    got = run(loader_of(split, decoder=decoder))
    for a, b in zip(got, expected, strict=True):
        assert np.array_equal(a["ids"], b["ids"])
        assert torch.equal(a["weights"], b["weights"])
        assert (a["images"].float() - b["images"].float()).abs().mean(dim=(1, 2, 3)).max() <= 0.5


def test_resuming_gives_the_same_suffix(split, expected):
    assert same(run(loader_of(split, prefetch=3), start=2), expected[6:])


def test_ranks_share_the_same_step(split, expected):
    parts = [batch for rank in range(3) for batch in run(loader_of(split, ranks=3, rank=rank), 0, 1)]
    weights = torch.cat([part["weights"] for part in parts]) > 0
    assert torch.equal(
        torch.cat([part["images"] for part in parts])[weights], torch.cat([b["images"] for b in expected[:3]])[:40]
    )


def test_batches_use_the_same_memory_again(split):
    with loader_of(split, prefetch=2).batches(0, 5) as batches:
        places = [batch.images[0].data_ptr() for batch in batches]
    assert len(places) == 15
    assert len(set(places)) == 3  # prefetch + the one with the caller
    assert all(a != b for a, b in itertools.pairwise(places))


def test_without_an_end_it_goes_on(split):
    with loader_of(split).batches(10_000) as batches:
        steps = [int(batch.plan.positions[0]) // 40 for batch in itertools.islice(batches, 7)]
    assert steps == [10_000] * 3 + [10_001] * 3 + [10_002]


def test_evaluation_delivers_every_sample_once(split):
    labels = []
    for rank in (0, 1):
        planner = evaluation_planner(Squash(), SIZE, 0, split, 16, 2, rank, no_draws, False)
        loader = Loader(planner, split, SIZE, decoder="cpu", threads=2, prefetch=2, crc="always", device=CPU)
        with loader.batches(0) as batches:
            for batch in batches:
                assert batch.images[0].shape[0] == 16
                labels += batch.labels[batch.weights > 0].tolist()
    assert labels == split.label.tolist()


def open_files():
    """How many files this process has open, where the system tells."""
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.is_dir() else 0


class TestEnding:
    """However a loader is left, no thread and no open file stays."""

    @pytest.fixture(autouse=True)
    def _nothing_stays(self):
        before = open_files()
        yield
        assert threads_of_loaders() == []
        assert open_files() == before

    @pytest.mark.parametrize("decoder", ["cpu", DALI])
    def test_at_the_end(self, split, decoder):
        loader = loader_of(split, decoder=decoder)
        with loader.batches(0, 2) as batches:
            assert len(list(batches)) == 6
            assert next(batches, None) is None

    @pytest.mark.parametrize("decoder", ["cpu", DALI])
    @pytest.mark.parametrize("taken", [0, 1, 4])
    def test_in_the_middle(self, split, decoder, taken):
        with loader_of(split, decoder=decoder, prefetch=3, threads=4).batches(0) as batches:
            for _ in range(taken):
                next(batches)

    @pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
    def test_by_an_exception_of_the_caller(self, split, error):
        def take_one_and_fail():
            with loader_of(split).batches(0) as batches:
                next(batches)
                raise error

        with pytest.raises(error):
            take_one_and_fail()

    @pytest.mark.parametrize("decoder", ["cpu", DALI])
    def test_by_an_exception_in_a_thread(self, split, decoder):
        def failing(seed, visits, ids):
            if visits.max() > 0:
                raise ArithmeticError("no draws for this pass")
            return some_draws(seed, visits, ids)

        delivered = []

        def take_all():
            with loader_of(split, draws=failing, decoder=decoder, prefetch=3).batches(0) as batches:
                for batch in batches:
                    delivered.append(int(batch.plan.positions[0]))

        with pytest.raises(ArithmeticError, match="no draws"):
            take_all()
        assert delivered == [0, 14, 28, 40]  # everything before the pass that fails

    def test_and_can_be_used_again(self, split, expected):
        loader = loader_of(split)
        run(loader, 0, 1)
        assert same(run(loader), expected)


def test_torchs_own_threads_are_left_alone(split):
    before = torch.get_num_threads()
    inside = []
    with loader_of(split).batches(0, 2) as batches:
        for _ in batches:
            inside.append(torch.get_num_threads())
    other = []
    thread = threading.Thread(target=lambda: other.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert {before, *inside, torch.get_num_threads()} == {before}
    assert other == [before]


@pytest.fixture
def damaged(tmp_path):
    """60 samples: 3 is cut, 17 is no image, 30 has a flipped bit; the last shard is missing, the one before is cut short."""
    files = photos(60)
    files[3] = files[3][: len(files[3]) * 2 // 3]
    files[17] = b"not an image"
    split = make_split(tmp_path, files, sizes={3: size_of(photos(60)[3]), 17: (20, 20)})
    path = split.shard_path(int(split.shard[30]))
    data = bytearray(path.read_bytes())
    data[int(split.offset[30]) + 30] ^= 1  # in a quantisation table: decodes, to other pixels
    path.write_bytes(data)
    last = split.shard_path(8)
    last.unlink()
    before = split.shard_path(7)
    before.write_bytes(before.read_bytes()[: int(split.offset[55]) + 10])
    return split


def size_of(payload):
    from vitpt.image import read_header

    header = read_header(payload)
    return header.width, header.height


REASONS = {
    3: "damaged or cut off|truncated",
    17: "image|header",
    30: "crc32",
    55: "short read: 10 of",
    56: "cannot be read: No such file",
    57: "cannot be read",
    58: "cannot be read",
    59: "cannot be read",
}


@pytest.mark.parametrize("decoder", ["cpu", DALI])
def test_bad_samples_keep_their_slot(damaged, split, decoder):
    loader = loader_of(damaged, decoder=decoder, batch=60, micro=60)
    (batch,) = run(loader, 0, 1)
    (good,) = run(loader_of(split, decoder=decoder, batch=60, micro=60), 0, 1)
    assert np.array_equal(batch["ids"], good["ids"])
    bad = {sample.id: sample for sample in batch["bad"]}
    assert sorted(bad) == sorted(REASONS)
    for row, sample in bad.items():
        assert any(word in sample.reason for word in REASONS[row].split("|")), sample
        assert sample.name == f"class/photo {row}.jpg"
        assert sample.shard == damaged.shards[row // 7].file
        assert sample.offset == int(damaged.offset[row])
    is_bad = torch.from_numpy(np.isin(batch["ids"], list(REASONS)))
    assert torch.equal(batch["weights"], (~is_bad).float())
    assert (batch["images"][is_bad] == GREY).all()
    assert torch.equal(batch["images"][~is_bad], good["images"][~is_bad])
    assert loader.bad == len(REASONS)


@pytest.mark.parametrize(
    ("crc", "passes"), [("always", [True, True]), ("first", [True, False]), ("never", [False, False])]
)
def test_when_the_checksum_is_checked(damaged, crc, passes):
    batches = run(loader_of(damaged, batch=60, micro=60, crc=crc), 0, 2)
    assert [30 in [sample.id for sample in batch["bad"]] for batch in batches] == passes


def test_converted_files_are_counted_when_delivered(tmp_path):
    files = [encoded(photo(30, 30, i).convert("P"), "GIF") if i % 4 == 0 else photos(1)[0] for i in range(16)]
    loader = loader_of(make_split(tmp_path, files), batch=16, micro=16, prefetch=3)
    with loader.batches(0) as batches:
        next(batches)
        assert (loader.converted, loader.bad) == (4, 0)
        next(batches)
        assert loader.converted == 8


def test_more_shards_than_file_descriptors(tmp_path, monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda _: (40, 40))
    files = photos(40)
    split = make_split(tmp_path, files, shard_samples=1)
    reader = Reader(split, "always")
    read = reader.read(np.arange(40), np.zeros(40, dtype=np.int64), Arena())
    assert [bytes(payload) for payload in read] == files
    reader.close()
    with pytest.raises(RuntimeError, match="closed"):
        reader.read(np.arange(1), np.zeros(1, dtype=np.int64), Arena())


def test_running_out_of_file_descriptors_is_no_bad_sample(split, monkeypatch):
    def full(*_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("vitpt.stream.reader.os.open", full)
    with pytest.raises(OSError, match="Too many open files"):
        run(loader_of(split), 0, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("decoder", ["cpu", "dali_cpu", "dali_gpu"])
def test_batches_on_the_gpu(split, expected, decoder):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    loader = loader_of(split, decoder=decoder, device=torch.device("cuda", 0), prefetch=3)
    with loader.batches(0, 3) as batches:
        got = []
        for batch in batches:
            assert all(tensor.is_cuda for tensor in (*batch.images, batch.labels, batch.weights, *batch.draws.values()))
            torch.cuda._sleep(20_000_000)  # the device lags behind the caller: memory must not be taken back too early
            got.append(
                {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in kept(batch).items()}
            )
    bound = 0 if decoder == "cpu" else 0.5 if decoder == "dali_cpu" else 1.5
    for a, b in zip(got, expected, strict=True):
        assert all(torch.equal(a[key], b[key]) for key in ("labels", "weights", "kinds"))
        assert (a["images"].float() - b["images"].float()).abs().mean(dim=(1, 2, 3)).max() <= bound
