"""The recipe: what is learnt and how it is run, as frozen pydantic models.

Every field is marked *result* (it decides what is learnt and enters the recipe hash) or *execution* (it only decides how the run
goes: it may change on resume). The YAML key, the field name and the metric name are one word.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Role = Literal["result", "execution"]
MAX_STEPS = 10**9  # a digest of each is kept
MODEL_NAME = re.compile(r"vit_(ti|s|b|l|h)([1-9]\d*)")


def result(default: Any = ..., **kwargs: Any) -> Any:
    """A field that decides what is learnt."""
    return Field(default, json_schema_extra={"role": "result"}, **kwargs)


def execution(default: Any = ..., **kwargs: Any) -> Any:
    """A field that decides only how the run goes."""
    return Field(default, json_schema_extra={"role": "execution"}, **kwargs)


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


Share = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Part = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class RandomResizedCrop(Section):
    """A random window of the image, resized to the model's resolution."""

    kind: Literal["random_resized"] = "random_resized"
    area: tuple[Share, Share] = result((0.05, 1.0), description="share of the image's area, smallest and largest")
    ratio: tuple[Positive, Positive] = result(
        (0.75, 4 / 3), description="width / height of the window, smallest and largest; log-uniform"
    )


class Squash(Section):
    """The whole image, both sides resized to the model's resolution."""

    kind: Literal["squash"] = "squash"


class ShortCrop(Section):
    """The shorter side resized to `short` pixels, then the central square of the model's resolution."""

    kind: Literal["short_crop"] = "short_crop"
    short: int = result(256, ge=1, le=2**16, description="shorter side after the resize, pixels")


TrainCrop = Annotated[RandomResizedCrop | Squash | ShortCrop, Field(discriminator="kind")]
EvalCrop = Annotated[Squash | ShortCrop, Field(discriminator="kind")]


class Data(Section):
    """Which samples, seen how."""

    path: str = execution(
        description="shards: an absolute path, a path relative to the working directory, or bundled:NAME"
    )
    split: str = result("train", description="split to train on")
    order: Literal["global"] = result(
        "global", description="order of the samples: a keyed permutation of the split per pass"
    )
    fraction: float = result(
        1.0,
        gt=0,
        le=1,
        description="share of the samples used: a prefix of one fixed permutation, so smaller shares are nested in larger ones",
    )
    labelled_only: bool = result(False, description="use only samples with a label")
    crop: TrainCrop = result(RandomResizedCrop(), description="window of the training view")
    flip: Literal["none", "horizontal", "both"] = result(
        "horizontal", description="random flips, each with probability 1/2"
    )
    mean: tuple[float, float, float] = result((0.5, 0.5, 0.5), description="mean of the pixels in [0, 1], per channel")
    std: tuple[Positive, Positive, Positive] = result(
        (0.5, 0.5, 0.5), description="standard deviation of the pixels in [0, 1], per channel"
    )
    max_bad_fraction: float = execution(
        1e-3,
        ge=0,
        le=1,
        description="largest share of the split's samples that may be undecodable before the run stops",
    )
    decoder: Literal["auto", "dali_gpu", "dali_cpu", "cpu"] = execution("auto", description="who decodes the images")
    threads: Literal["auto"] | Annotated[int, Field(ge=1, le=1024)] = execution(
        "auto", description="decoder threads per process"
    )
    prefetch: int = execution(2, ge=1, le=1024, description="micro-batches decoded ahead")
    crc: Literal["first", "always", "never"] = execution(
        "first", description="when a sample's crc32 is checked: in the first pass, always or never"
    )


class Model(Section):
    """The Vision Transformer: `name`, or `width`, `depth`, `heads`, `mlp` and `patch` by number.

    Fine-tuning recipes may leave out both: the checkpoint says.
    """

    name: str | None = result(None, description="vit_<ti|s|b|l|h><patch side>, such as vit_b16")
    width: int | None = result(None, ge=1, le=2**16, description="embedding width D")
    depth: int | None = result(None, ge=1, le=1000, description="number of blocks L")
    heads: int | None = result(None, ge=1, le=2**16, description="attention heads")
    mlp: int | None = result(None, ge=1, le=2**20, description="hidden width of the MLP")
    patch: int | None = result(None, ge=1, le=2**12, description="patch side, pixels")
    res: int = result(224, ge=1, le=2**14, description="image side, pixels")
    pool: Literal["tok", "gap"] = result(
        "tok", description="tok: a class token is read; gap: the mean of the patches, no class token"
    )
    pos_embed: Literal["learned", "sincos2d", "none"] = result("learned", description="position embedding")
    gelu: Literal["tanh", "erf"] = result(
        "tanh", description="GELU: tanh approximation (as the authors' code) or exact"
    )
    dropout: float = result(0.0, ge=0, lt=1, description="after positions, attention projection and both MLP layers")
    drop_path: float = result(0.0, ge=0, lt=1, description="stochastic depth of the last block; linear in depth")


class Supervised(Section):
    """Classification."""

    kind: Literal["supervised"] = "supervised"
    loss: Literal["softmax", "sigmoid"] = result(
        "softmax", description="softmax cross-entropy, or sigmoid cross-entropy summed over classes"
    )
    label_smoothing: float = result(0.0, ge=0, lt=1, description="share of the target spread over all classes")
    head_bias: float = result(
        0.0, description="initial bias of the head; -6.9 or -10 with sigmoid on 1k or 21k classes"
    )
    representation: bool = result(
        False, description="a hidden tanh layer before the head (paper section 3.1); cannot be exported to timm"
    )


class Mpp(Section):
    """Masked patch prediction (paper section 4.6, appendix B.1.2)."""

    kind: Literal["mpp"] = "mpp"
    corrupt: float = result(0.5, gt=0, le=1, description="share of the patch embeddings that is corrupted")
    shares: tuple[Part, Part, Part] = result(
        (0.8, 0.1, 0.1), description="of the corrupted: replaced by the mask token, by another patch, kept"
    )
    target: Literal["mean_color_3bit", "cells_4x4_3bit", "pixels"] = result(
        "mean_color_3bit", description="what is predicted of each corrupted patch"
    )
    norm_pix: bool = result(False, description="target pixels: normalise each patch by its own mean and variance")


class AdamW(Section):
    """AdamW in torch's semantics: the decay is multiplied by the learning rate."""

    kind: Literal["adamw"] = "adamw"
    lr: float = result(gt=0, description="peak learning rate, for the recipe's global batch")
    betas: tuple[Beta, Beta] = result((0.9, 0.999), description="decay of the moments")
    eps: float = result(1e-8, gt=0, description="added to the root of the second moment")
    weight_decay: float = result(0.0, ge=0, description="of Linear and Conv weights only")
    clip_grad_norm: float | None = result(1.0, gt=0, description="largest global norm of the gradient; null: none")


class Sgd(Section):
    """SGD with momentum, no Nesterov, no dampening."""

    kind: Literal["sgd"] = "sgd"
    lr: float = result(gt=0, description="peak learning rate, for the recipe's global batch")
    momentum: float = result(0.9, ge=0, lt=1, description="momentum")
    weight_decay: float = result(0.0, ge=0, description="of Linear and Conv weights only")
    clip_grad_norm: float | None = result(1.0, gt=0, description="largest global norm of the gradient; null: none")


class Schedule(Section):
    """Linear warmup from 0, then cosine or linear decay to `end_lr`."""

    kind: Literal["cosine", "linear"] = result("cosine", description="shape of the decay")
    warmup_steps: int = result(0, ge=0, description="steps of the warmup")
    end_lr: float = result(0.0, ge=0, description="learning rate at the end (absolute)")


class Ema(Section):
    """Exponential moving average of all parameters; where there is one, it is what is evaluated, converted and fine-tuned."""

    decay: float = result(0.9999, gt=0, lt=1, description="largest decay; step t uses min(decay, (1+t)/(10+t))")


class Train(Section):
    """Length (exactly one of `steps` and `epochs`) and batch."""

    steps: int | None = result(None, ge=1, description="optimizer steps")
    epochs: float | None = result(None, gt=0, description="passes over the data, instead of steps")
    global_batch_size: int = result(ge=1, le=2**24, description="samples of one step, over all processes")
    micro_batch_size: Literal["auto"] | Annotated[int, Field(ge=1)] = execution(
        "auto", description="largest number of samples a process runs at once"
    )
    precision: Literal["auto", "fp32", "bf16"] = result("auto", description="auto: bf16 on CUDA, fp32 on CPUs")


class Eval(Section):
    """Evaluation while training; its metric decides which checkpoint is BEST."""

    split: str = execution("val", description="split to evaluate on")
    every_steps: int = execution(1000, ge=1, description="steps between evaluations; the last step is always evaluated")
    metric: str = execution("val/loss", description="metric that decides BEST")
    mode: Literal["min", "max"] = execution("min", description="whether smaller or larger is better")
    crop: EvalCrop = execution(Squash(), description="evaluation view; stored in the checkpoint")


class Save(Section):
    """Checkpoints."""

    every_steps: int = execution(1000, ge=1, description="steps between checkpoints")
    every_minutes: float | None = execution(20.0, gt=0, description="also at least this often; null: never")
    keep_last: int = execution(3, ge=1, description="checkpoints kept, besides BEST")


class Log(Section):
    """Metrics."""

    every_steps: int = execution(50, ge=1, description="steps between log lines")
    trackers: tuple[str, ...] = execution((), description="trackers of Accelerate, such as tensorboard or wandb")


class Recipe(Section):
    """A whole recipe."""

    name: str = execution(description="name of the run: the folder under ./runs")
    seed: int = result(0, ge=0, lt=2**32, description="seed of every random number")
    finetune: str | None = execution(None, description="recipe that `vitpt finetune` takes after this one")
    data: Data
    model: Model = Model()
    objective: Annotated[Supervised | Mpp, Field(discriminator="kind")]
    optim: Annotated[AdamW | Sgd, Field(discriminator="kind")]
    schedule: Schedule = Schedule()
    ema: Ema | None = None
    train: Train
    eval: Eval | None = execution(Eval(), description="null: no evaluation")
    save: Save = Save()
    log: Log = Log()
