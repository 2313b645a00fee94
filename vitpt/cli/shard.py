"""`vitpt shard`."""

import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitpt.cli import console
from vitpt.cli.options import Json
from vitpt.errors import Preempted

if TYPE_CHECKING:
    from vitpt.shard.check import Advance
    from vitpt.shard.sources import Listing

SHOWN_IGNORED = 5


def shard(
    src: Annotated[Path, typer.Argument(metavar="SRC", help="Folder of images.", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Argument(
            metavar="OUT", help="New folder for the shards. Default: ./<SRC name>-shards.", show_default=False
        ),
    ] = None,
    val_fraction: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            min=0.0,
            max=1.0,
            help="Cut this share of every class out as the split `val`. Default: none.",
            show_default=False,
        ),
    ] = None,
    samples_per_shard: Annotated[int, typer.Option(metavar="IMAGES", min=1, help="Images in one tar file.")] = 4096,
    seed: Annotated[
        int, typer.Option(metavar="SEED", min=0, max=2**32 - 1, help="Seed of the order of the training images.")
    ] = 0,
    max_reject_fraction: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            min=0.0,
            max=1.0,
            help="Stop if a larger share of the files is unusable; one file may always be, except at 0.",
        ),
    ] = 0.01,
    strict: Annotated[
        bool, typer.Option("--strict", help="Stop if any file is unusable. Default: off.", show_default=False)
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs", "-j", metavar="N", min=1, help="Worker processes. Default: one per CPU.", show_default=False
        ),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace shards that are there already. Default: off.", show_default=False),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print what would be written; write nothing. Default: off.", show_default=False),
    ] = False,
    json: Json = False,
) -> None:
    """Write a folder of images as shards."""
    from vitpt.shard import target
    from vitpt.shard.build import Options, build
    from vitpt.shard.sources import check_root, list_source

    target_folder = out if out is not None else Path(f"{src.resolve().name}-shards")
    console.say(f"shards go to {target_folder}")
    check_root(src)
    state = target.examine(target_folder, src)
    listing = list_source(src, val_fraction or None)
    _say_listing(listing)
    options = Options(
        seed=seed,
        samples_per_shard=samples_per_shard,
        val_fraction=val_fraction or None,
        max_reject_fraction=0.0 if strict else max_reject_fraction,
        jobs=jobs or available_cpus(),
        overwrite=overwrite,
    )
    if dry_run:
        _print_plan(listing, target_folder, options.samples_per_shard, state, json)
        return
    try:
        report = build(listing, target_folder, options, Reporter())
    except (KeyboardInterrupt, Preempted):
        console.say("stopped; the same command goes on from here")
        raise
    if report.already_there:
        console.say(f"{target_folder}: these shards are finished already; nothing to do")
    elif report.kept_shards:
        console.say(f"{report.kept_shards:,} shards were finished by an earlier run and kept")
    _print_result(report.manifest, target_folder, json)


class Reporter:
    """Says what the job does on stderr."""

    def say(self, line: str) -> None:
        """One line for the user."""
        console.say(line)

    @contextmanager
    def stage(self, description: str, total: int, unit: str) -> "Iterator[Advance]":
        """A progress bar, or plain lines where there is no terminal."""
        began, done = time.monotonic(), 0
        with console.progress(total, description, unit) as bar:

            def advance(units: int, num_bytes: int) -> None:
                nonlocal done
                done += num_bytes
                rate = done / 1e6 / max(time.monotonic() - began, 1e-9)
                bar.advance(units, **{"MB/s": round(rate, 1)})

            yield advance


def available_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _count(number: int, singular: str, plural: str) -> str:
    return f"{number:,} {singular if number == 1 else plural}"


def _say_listing(listing: "Listing") -> None:
    counts = ", ".join(f"{name} {len(files.names):,}" for name, files in listing.splits.items())
    classes = (
        _count(len(listing.classes), "class", "classes")
        if listing.classes
        else "no classes: the images stay unlabelled"
    )
    console.say(f"{_count(listing.num_files, 'file', 'files')} ({counts}), {classes}")
    for what, names in (("ignored", listing.ignored), ("empty class folders", listing.empty)):
        if names:
            more = ", ..." if len(names) > SHOWN_IGNORED else ""
            console.say(f"{what}: {len(names):,} ({', '.join(names[:SHOWN_IGNORED])}{more})")


def _print_plan(listing: "Listing", out: Path, samples_per_shard: int, state: str, json: bool) -> None:
    rows = [
        (
            name,
            len(files.names),
            -(-len(files.names) // samples_per_shard),
            round(float(files.sizes.clip(0).sum()) / 1e6, 1),
        )
        for name, files in listing.splits.items()
    ]
    if json:
        splits = {name: {"files": files, "shards": shards, "megabytes": size} for name, files, shards, size in rows}
        console.result_json({"out": str(out), "state": state, "num_classes": len(listing.classes), "splits": splits})
        return
    console.result_table(f"{out} ({state})", ["split", "files", "shards at most", "MB"], rows)
    console.say("nothing was written; the files were not opened yet")
    console.say("next: the same command without --dry-run")


def _print_result(manifest: dict[str, Any], out: Path, json: bool) -> None:
    if json:
        keys = ("dataset_id", "num_classes", "splits", "checked", "source", "options")
        console.result_json({"out": str(out), **{key: manifest[key] for key in keys}})
    else:
        _print_tables(manifest, out)
    command = f"vitpt pretrain quickstart -o data.path={shlex.quote(str(out))}"
    if "val" not in manifest["splits"]:
        console.say("there is no split `val` to evaluate on; --val-fraction 0.1 would make one")
        command += " -o eval=null"
    console.say(f"next: {command}")


def _print_tables(manifest: dict[str, Any], out: Path) -> None:
    rows = []
    for name, counts in manifest["checked"].items():
        split = manifest["splits"].get(name, {"num_samples": 0, "num_labelled": 0, "shards": []})
        size = sum(part["bytes"] for part in split["shards"]) / 1e6
        rejected, repaired = (sum(counts[kind].values()) for kind in ("rejected", "repaired"))
        images, labelled, shards = split["num_samples"], split["num_labelled"], len(split["shards"])
        rows.append((name, counts["files"], rejected, repaired, images, labelled, shards, round(size, 1)))
    headings = ["split", "files", "rejected", "repaired", "images", "labelled", "shards", "MB"]
    title = f"{out}: {_count(manifest['num_classes'], 'class', 'classes')}, dataset_id {manifest['dataset_id'][:12]}"
    console.result_table(title, headings, rows)
    notes = [
        (kind, category, name, number)
        for kind in ("rejected", "repaired")
        for name, counts in manifest["checked"].items()
        for category, number in counts[kind].items()
    ]
    if notes:
        title = f"files not taken as they are (listed in {out / 'rejects.jsonl'})"
        console.result_table(title, ["", "category", "split", "files"], notes)
