"""Stage 5: columns, indexes, class list, list of rejects, and the manifest last."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from vitpt import __version__, dataset, fsio
from vitpt.shard import target
from vitpt.shard.check import Checked, library_versions
from vitpt.shard.plan import SplitPlan
from vitpt.shard.sources import Listing
from vitpt.shard.write import dali_index, sidecar_path

INFO = "_info.json"  # timm's name
REJECTS = "rejects.jsonl"


def finish(
    listing: Listing, out: Path, plans: list[SplitPlan], checked: dict[str, Checked], options: dict[str, Any]
) -> dict[str, Any]:
    """Write everything that describes the shards, remove what an earlier plan left, and write the manifest; returns it."""
    splits = {plan.name: _finish_split(out, plan) for plan in plans}
    fsio.write_bytes(out / dataset.CLASSES, "".join(f"{name}\n" for name in listing.classes).encode())
    fsio.write_json(out / INFO, timm_info(splits))
    rejects = b"".join(fsio.encode_json(line) + b"\n" for line in reject_lines(listing, checked))
    fsio.write_bytes(out / REJECTS, rejects)
    manifest = {
        "format": dataset.FORMAT,
        "version": dataset.VERSION,
        "dataset_id": dataset.dataset_id(listing.classes, {name: str(s["split_id"]) for name, s in splits.items()}),
        "written_by": f"vitpt {__version__}",
        "libraries": library_versions(),
        "num_classes": len(listing.classes),
        "splits": splits,
        "source": {
            "layout": listing.layout,
            "files": listing.num_files,
            "bytes": listing.num_bytes,
            "ignored": len(listing.ignored),
            "listing_sha256": listing.sha256(),
        },
        "options": options,
        "checked": {name: _counts(part) for name, part in checked.items()},
    }
    target.clear(out, keep=_files_of(plans))
    fsio.write_json(out / dataset.MANIFEST, manifest)
    return manifest


def reject_lines(listing: Listing, checked: dict[str, Checked]) -> list[dict[str, str]]:
    """Every file that was not taken as it is, sorted by the bytes of its name."""
    past = {"repair": "repaired", "reject": "rejected"}
    lines = [
        {
            "name": listing.splits[split].names[row],
            "split": split,
            "category": note.category,
            "action": past[note.action],
            "detail": note.detail,
        }
        for split, part in checked.items()
        for row, note in part.notes.items()
    ]
    return sorted(lines, key=lambda line: os.fsencode(line["name"]))


def timm_info(splits: dict[str, Any]) -> dict[str, Any]:
    """What timm's `wds/` reader wants to know. `val` is also there as `validation`, which timm asks for by default."""
    info = {}
    for name, split in splits.items():
        for alias in ("val", "validation") if name == "val" else (name,):
            info[alias] = {
                "name": alias,
                "num_samples": split["num_samples"],
                "filenames": [shard["file"] for shard in split["shards"]],
                "shard_lengths": [shard["samples"] for shard in split["shards"]],
            }
    return {"splits": info}


def _finish_split(out: Path, plan: SplitPlan) -> dict[str, Any]:
    """Write the indexes of one split; returns its entry in the manifest."""
    folder = dataset.index_folder(out, plan.name)
    hashes = {}
    for name, column in plan.columns.items():
        path = folder / f"{name}.npy"
        dataset.write_array(path, column)
        hashes[path.name] = fsio.sha256_file(path)
    fsio.write_bytes(folder / dataset.NAMES, plan.names)
    hashes[dataset.NAMES] = fsio.sha256_bytes(plan.names)
    shards = []
    for index in range(plan.num_shards):
        fsio.write_bytes((out / plan.shard_file(index)).with_suffix(".idx"), dali_index(plan, index))
        sidecar = json.loads(sidecar_path(out, plan.name, index).read_bytes())
        shards.append({key: sidecar[key] for key in ("file", "bytes", "samples", "sha256")})
    return {
        "split_id": plan.split_id,
        "order": "shuffled" if plan.shuffled else "source",
        "num_samples": plan.num_samples,
        "num_labelled": int((plan.files.labels >= 0).sum()),
        "shards": shards,
        "columns": hashes,
    }


def _counts(part: Checked) -> dict[str, Any]:
    """Numbers of files of one split by what became of them."""
    counts = Counter((note.action, note.category) for note in part.notes.values())
    by_action = {
        action: {category: n for (of, category), n in sorted(counts.items()) if of == action}
        for action in ("repair", "reject")
    }
    return {"files": len(part.rows), "repaired": by_action["repair"], "rejected": by_action["reject"]}


def _files_of(plans: list[SplitPlan]) -> set[str]:
    """Names of all files of the dataset, relative to its folder."""
    names = {dataset.MANIFEST, dataset.CLASSES, INFO, REJECTS}
    for plan in plans:
        folder = f"{plan.name}.index"
        names |= {f"{folder}/{column}.npy" for column in plan.columns} | {f"{folder}/{dataset.NAMES}"}
        for index in range(plan.num_shards):
            names |= {plan.shard_file(index), f"{plan.name}-{index:06d}.idx", f"{folder}/{index:06d}.json"}
    return names
