"""Checks that need more than one value of a recipe, or more than its type."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vitpt.recipe.names import either, nearest
from vitpt.recipe.nodes import Mark, Problem, quote
from vitpt.recipe.schema import MODEL_NAME

MODEL_NUMBERS = ("width", "depth", "heads", "mlp", "patch")
_SIZES = {"tiny": "ti", "small": "s", "base": "b", "large": "l", "huge": "h"}
_USUAL_NAMES = [f"vit_{size}{patch}" for size in _SIZES.values() for patch in (8, 14, 16, 32)]
_Found = Iterator[tuple[str, str]]


@dataclass(frozen=True)
class Known:
    """The good values of a recipe, by dotted key, and where they were written.

    Attributes:
        values: defaults included; missing and bad values are absent, and checks that need them are skipped.
        marks: of what was written, bad values included.
        start: where a problem is reported that has no better place.
    """

    values: Mapping[str, Any]
    marks: Mapping[str, Mark]
    start: Mark

    def has(self, *keys: str) -> bool:
        """Tell whether all keys have a value other than null."""
        return all(self.values.get(key) is not None for key in keys)

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def said(self, key: str) -> str:
        """Name a value and its place: `train.steps = 100 (line 9)`."""
        place = self.marks[key].short() if key in self.marks else "default"
        return f"{key} = {_plain(self.values[key])} ({place})"

    def place(self, key: str) -> Mark:
        """Return the place of a key, or of the nearest section around it that was written."""
        while key:
            if key in self.marks:
                return self.marks[key]
            key = key.rpartition(".")[0]
        return self.start


def _plain(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_plain(part) for part in value)}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def cross_checks(known: Known) -> list[Problem]:
    """Return what is wrong between the values of a recipe, in no particular order."""
    checks = (_name, _model_form, _model_sizes, _crops, _length, _objective, _schedule, _evaluation)
    return [Problem(known.place(key), f"{key}: {message}") for check in checks for key, message in check(known)]


def patch_side(known: Known) -> int | None:
    """Return the patch side, by number or from the model's name, if it is known."""
    if known.has("model.patch"):
        return int(known["model.patch"])
    match = MODEL_NAME.fullmatch(known["model.name"]) if known.has("model.name") else None
    return int(match[2]) if match else None


def _name(known: Known) -> _Found:
    if not known.has("name"):
        return
    name = known["name"]
    if (
        re.search(r"[/\\\x00-\x1f\x7f]", name)
        or name.startswith((".", "-"))
        or len(name.encode(errors="replace")) > 100
    ):
        yield (
            "name",
            f"found {quote(name)}; expected a folder's name: up to 100 bytes, no slashes, not starting with . or -",
        )


def _model_form(known: Known) -> _Found:
    numbers = [
        name
        for name in MODEL_NUMBERS
        if f"model.{name}" in known.marks and known.values.get(f"model.{name}", 0) is not None
    ]
    if known.has("model.name"):
        name = known["model.name"]
        if not MODEL_NAME.fullmatch(name):
            yield (
                "model.name",
                f"found {quote(name)}; did you mean {_nearest_model(name)}? (vit_<ti|s|b|l|h><patch side>)",
            )
        if numbers:
            keys = either(f"model.{number}" for number in numbers)
            yield (
                f"model.{numbers[0]}",
                f"given beside {known.said('model.name')}; take either name or all of {', '.join(MODEL_NUMBERS)}, not {keys} with a name",
            )
    elif numbers and "model.name" in known.values:
        missing = [f"model.{name}" for name in MODEL_NUMBERS if name not in numbers]
        if missing:
            yield (
                f"model.{numbers[0]}",
                f"a model by number needs all of {', '.join(MODEL_NUMBERS)}; missing: {', '.join(missing)}",
            )


def _nearest_model(name: str) -> str:
    """Return our name for what other projects write as ViT-B/16, B_16 or vit_base_patch16_224."""
    text = name.lower()
    match = re.search(r"(tiny|small|base|large|huge|ti|[sblh])[^a-z0-9]*(?:patch)?[^a-z0-9]*(\d{1,2})(?!\d)", text)
    if match:
        return f"vit_{_SIZES.get(match[1], match[1])}{match[2]}"
    return (nearest(text, _USUAL_NAMES) or ["vit_b16"])[0]


def _model_sizes(known: Known) -> _Found:
    patch = patch_side(known)
    if known.has("model.res") and patch:
        res = known["model.res"]
        if res % patch:
            lower, upper = res // patch * patch, (res // patch + 1) * patch
            sizes = f"{lower} and {upper}" if lower else f"{upper}"
            source = "model.patch" if known.has("model.patch") else "model.name"
            yield (
                "model.res",
                f"{res} is not a multiple of the patch side {patch} of {known.said(source)}; the nearest sizes are {sizes}",
            )
    if known.has("model.width", "model.heads") and known["model.width"] % known["model.heads"]:
        yield "model.width", f"{known['model.width']} is not a multiple of {known.said('model.heads')}"
    if (
        known.has("model.width", "model.pos_embed")
        and known["model.pos_embed"] == "sincos2d"
        and known["model.width"] % 4
    ):
        yield "model.width", f"{known['model.width']} is not a multiple of 4, as {known.said('model.pos_embed')} needs"


def _crops(known: Known) -> _Found:
    for key in ("data.crop.area", "data.crop.ratio"):
        if known.has(key) and known[key][0] > known[key][1]:
            yield (
                key,
                f"the smallest value {known[key][0]:g} comes before the largest {known[key][1]:g}: they are in the wrong order",
            )
    for key in ("data.crop.short", "eval.crop.short"):
        if known.has(key, "model.res") and known[key] < known["model.res"]:
            yield key, f"{known[key]} is less than {known.said('model.res')}: no square of that size is left to cut"


def _length(known: Known) -> _Found:
    keys = [key for key in ("train.steps", "train.epochs") if known.has(key)]
    if len(keys) == 2:
        later = max(keys, key=lambda key: known.place(key))
        other = keys[0] if later == keys[1] else keys[1]
        yield later, f"given beside {known.said(other)}; take exactly one (-o {other}=null takes the other back)"
    elif not keys and {"train.steps", "train.epochs"} <= set(known.values):
        yield "train", "exactly one of train.steps and train.epochs is needed"
    if known.has("train.steps", "schedule.warmup_steps") and known["schedule.warmup_steps"] > known["train.steps"]:
        yield "schedule.warmup_steps", f"{known['schedule.warmup_steps']} is more than {known.said('train.steps')}"


def _objective(known: Known) -> _Found:
    if known.has("objective.shares"):
        total = sum(known["objective.shares"])
        if abs(total - 1) > 1e-6:
            yield "objective.shares", f"{_plain(known['objective.shares'])} sum to {total:g}; expected 1"
    if known.values.get("objective.norm_pix") and known.values.get("objective.target", "pixels") != "pixels":
        yield "objective.norm_pix", f"only with target: pixels; found {known.said('objective.target')}"
    if known.values.get("objective.head_bias") and known.values.get("objective.loss", "sigmoid") != "sigmoid":
        yield "objective.head_bias", f"only with loss: sigmoid; found {known.said('objective.loss')}"


def _schedule(known: Known) -> _Found:
    if known.has("schedule.end_lr", "optim.lr") and known["schedule.end_lr"] > known["optim.lr"]:
        yield "schedule.end_lr", f"{known['schedule.end_lr']:g} is more than the peak {known.said('optim.lr')}"


def metric_names(kind: str, target: str | None = None) -> list[str]:
    """Return the metrics an objective reports in an evaluation, without the split."""
    if kind == "supervised":
        return ["loss", "top1", "top5"]
    names = ["loss"] if target == "pixels" else ["loss", "accuracy"]
    return names + [f"{name}_{part}" for name in names for part in ("mask", "random", "keep")]


def _evaluation(known: Known) -> _Found:
    if not known.has("eval.split", "eval.metric", "eval.mode", "objective.kind"):
        return
    metric, split = known["eval.metric"], known["eval.split"]
    valid = [f"{split}/{name}" for name in metric_names(known["objective.kind"], known.values.get("objective.target"))]
    if metric not in valid:
        last_word = metric.rpartition("/")[2].replace("acc1", "top1").replace("acc5", "top5")
        close = nearest(f"{split}/{last_word}", valid) or valid[:1]
        yield (
            "eval.metric",
            f"found {quote(metric)}; did you mean {close[0]}? (<eval.split>/<metric of the objective>: {', '.join(valid)})",
        )
        return
    mode = "min" if "/loss" in metric else "max"
    if known["eval.mode"] != mode:
        yield (
            "eval.mode",
            f"{known['eval.mode']} would keep the worst checkpoint by {known.said('eval.metric')}; expected {mode}",
        )
