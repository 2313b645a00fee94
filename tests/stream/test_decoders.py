"""Decoders: the same pictures from all of them, odd formats converted, broken files refused, never a crash."""

import io
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from making import encoded, in_child, make_split, photo, photos, shared_data, stored_sizes, training_views
from PIL import Image

from vitpt.errors import Exit, VitptError
from vitpt.image import to_rgb
from vitpt.recipe.schema import ShortCrop
from vitpt.stream.choose import choose, resolve_threads
from vitpt.stream.decode_cpu import GREY, CpuDecoder, resized
from vitpt.stream.decode_dali import DaliDecoder
from vitpt.stream.gate import BadImageError, admit, as_ppm, nvimgcodec
from vitpt.stream.views import evaluation_view, stored

CPU = torch.device("cpu")
CODEC = nvimgcodec()
needs_codec = pytest.mark.skipif(CODEC is None, reason="nvImageCodec is not installed")


def pictures(decoder, payloads, view):
    out = torch.full((len(payloads), view.size, view.size, 3), 7, dtype=torch.uint8)
    decoded = decoder.decode(payloads, view, out)
    return out, decoded


def mean_difference(a, b):
    return (a.float() - b.float()).abs().mean(dim=(1, 2, 3))


@pytest.fixture(scope="module")
def mixed():
    """Files of every kind that decoders take as they are, several sizes and all orientations."""
    rng = np.random.default_rng(3)
    grey = photo(90, 70, 1).convert("L")
    files = photos(12, seed=1)
    files += [encoded(photo(97, 61, i), orientation=i) for i in range(2, 9)]
    files += [
        encoded(photo(50, 80, 3), progressive=True),
        encoded(grey),
        encoded(grey, "PNG"),
        encoded(photo(64, 33, 5), "PNG"),
    ]
    files += [encoded(photo(71, 45, 6), "WEBP", quality=90), encoded(photo(1, 1, 7)), encoded(photo(1, 300, 8))]
    files += [encoded(photo(int(w), int(h), 20), subsampling=1) for w, h in rng.integers(200, 700, (2, 2))]
    return files


@pytest.fixture(scope="module")
def mixed_split(mixed, tmp_path_factory):
    return make_split(tmp_path_factory.mktemp("mixed"), mixed)


@needs_codec
def test_both_cpu_engines_give_the_same_pixels(mixed, mixed_split):
    view = training_views(mixed_split, list(range(len(mixed))), 32)
    fast, decoded = pictures(CpuDecoder(CODEC), mixed, view)
    plain, plain_decoded = pictures(CpuDecoder(None), mixed, view)
    assert decoded == ([], 0)
    assert plain_decoded == ([], 0)
    assert torch.equal(fast, plain)


def test_the_cpu_path_is_crop_then_resize(mixed, mixed_split):
    view = training_views(mixed_split, list(range(len(mixed))), 32)
    out, _ = pictures(CpuDecoder(CODEC), mixed, view)
    for i, payload in enumerate(mixed):
        y, x, h, w = view.box[i].tolist()
        window = Image.fromarray(to_rgb(payload, apply_orientation=False)[y : y + h, x : x + w])
        want = torch.from_numpy(np.array(window.resize((32, 32), Image.Resampling.BILINEAR)))
        turn = int(view.turn[i])
        want = want.transpose(0, 1) if turn & 4 else want
        want = want.flip([dim for dim, bit in ((0, 2), (1, 1)) if turn & bit])
        difference = (out[i].float() - want.float()).abs()
        assert difference.mean() <= 0.5, i
        assert difference.max() <= 3, i


@needs_codec
@pytest.mark.parametrize("kind", ["training", "short_crop"])
def test_dali_agrees_with_the_cpu_path(mixed, mixed_split, kind):
    rows = np.arange(len(mixed))
    if kind == "training":
        view = training_views(mixed_split, rows.tolist(), 48)
    else:
        columns = mixed_split.width[rows], mixed_split.height[rows], mixed_split.orient[rows]
        view = stored_sizes(mixed_split, rows, evaluation_view(ShortCrop(short=40), 32, *columns))
    cpu, _ = pictures(CpuDecoder(CODEC), mixed, view)
    decoder = DaliDecoder(len(mixed), 2, CPU)
    dali, decoded = pictures(decoder, mixed, view)
    decoder.close()
    assert decoded == ([], 0)
    assert mean_difference(cpu, dali).max() <= 0.5


@needs_codec
def test_photos_agree_between_all_cpu_decoders(tmp_path):
    with tarfile.open(shared_data("imagenet_samples.tar")) as tar:
        files = [tar.extractfile(member).read() for member in tar if member.isfile()][::4]
    split = make_split(tmp_path, files)
    view = training_views(split, list(range(len(files))), 224)
    fast, _ = pictures(CpuDecoder(CODEC), files, view)
    plain, _ = pictures(CpuDecoder(None), files, view)
    assert torch.equal(fast, plain)
    dali, _ = pictures(DaliDecoder(len(files), 2, CPU), files, view)
    assert mean_difference(fast, dali).max() <= 0.5


@pytest.mark.parametrize("orient", range(1, 9))
def test_orientations_end_upright(tmp_path, orient):
    """The same upright picture stored turned, its orientation in the file, gives the same square."""
    upright = photo(60, 40, 4)
    transposed = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # Pillow's method that undoes each orientation
    turned = upright.transpose(Image.Transpose(transposed[orient])) if orient > 1 else upright
    both = []
    for payload in (encoded(upright, "PNG"), encoded(turned, "PNG", orientation=orient)):
        split = make_split(tmp_path, [payload])
        assert (split.width[0], split.height[0]) == (60, 40)
        both.append(pictures(CpuDecoder(CODEC), [payload], training_views(split, [0], 24))[0])
    assert (both[0].float() - both[1].float()).abs().max() <= 1


def test_the_resize_stays_channels_last():
    """Torch's fast path; a planar result would cost 14 % of the whole path."""
    square = resized(np.array(photo(90, 70, 0)), [32, 32], [0, 0], 32)
    assert square.stride()[-1] == 1
    assert square.is_contiguous()


class TestConversion:
    cases = pytest.mark.parametrize(
        ("mode", "kind", "options"),
        [
            ("CMYK", "JPEG", {}),
            ("RGBA", "PNG", {}),
            ("LA", "PNG", {}),
            ("P", "PNG", {}),
            ("RGB", "PNG", {"transparency": (1, 2, 3)}),
            ("RGBA", "WEBP", {"lossless": True}),
            ("P", "GIF", {}),
            ("RGB", "BMP", {}),
            ("RGB", "TIFF", {}),
        ],
    )

    @cases
    @pytest.mark.parametrize("codec", [None, pytest.param(CODEC, marks=needs_codec)], ids=["pillow", "nvimgcodec"])
    def test_unusual_formats_are_converted_and_counted(self, tmp_path, mode, kind, options, codec):
        source = photo(40, 30, 9).convert("RGBA")
        source.putalpha(Image.linear_gradient("L").resize((40, 30)))
        payload = encoded(source.convert(mode), kind, **options)
        split = make_split(tmp_path, [payload])
        view = evaluation_view(ShortCrop(short=30), 30, split.width, split.height, split.orient)
        out, decoded = pictures(CpuDecoder(codec), [payload], stored_sizes(split, np.arange(1), view))
        assert decoded == ([], 1)
        assert np.array_equal(out[0].numpy(), to_rgb(payload)[:, 5:35])

    @needs_codec
    def test_dali_gets_converted_files(self, tmp_path):
        payloads = [encoded(photo(40, 30, i).convert("P"), "GIF") for i in range(3)] + photos(2)
        split = make_split(tmp_path, payloads)
        view = training_views(split, list(range(5)), 24)
        cpu, decoded = pictures(CpuDecoder(CODEC), payloads, view)
        assert decoded.converted == 3
        dali, decoded = pictures(DaliDecoder(5, 1, CPU), payloads, view)
        assert decoded == ([], 3)
        assert mean_difference(cpu, dali).max() <= 0.5

    def test_ppm_is_lossless(self):
        pixels = np.asarray(photo(13, 7, 0))
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(as_ppm(pixels).tobytes()))), pixels)


GOOD = encoded(photo(64, 48, 0))
SCAN = GOOD.index(b"\xff\xda")
BROKEN = {
    "empty": b"",
    "zeros": bytes(4096),
    "text": b"this is not an image at all, only text" * 20,
    "three bytes": b"\xff\xd8\xff",
    "cut in the header": GOOD[:100],
    "cut before the scan": GOOD[:SCAN],
    "cut in the scan": GOOD[: SCAN + (len(GOOD) - SCAN) // 2],
    "no end marker": GOOD[:-2],
    "PNG body after JPEG start": GOOD[:2] + encoded(photo(64, 48, 0), "PNG"),
    "cut PNG": encoded(photo(64, 48, 0), "PNG")[:900],
    "cut WebP": encoded(photo(64, 48, 0), "WEBP")[:400],
    "cut GIF": encoded(photo(64, 48, 0).convert("P"), "GIF")[:600],
    "other size": encoded(photo(48, 64, 0)),
    "claims 65535": GOOD.replace(b"\x00\x30\x00\x40\x03", b"\xff\xff\xff\xff\x03"),
}


def broken_view(count):
    """The middle of 64 x 48 images."""
    sizes = np.full(count, 64), np.full(count, 48)
    return stored(evaluation_view(ShortCrop(short=24), 24, *sizes, np.ones(count, np.uint8)), *sizes)


@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.parametrize("codec", [None, pytest.param(CODEC, marks=needs_codec)], ids=["pillow", "nvimgcodec"])
def test_broken_files_are_bad_and_grey(what, codec):
    payloads = [GOOD, BROKEN[what], GOOD, None]
    out, decoded = pictures(CpuDecoder(codec), payloads, broken_view(4))
    assert [row for row, _ in decoded.bad] == [1]
    assert decoded.bad[0][1]
    assert (out[[1, 3]] == GREY).all()
    alone, _ = pictures(CpuDecoder(codec), [GOOD], broken_view(1))
    assert torch.equal(out[0], alone[0])
    assert torch.equal(out[2], alone[0])


@pytest.mark.filterwarnings("ignore:Image size")  # Pillow's own word on the huge one
@pytest.mark.parametrize("codec", [None, pytest.param(CODEC, marks=needs_codec)], ids=["pillow", "nvimgcodec"])
def test_the_gate_names_the_reason(codec):
    with pytest.raises(BadImageError, match="header says 48x64, the index 64x48"):
        admit(BROKEN["other size"], 64, 48, codec)
    huge = encoded(Image.new("1", (20_000, 10_000)), "PNG")
    with pytest.raises(BadImageError, match="more than"):
        admit(huge, 20_000, 10_000, codec)


# DALI 2.4 ends the process only with 32 samples and more, and with the bad one in front.
BAD_FIRST = """
import torch
from test_decoders import BROKEN, GOOD, broken_view, CPU, GREY
from vitpt.stream.decode_dali import DaliDecoder
decoder = DaliDecoder(40, 4, CPU)
want = torch.empty(40, 24, 24, 3, dtype=torch.uint8)
assert decoder.decode([GOOD] * 40, broken_view(40), want) == ([], 0)
for what, payload in BROKEN.items():
    for rows in ([0], [0, 5, 39]):
        payloads = [payload if row in rows else GOOD for row in range(40)]
        payloads[7] = None
        out = torch.empty_like(want)
        decoded = decoder.decode(payloads, broken_view(40), out)
        assert [row for row, _ in decoded.bad] == rows, (what, decoded)
        assert all(reason for _, reason in decoded.bad)
        assert (out[[*rows, 7]] == GREY).all(), what
        rest = [row for row in range(40) if row not in (*rows, 7)]
        assert torch.equal(out[rest], want[rest]), what
print("all", len(BROKEN))
"""


@needs_codec
def test_dali_survives_bad_samples_in_front():
    assert in_child(BAD_FIRST).strip() == f"all {len(BROKEN)}"


THREADS = """
import os, sys, threading, torch
torch.set_num_threads(4)
torch.randn(1_000_000).exp_()  # the main thread has its team now
from making import *
from vitpt.stream.decode_cpu import CpuDecoder
from vitpt.stream.decode_dali import DaliDecoder
from vitpt.stream.gate import nvimgcodec
import tempfile
files = photos(8)
split = make_split(Path(tempfile.mkdtemp()), files)
view = training_views(split, list(range(8)), 224)
kind = sys.argv[1]
decoder = DaliDecoder(8, 1, torch.device("cpu")) if kind == "dali" else CpuDecoder(nvimgcodec() if kind == "codec" else None)
out = torch.empty(8, 224, 224, 3, dtype=torch.uint8)
def count(): return len(os.listdir("/proc/self/task"))
def work():
    decoder.decode(files, view, out)
    before = count()
    for _ in range(3): decoder.decode(files, view, out)
    seen.append((before, count(), torch.get_num_threads()))
if kind == "dali": decoder.decode(files, view, out)  # its own threads
before = count()
seen = []
thread = threading.Thread(target=work); thread.start(); thread.join()
print(before, *seen[0], torch.get_num_threads())
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads in /proc")
@pytest.mark.parametrize(
    "kind", ["plain", pytest.param("codec", marks=needs_codec), pytest.param("dali", marks=needs_codec)]
)
def test_decoding_threads_start_no_thread_teams(kind):
    before, first, later, inside, main = map(int, in_child(THREADS, kind).split())
    assert (first, later) == (before + 1, before + 1)  # the thread that decodes, and no more
    assert (inside, main) == (4, 4)  # torch's own setting was not touched


class TestChoice:
    def test_auto_takes_the_cpu_without_a_gpu(self):
        name, why = choose("auto", CPU, 3)
        assert name == "cpu"
        assert "no GPU" in why
        assert "3 threads" in why

    def test_dali_gpu_needs_a_gpu(self):
        with pytest.raises(VitptError, match=r"dali_gpu: .*(CUDA device|DALI)") as caught:
            choose("dali_gpu", CPU, 1)
        assert caught.value.exit_code == Exit.ENVIRONMENT
        assert "data.decoder=cpu" in caught.value.hint

    def test_missing_dali_is_named(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "nvidia.dali", None)
        with pytest.raises(VitptError, match="DALI is not installed") as caught:
            choose("dali_cpu", CPU, 1)
        assert caught.value.exit_code == Exit.ENVIRONMENT
        assert "nvidia-dali" in caught.value.hint

    def test_missing_nvimagecodec_is_said(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "nvidia.nvimgcodec", None)
        assert "simplejpeg and Pillow" in choose("auto", CPU, 1)[1]

    def test_threads(self, monkeypatch):
        monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(20)), raising=False)
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        assert resolve_threads("auto") == 8
        assert resolve_threads(11) == 11
        for ranks, threads in ((4, 4), (20, 1), (64, 1)):
            monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
            assert resolve_threads("auto") == threads


@pytest.mark.gpu
def test_dali_gpu_agrees_with_the_cpu_path(mixed, mixed_split):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = torch.device("cuda", 0)
    view = training_views(mixed_split, list(range(len(mixed))), 64)
    cpu, _ = pictures(CpuDecoder(CODEC), mixed, view)
    decoder = DaliDecoder(len(mixed), 4, device)
    out = torch.empty(cpu.shape, dtype=torch.uint8, device=device)
    assert decoder.decode(mixed, view, out) == ([], 0)
    assert mean_difference(cpu, out.cpu()).max() <= 1.5  # nvJPEG has its own IDCT and upsampling
    payloads = [BROKEN["cut in the scan"], *mixed[1:]]
    decoded = decoder.decode(payloads, view, out)
    assert [row for row, _ in decoded.bad] == [0]
    assert (out[0] == GREY).all()
    assert mean_difference(cpu[1:], out[1:].cpu()).max() <= 1.5
    decoder.close()
