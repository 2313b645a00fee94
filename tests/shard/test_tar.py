"""The bytes of a shard, against Python's tarfile."""

import io
import tarfile

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vitpt.fsio import sha256_bytes
from vitpt.shard import tar

SAMPLES = st.lists(
    st.tuples(st.integers(-1, 21_842), st.sampled_from(["jpg", "png", "webp"]), st.binary(min_size=1, max_size=1600)),
    min_size=1,
    max_size=12,
)
Sample = tuple[int, str, bytes]


def archive(samples: list[Sample]) -> bytes:
    data = b"".join(tar.sample(f"{i:09d}", *sample) for i, sample in enumerate(samples))
    return data + tar.ending(len(data))


@given(SAMPLES)
def test_tarfile_reads_it_back(samples: list[Sample]) -> None:
    data = archive(samples)
    assert len(data) % 10_240 == 0
    assert data.endswith(bytes(1024))
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as file:
        members = [(info.name, file.extractfile(info).read()) for info in file]  # type: ignore[union-attr]
        assert all(info.isreg() and info.mtime == info.uid == info.gid == 0 and not info.pax_headers for info in file)
        assert all(info.mode == 0o644 and info.uname == info.gname == "" for info in file)
    expected = []
    for i, (label, extension, payload) in enumerate(samples):
        expected += [(f"{i:09d}.cls", str(label).encode())] if label >= 0 else []
        expected.append((f"{i:09d}.{extension}", payload))
    assert members == expected


@given(SAMPLES)
def test_layout_and_dali_index_point_at_the_images(samples: list[Sample]) -> None:
    data = archive(samples)
    labels = np.array([label for label, _, _ in samples], np.int32)
    lengths = np.array([len(payload) for _, _, payload in samples], np.uint32)
    offsets, size = tar.layout(labels, lengths)
    assert size == len(data)
    keys = [f"{i:09d}" for i in range(len(samples))]
    index = tar.dali_index(keys, labels, [extension for _, extension, _ in samples], lengths, offsets).decode()
    first, *lines = index.removesuffix("\n").split("\n")
    assert first == f"v1.2 {len(samples)}"
    for i, (label, extension, payload) in enumerate(samples):
        assert data[offsets[i] :][: lengths[i]] == payload
        fields = lines[i].split(" ")
        groups = [fields[j : j + 4] for j in range(0, len(fields), 4)]
        assert [group[0] for group in groups] == ([extension] if label < 0 else ["cls", extension])
        for kind, offset, length, name in groups:
            assert name == f"{i:09d}.{kind}"
            wanted = str(label).encode() if kind == "cls" else payload
            assert data[int(offset) :][: int(length)] == wanted


def test_bytes_never_change() -> None:
    # the same as GNU tar's with --format=ustar --owner=:0 --group=:0 --mtime=@0 --mode=0644, but for the device numbers, which are
    # empty here; another sum is another format version
    data = archive([(7, "jpg", b"\xff\xd8 not quite \xff\xd9")])
    header = data[:512]
    assert header[:124] == b"000000000.cls" + bytes(87) + b"0000644\x000000000\x000000000\x00"
    assert header[124:136] == b"00000000001\x00"
    assert header[136:148] == b"00000000000\x00"
    assert header[156:157] == b"0"
    assert header[257:265] == b"ustar\x0000"
    assert int(header[148:154], 8) == sum(header[:148]) + 8 * 32 + sum(header[156:])
    assert sha256_bytes(data) == "c093c256f2e2cf53759dcf1d6b2102df3ea14a6f67cfb5f654c40f7065f8c16c"


def test_end_is_two_zero_blocks_even_where_the_data_fill_a_record() -> None:
    assert len(tar.ending(10_240)) == 10_240
    assert len(tar.ending(10_240 - 1024)) == 1024
    assert len(tar.ending(10_240 - 512)) == 10_240 + 512
