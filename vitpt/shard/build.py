"""`vitpt shard`: list, check, plan, write, finish. Every stage can be killed and is continued by the same command."""

import shutil
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from vitpt import dataset, fsio
from vitpt.errors import Exit, VitptError
from vitpt.shard import target
from vitpt.shard.check import Advance, Checked, check_files
from vitpt.shard.finish import finish, reject_lines
from vitpt.shard.plan import MAX_SAMPLES, SplitPlan, plan_split
from vitpt.shard.sources import Listing
from vitpt.shard.write import read_sidecar, write_shards

SAMPLES_PER_SHARD = 4096
MAX_REJECT_FRACTION = 0.01
SHOWN_REJECTS = 20
SAMPLE_OVERHEAD_BYTES = 3 * 512 + 256 + 200  # headers and label, mean padding, columns and name


@dataclass(frozen=True)
class Options:
    """How to shard.

    Attributes:
        seed: of the order of the training samples.
        samples_per_shard: of every shard but a split's last.
        val_fraction: the share of each class that becomes the validation split; None for none.
        max_reject_fraction: stop if a larger share of the files is rejected (a single file passes unless this is 0).
        jobs: worker processes; changes nothing but the speed.
        overwrite: remove shards that are there already.
    """

    seed: int = 0
    samples_per_shard: int = SAMPLES_PER_SHARD
    val_fraction: float | None = None
    max_reject_fraction: float = MAX_REJECT_FRACTION
    jobs: int = 1
    overwrite: bool = False

    def recorded(self) -> dict[str, Any]:
        """The options that decide the result, as the manifest holds them."""
        return {"seed": self.seed, "samples_per_shard": self.samples_per_shard, "val_fraction": self.val_fraction}


class Reporter(Protocol):
    """Where a long job says what it does."""

    def say(self, line: str) -> None:
        """One line for the user."""

    def stage(self, description: str, total: int, unit: str) -> AbstractContextManager[Advance]:
        """Progress over `total` units: the callable counts (units, bytes)."""


@dataclass(frozen=True)
class Report:
    """What a call has done.

    Attributes:
        manifest: of the finished dataset.
        already_there: nothing was to do.
        kept_shards: shards that an earlier, interrupted call had finished.
    """

    manifest: dict[str, Any]
    already_there: bool
    kept_shards: int


def build(listing: Listing, out: Path, options: Options, reporter: Reporter) -> Report:
    """Write the listed files as shards into the folder `out`.

    Raises:
        VitptError: the target cannot be used (exit 2), too many files are rejected (exit 3), disk full (exit 4).
    """
    state = target.examine(out, listing.root)
    if state == "finished" and not options.overwrite:
        manifest = _check_finished(listing, out, options)
        # of a call that was killed between its last two steps
        shutil.rmtree(out / dataset.WORK, ignore_errors=True)
        return Report(manifest, already_there=True, kept_shards=0)
    with target.locked(out) as work:
        if options.overwrite:
            target.clear(out)
            target.clear_work(work)
        target.remove_stale(out)
        there = sum(path.stat().st_size for path in out.glob("*.tar"))
        _require_space(out, listing.num_bytes + listing.num_files * SAMPLE_OVERHEAD_BYTES - there)
        with reporter.stage("checking", listing.num_files, "files") as advance:
            checked = check_files(listing.root, listing.splits, work, options.jobs, advance)
        _refuse_rejects(listing, checked, options, work, reporter)
        plans = _plan(listing, checked, options)
        missing = sum(_missing_bytes(out, plan) for plan in plans)
        _require_space(out, missing)
        with reporter.stage("writing", sum(plan.num_samples for plan in plans), "images") as advance:
            kept = _write(listing.root, out, plans, options.jobs, advance)
        target.remove_stale(out)  # of workers that died
        manifest = finish(listing, out, plans, checked, options.recorded())
        shutil.rmtree(work, ignore_errors=True)
    return Report(manifest, already_there=False, kept_shards=kept)


def _write(source: Path, out: Path, plans: list[SplitPlan], jobs: int, advance: Advance) -> int:
    """Write the shards; a failure says how much is done."""
    try:
        return write_shards(source, out, plans, jobs, advance)
    except VitptError as err:
        done = [read_sidecar(out, plan, index) is not None for plan in plans for index in range(plan.num_shards)]
        kept = f"{sum(done):,} of {len(done):,} shards are finished and kept: the same command goes on from there"
        hint = f"{err.hint}\n{kept}" if err.hint else kept
        raise VitptError(err.message, hint=hint, exit_code=err.exit_code) from err


def _check_finished(listing: Listing, out: Path, options: Options) -> dict[str, Any]:
    """The manifest of finished shards if they are just what this command would write.

    Raises:
        VitptError: they were made from other files or with other options (exit 2), or are damaged (exit 3).
    """
    manifest = dataset.open_dataset(out).manifest
    hint = "name another folder as OUT, or use --overwrite to replace these shards"
    for name, value in options.recorded().items():
        found = manifest.get("options", {}).get(name)
        if found != value:
            option = "--" + name.replace("_", "-")
            before, now = ("none" if x is None else x for x in (found, value))
            raise VitptError(f"{out}: finished shards with {option} {before}, but now it is {now}", hint=hint)
    if manifest.get("source", {}).get("listing_sha256") != listing.sha256():
        raise VitptError(f"{out}: finished shards of other files than {listing.root} has now", hint=hint)
    if listing.newest_ns > (out / dataset.MANIFEST).stat().st_mtime_ns:
        raise VitptError(f"{out}: finished shards, but files in {listing.root} are newer", hint=hint)
    return manifest


def _require_space(out: Path, needed_bytes: int) -> None:
    fsio.require_free_space(out, max(0, needed_bytes), "writing the shards")


def _missing_bytes(out: Path, plan: SplitPlan) -> int:
    missing = [i for i in range(plan.num_shards) if read_sidecar(out, plan, i) is None]
    small_files = 4096 * (16 + 3 * plan.num_shards)
    return sum(plan.shard_bytes(i) for i in missing) + plan.num_samples * 200 + small_files


def _plan(listing: Listing, checked: dict[str, Checked], options: Options) -> list[SplitPlan]:
    plans = [
        plan_split(name, files, checked[name], options.samples_per_shard, options.seed)
        for name, files in listing.splits.items()
    ]
    found = [plan for plan in plans if plan is not None]
    if max(plan.num_samples for plan in found) > MAX_SAMPLES:
        raise VitptError(f"{listing.root}: more than {MAX_SAMPLES:,} images in one split", exit_code=Exit.DATA)
    return found


def _refuse_rejects(
    listing: Listing, checked: dict[str, Checked], options: Options, work: Path, reporter: Reporter
) -> None:
    """Stop when more files are rejected than the user allows, after listing them.

    The list stays in the work folder, and so do the results of the check: the next run need not do it again.
    """
    rejected = sum(int((~part.kept).sum()) for part in checked.values())
    total = listing.num_files
    allowed = max(options.max_reject_fraction * total, 1 if options.max_reject_fraction else 0)
    if rejected < total and rejected <= allowed:
        return
    lines = [line for line in reject_lines(listing, checked) if line["action"] == "rejected"]
    for line in lines[:SHOWN_REJECTS]:
        reporter.say(f"rejected: {line['name']}: {line['category']}: {line['detail']}")
    kinds = ", ".join(f"{n:,} {kind}" for kind, n in Counter(line["category"] for line in lines).most_common())
    if rejected == total:
        target.clear_work(work)  # nothing in it is worth a second try
        raise VitptError(f"{listing.root}: no usable image among {total:,} files ({kinds})", exit_code=Exit.DATA)
    path = work / "rejects.jsonl"
    fsio.write_bytes(path, b"".join(fsio.encode_json(line) + b"\n" for line in lines))
    if len(lines) > SHOWN_REJECTS:
        reporter.say(f"and {len(lines) - SHOWN_REJECTS:,} more, all listed in {path}")
    raise VitptError(
        f"{listing.root}: {rejected:,} of {total:,} files ({rejected / total:.2%}) rejected ({kinds}),"
        f" more than --max-reject-fraction {options.max_reject_fraction:g}",
        hint=f"mend or remove them, or accept the loss with --max-reject-fraction {_round_up(rejected / total):g}",
        exit_code=Exit.DATA,
    )


def _round_up(fraction: float) -> float:
    """The next larger multiple of 0.001."""
    return min(1.0, (int(fraction * 1000) + 1) / 1000)
