"""Names of recipe keys: all that exist, what other projects call them, and which one was probably meant."""

import difflib
from collections.abc import Iterable, Iterator
from functools import cache
from typing import get_args

from pydantic.fields import FieldInfo

from vitpt.recipe.schema import Recipe, Section

# What timm, big_vision, DINOv2, MAE, Hugging Face and common habit call our keys.
ALIASES = {
    "accum_freq": "train.micro_batch_size",
    "accumulation_steps": "train.micro_batch_size",
    "amp": "train.precision",
    "arch": "model.name",
    "augmentation": "data.crop",
    "base_lr": "optim.lr",
    "batch": "train.global_batch_size",
    "batch_size": "train.global_batch_size",
    "batch_size_per_gpu": "train.micro_batch_size",
    "blr": "optim.lr",
    "checkpoint": "save",
    "checkpoints": "save",
    "clip": "optim.clip_grad_norm",
    "clip_grad": "optim.clip_grad_norm",
    "crop_min_scale": "data.crop.area",
    "data_dir": "data.path",
    "dataset": "data",
    "decay_type": "schedule.kind",
    "drop_path_rate": "model.drop_path",
    "drop_rate": "model.dropout",
    "dtype": "train.precision",
    "embed_dim": "model.width",
    "ema_decay": "ema.decay",
    "epoch": "train.epochs",
    "eval_every": "eval.every_steps",
    "eval_steps": "eval.every_steps",
    "evaluation": "eval",
    "global_crops_size": "model.res",
    "grad_clip": "optim.clip_grad_norm",
    "grad_clip_norm": "optim.clip_grad_norm",
    "gradient_accumulation_steps": "train.micro_batch_size",
    "head_dropout": "model.dropout",
    "hflip": "data.flip",
    "hidden_dim": "model.width",
    "hidden_size": "model.width",
    "image_mean": "data.mean",
    "image_size": "model.res",
    "image_std": "data.std",
    "img_size": "model.res",
    "input": "data",
    "input_size": "model.res",
    "intermediate_size": "model.mlp",
    "keep_checkpoints": "save.keep_last",
    "layers": "model.depth",
    "learning_rate": "optim.lr",
    "log_every": "log.every_steps",
    "logging": "log",
    "logging_steps": "log.every_steps",
    "lr_base": "optim.lr",
    "lr_scheduler": "schedule",
    "mask_ratio": "objective.corrupt",
    "mask_ratio_min_max": "objective.corrupt",
    "max_grad_norm": "optim.clip_grad_norm",
    "max_lr": "optim.lr",
    "max_steps": "train.steps",
    "min_lr": "schedule.end_lr",
    "mixed_precision": "train.precision",
    "mlp_dim": "model.mlp",
    "model_name": "model.name",
    "num_epochs": "train.epochs",
    "num_heads": "model.heads",
    "num_layers": "model.depth",
    "num_steps": "train.steps",
    "num_train_epochs": "train.epochs",
    "num_workers": "data.threads",
    "opt": "optim.kind",
    "opt_betas": "optim.betas",
    "opt_eps": "optim.eps",
    "optax_name": "optim.kind",
    "optimizer": "optim",
    "patch_size": "model.patch",
    "per_device_batch_size": "train.micro_batch_size",
    "per_device_train_batch_size": "train.micro_batch_size",
    "pooling": "model.pool",
    "random_seed": "seed",
    "resolution": "model.res",
    "save_every": "save.every_steps",
    "save_steps": "save.every_steps",
    "save_total_limit": "save.keep_last",
    "scale": "data.crop.area",
    "sched": "schedule.kind",
    "scheduler": "schedule",
    "smoothing": "objective.label_smoothing",
    "stoch_depth": "model.drop_path",
    "subset": "data.fraction",
    "task": "objective",
    "total_epochs": "train.epochs",
    "total_steps": "train.steps",
    "tracker": "log.trackers",
    "train_data": "data.path",
    "training": "train",
    "variant": "model.name",
    "warmup": "schedule.warmup_steps",
    "wd": "optim.weight_decay",
    "workers": "data.threads",
}

# A word that belongs to the suggestion, because the number means something else elsewhere.
NOTES = {
    "train.global_batch_size": "the samples of one step over all processes together",
    "train.micro_batch_size": "an upper bound for one process; accumulation follows from it and train.global_batch_size",
    "model.mlp": "the hidden width itself, not a ratio",
    "objective.corrupt": "the share of patches",
}


def sections_of(field: FieldInfo) -> tuple[type[Section], ...]:
    """Return the sections a field may hold: none for a plain value, several for a union by `kind`."""
    candidates = get_args(field.annotation) or (field.annotation,)
    return tuple(c for c in candidates if isinstance(c, type) and issubclass(c, Section))


def _walk(section: type[Section], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        for below in sections_of(field):
            yield from _walk(below, f"{prefix}{name}.")


@cache
def all_keys() -> tuple[str, ...]:
    """Return every dotted key a recipe may have, in the order of the schema."""
    return tuple(dict.fromkeys(_walk(Recipe)))


def nearest(word: str, choices: Iterable[str], count: int = 1) -> list[str]:
    """Return the choices most like `word`, the best first."""
    return difflib.get_close_matches(word, list(choices), n=count, cutoff=0.6)


def either(choices: Iterable[str]) -> str:
    """Join choices for a sentence: `a`, `a or b`, `a, b or c`."""
    words = list(choices)
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def suggest_key(path: str, name: str, siblings: Iterable[str]) -> list[str]:
    """Return the dotted keys that an unknown key probably means, the best first.

    Args:
        path: dotted path of the section it stands in, "" at the top.
        name: the unknown key.
        siblings: valid keys of that section.
    """
    prefix = f"{path}." if path else ""
    word = name.strip().lower().replace("-", "_")
    keys = all_keys()
    if prefix + word in keys:
        return [prefix + word]
    if word in keys:
        return [word]
    if word in ALIASES:
        return [ALIASES[word]]
    exact = [key for key in keys if key.rpartition(".")[2] == word]
    if exact:
        return exact[:3]
    close = nearest(word, siblings)
    if close:
        return [prefix + close[0]]
    aliases = nearest(word, ALIASES)
    last_words = nearest(word, {key.rpartition(".")[2] for key in keys})
    by_last_word = [key for key in keys if last_words and key.rpartition(".")[2] == last_words[0]]
    return by_last_word[:3] or [ALIASES[alias] for alias in aliases]
