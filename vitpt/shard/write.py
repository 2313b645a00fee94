"""Stage 4: write the shards, each by one process, each whole or not at all."""

import hashlib
import json
import zlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from vitpt import dataset, fsio
from vitpt.errors import Exit, VitptError
from vitpt.shard import tar
from vitpt.shard.check import check_file
from vitpt.shard.plan import SplitPlan, extension_names
from vitpt.shard.workers import check_stop, run_all

Advance = Callable[[int, int], None]  # (samples done, bytes done)


class Member(NamedTuple):
    """One sample to write, and what its bytes must be."""

    name: str
    label: int
    extension: str
    repaired: bool
    length: int
    crc32: int


class ShardTask(NamedTuple):
    """One shard to write."""

    source: Path
    out: Path
    sidecar: Path
    file: str
    first_id: int
    plan_hash: str
    members: list[Member]


def sidecar_path(root: Path, split: str, index: int) -> Path:
    """Where the note lies that a shard is done."""
    return dataset.index_folder(root, split) / f"{index:06d}.json"


def read_sidecar(root: Path, plan: SplitPlan, index: int) -> dict[str, Any] | None:
    """A finished shard's sidecar; None when the shard is absent, of another plan, or not of the right size."""
    try:
        sidecar: dict[str, Any] = json.loads(sidecar_path(root, plan.name, index).read_bytes())
        size = (root / plan.shard_file(index)).stat().st_size
    except (OSError, ValueError):
        return None
    if not isinstance(sidecar, dict) or sidecar.get("plan_sha256") != plan.plan_hash:
        return None
    return sidecar if sidecar.get("bytes") == size == plan.shard_bytes(index) else None


def write_shards(source: Path, root: Path, plans: list[SplitPlan], jobs: int, advance: Advance) -> int:
    """Write every shard that is not done yet; returns how many were done already.

    Raises:
        VitptError: a source file changed since it was checked (exit 3); disk full (exit 4).
    """
    tasks, kept = [], 0
    for plan in plans:
        fsio.make_folder(dataset.index_folder(root, plan.name))
        for index in range(plan.num_shards):
            if read_sidecar(root, plan, index) is None:
                tasks.append(_task(source, root, plan, index))
            else:
                kept += 1
                part = plan.shard_rows(index)
                advance(part.stop - part.start, plan.shard_bytes(index))
    with closing(run_all(write_shard, tasks, jobs, _died)) as finished:
        for number, size in finished:
            advance(len(tasks[number].members), size)
    return kept


def write_shard(task: ShardTask) -> int:
    """Write one tar, its DALI index and its sidecar; returns the bytes of the tar. Runs in a worker process."""
    path = task.out / task.file
    digest, size = hashlib.sha256(), 0
    task.sidecar.unlink(missing_ok=True)  # of another plan: from here on it would vouch for the wrong bytes
    with fsio.atomic_write(path) as file:
        for number, wanted in enumerate(task.members):
            check_stop()
            payload = _payload(task.source, wanted)
            data = tar.sample(dataset.key(task.first_id + number), wanted.label, wanted.extension, payload)
            digest.update(data)
            file.write(data)
            size += len(data)
        digest.update(tar.ending(size))
        file.write(tar.ending(size))
        size += len(tar.ending(size))
    sidecar = {
        "file": task.file,
        "samples": len(task.members),
        "bytes": size,
        "sha256": digest.hexdigest(),
        "first_id": task.first_id,
        "plan_sha256": task.plan_hash,
    }
    fsio.write_json(task.sidecar, sidecar)
    return size


def dali_index(plan: SplitPlan, index: int) -> bytes:
    """DALI's index of one shard."""
    part = plan.shard_rows(index)
    keys = [dataset.key(row) for row in range(part.start, part.stop)]
    columns = plan.columns
    extensions = extension_names(plan.rows[part])
    return tar.dali_index(keys, columns["label"][part], extensions, columns["length"][part], columns["offset"][part])


def _payload(source: Path, wanted: Member) -> bytes:
    path = source / wanted.name
    try:
        data = path.read_bytes()
    except OSError as err:
        raise VitptError(f"{path}: cannot be read any more ({err.strerror})", exit_code=Exit.DATA) from err
    if wanted.repaired:
        data = check_file(path, len(data))[1]
    if len(data) != wanted.length or zlib.crc32(data) != wanted.crc32:
        raise VitptError(
            f"{path}: changed since it was checked a moment ago",
            hint="run the same command again when nothing writes to the source folder",
            exit_code=Exit.DATA,
        )
    return data


def _task(source: Path, root: Path, plan: SplitPlan, index: int) -> ShardTask:
    part = plan.shard_rows(index)
    rows = plan.rows[part]
    members = zip(
        plan.files.names[part],
        plan.files.labels[part].tolist(),
        extension_names(rows),
        rows["repaired"].tolist(),
        rows["length"].tolist(),
        rows["crc32"].tolist(),
        strict=True,
    )
    sidecar = sidecar_path(root, plan.name, index)
    return ShardTask(
        source,
        root,
        sidecar,
        plan.shard_file(index),
        part.start,
        plan.plan_hash,
        [Member(*member) for member in members],
    )


def _died(task: ShardTask) -> NoReturn:
    raise VitptError(
        f"{task.out / task.file}: the process that wrote this shard died twice",
        hint="the system may have run out of memory: try a smaller -j; the same command goes on where it stopped",
        exit_code=Exit.ENVIRONMENT,
    )
