"""What a training command is about to do, checked before anything is built or written."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitpt import checkpoint
from vitpt.dataset import Dataset, Split, open_dataset
from vitpt.errors import Exit, VitptError
from vitpt.fsio import TEMP_MARK, canonical_json, parse_json, sha256_bytes, sha256_file
from vitpt.models.variants import ViTConfig, config_from
from vitpt.recipe.load import load_recipe, recipe_hash, require_model, result_differences, result_fields
from vitpt.recipe.schema import MAX_STEPS, Recipe, Supervised
from vitpt.stream.order import rows_in_use
from vitpt.train.claim import LOCK
from vitpt.train.schedule import total_steps
from vitpt.train.status import read_status

_NUMBERS = ("width", "depth", "heads", "mlp", "patch")
_SUMMARY = {"steps", "images_seen", "epochs", "best", "checkpoint", "data_digest", "bad_samples"}


@dataclass(frozen=True)
class Init:
    """A checkpoint whose backbone a run starts from.

    Attributes:
        folder: the checkpoint folder.
        config: its config.json.
        sha256: of the file with the weights.
    """

    folder: Path
    config: dict[str, Any]
    sha256: str


@dataclass(frozen=True)
class Job:
    """A checked training run.

    Attributes:
        command: `pretrain` or `finetune`.
        recipe: resolved, the model filled in.
        folder: the run's directory; perhaps not there yet.
        model: the backbone.
        dataset: the opened shards.
        split: to train on.
        eval_split: to evaluate on, if the recipe evaluates.
        num_samples: samples of the split in use (N).
        steps: optimizer updates of the whole run (T).
        init: where the weights start from, if not from scratch.
        data: content of data.json.
    """

    command: str
    recipe: Recipe
    folder: Path
    model: ViTConfig
    dataset: Dataset
    split: Split
    eval_split: Split | None
    num_samples: int
    steps: int
    init: Init | None
    data: dict[str, Any]

    @property
    def num_classes(self) -> int | None:
        """Classes of the objective; None when it has none."""
        return len(self.dataset.classes) if isinstance(self.recipe.objective, Supervised) else None

    @property
    def recipe_hash(self) -> str:
        """Hash of all that decides what is learnt, besides the data."""
        return recipe_hash(self.recipe, {"init": self.init.sha256 if self.init else ""})

    @property
    def data_hash(self) -> str:
        """Hash of data.json."""
        return sha256_bytes(canonical_json(self.data))

    @property
    def checkpoints(self) -> Path:
        """Folder of the run's checkpoints."""
        return self.folder / "checkpoints"


def read_init(path: Path) -> Init:
    """The checkpoint that a path means, as a start for the weights."""
    folder = checkpoint.find(path)
    return Init(folder, checkpoint.read_model_config(folder), sha256_file(checkpoint.weights_file(folder)))


def make_job(command: str, recipe: Recipe, out: Path | None, init: Init | None = None) -> Job:
    """Open the data, settle the model and the length, and check that a run in `out` may start or go on.

    Raises:
        VitptError: exit 2 for paths and for a changed recipe, 3 for the data.
    """
    if init is not None:
        recipe = _with_model_of(recipe, init)
    require_model(recipe)
    dataset = open_dataset(recipe.data.path)
    split = dataset.split(recipe.data.split)
    _check_labels(recipe, dataset, split)
    rows = rows_in_use(split, recipe.data.fraction, recipe.data.labelled_only)
    num_samples = split.num_samples if rows is None else len(rows)
    steps = recipe.train.steps or total_steps(recipe.train.epochs or 0, num_samples, recipe.train.global_batch_size)
    job = Job(
        command=command,
        recipe=recipe,
        folder=out or Path("runs") / recipe.name,
        model=config_from(recipe.model),
        dataset=dataset,
        split=split,
        eval_split=_eval_split(recipe, dataset),
        num_samples=num_samples,
        steps=steps,
        init=init,
        data=_describe_data(recipe, dataset, split, num_samples),
    )
    _check_length(job)
    _check_folder(job)
    return job


def is_finished(job: Job) -> bool:
    """Whether the run in the job's folder has nothing left to do."""
    if read_status(job.folder).get("state") != "finished":
        return False
    with suppress(VitptError):
        return bool(read_summary(job))
    return False  # going on from the last checkpoint writes the summary again


def read_summary(job: Job) -> dict[str, Any]:
    """summary.json of a finished run.

    Raises:
        VitptError: it is missing or damaged (exit 3).
    """
    path = job.folder / "summary.json"
    summary = _stored(path)
    best = summary.get("best")
    if not summary.keys() >= _SUMMARY or not (best is None or (isinstance(best, dict) and "value" in best)):
        raise VitptError(f"{path}: not the summary of a run", exit_code=Exit.DATA)
    return summary


def _with_model_of(recipe: Recipe, init: Init) -> Recipe:
    """The recipe with what it leaves open taken from the checkpoint: model, GELU, mean and std of the pixels."""
    source, model = init.config["model"], recipe.model
    if model.name is None and model.width is None:
        model = model.model_copy(update={key: source[key] for key in _NUMBERS})
    if "gelu" not in recipe.model.model_fields_set:
        model = model.model_copy(update={"gelu": source["gelu"]})
    if "pos_embed" not in recipe.model.model_fields_set:
        model = model.model_copy(update={"pos_embed": source["pos_embed"]})
    config = config_from(model)
    for key in (*_NUMBERS, "gelu", "pos_embed"):
        if getattr(config, key) != source[key]:
            raise VitptError(
                f"model.{key}: the recipe says {getattr(config, key)}, the checkpoint {init.folder} has {source[key]}",
                hint="leave the model out of the recipe to take the checkpoint's, or choose another --from",
            )
    pixels = {
        key: tuple(init.config["pixels"][key]) for key in ("mean", "std") if key not in recipe.data.model_fields_set
    }
    return recipe.model_copy(update={"model": model, "data": recipe.data.model_copy(update=pixels)})


def _check_labels(recipe: Recipe, dataset: Dataset, split: Split) -> None:
    if not isinstance(recipe.objective, Supervised):
        return
    missing = split.num_samples - split.num_labelled
    if not dataset.classes or not split.num_labelled:
        raise VitptError(
            f"{dataset.root}: split {split.name!r} has no labels, which objective.kind: supervised needs",
            hint="shard a folder with one subfolder a class, or use an objective without labels (mpp)",
            exit_code=Exit.DATA,
        )
    if missing and not recipe.data.labelled_only:
        raise VitptError(
            f"{dataset.root}: {missing} of {split.num_samples} samples of split {split.name!r} have no label",
            hint="-o data.labelled_only=true takes the rest",
            exit_code=Exit.DATA,
        )


def _eval_split(recipe: Recipe, dataset: Dataset) -> Split | None:
    if recipe.eval is None:
        return None
    if recipe.eval.split not in dataset.splits:
        raise VitptError(
            f"eval.split: {dataset.root} has no split {recipe.eval.split!r}; there is {', '.join(dataset.splits)}",
            hint="shard with --val-fraction to make one, or set eval: null",
        )
    split = dataset.splits[recipe.eval.split]
    if isinstance(recipe.objective, Supervised) and not split.num_labelled:
        raise VitptError(f"eval.split: no sample of {split.name!r} has a label", exit_code=Exit.DATA)
    return split


def _check_length(job: Job) -> None:
    if job.steps > MAX_STEPS:
        raise VitptError(f"train.steps or train.epochs: {job.steps:.3g} steps; at most {MAX_STEPS:,}")
    if job.recipe.schedule.warmup_steps >= job.steps:
        raise VitptError(
            f"schedule.warmup_steps: {job.recipe.schedule.warmup_steps} steps of warmup, but the run has {job.steps} steps",
            hint=f"train.steps or train.epochs decide the length: {job.num_samples} samples are one epoch",
        )


def _describe_data(recipe: Recipe, dataset: Dataset, split: Split, num_samples: int) -> dict[str, Any]:
    """What decides which samples are seen when, by content and not by path."""
    return {
        "sources": [{"split_id": split.split_id, "weight": 1.0, "classes": list(dataset.classes)}],
        "split": split.name,
        "fraction": recipe.data.fraction,
        "labelled_only": recipe.data.labelled_only,
        "order": {"kind": recipe.data.order, "version": 1},
        "num_samples": num_samples,
    }


def _check_folder(job: Job) -> None:
    """Refuse a folder that belongs to something else, or to a run that would learn something else."""
    folder = job.folder
    if not folder.exists():
        return
    if not folder.is_dir():
        raise VitptError(f"{folder}: a file is in the way of the run's folder", hint="give another --out")
    if not (folder / "recipe.yaml").is_file():
        content = sorted(path.name for path in folder.iterdir() if not _of_a_killed_start(path))
        if content:
            raise VitptError(
                f"{folder}: not empty and not a run of vitpt (it holds {', '.join(content[:3])}, but no recipe.yaml)",
                hint="give another --out",
            )
        return
    way_out = f"give a new --out to start another run, or remove {folder}"
    changed = result_differences(result_fields(load_recipe(folder / "recipe.yaml").recipe), result_fields(job.recipe))
    if changed:
        lines = [f"{key}: the run in {folder} has {old}, the recipe now says {new}" for key, old, new in changed]
        raise VitptError("\n".join(lines), hint=f"a run goes on only as it was started: {way_out}")
    before = _stored(folder / "init.json").get("sha256", "")
    now = job.init.sha256 if job.init else ""
    if before != now:
        raise VitptError(
            f"--from: the run in {folder} started from other weights (sha256 {before or 'none'}, now {now or 'none'})",
            hint=way_out,
        )
    stored = _stored(folder / "data.json")
    for key, value in job.data.items():
        if key in stored and stored[key] != parse_json(canonical_json(value)):
            raise VitptError(
                f"{job.dataset.root}: these are other data than the run in {folder} was started on ({key} differs)",
                hint=way_out,
                exit_code=Exit.DATA,
            )


def _of_a_killed_start(path: Path) -> bool:
    """Whether a file may lie in a run's folder before its recipe does."""
    empty = path.name == "checkpoints" and not any(path.glob("*"))
    return empty or path.name in (LOCK, "status.json") or TEMP_MARK in path.name


def _stored(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise VitptError(f"{path}: not readable as JSON ({error})", exit_code=Exit.DATA) from None
    if not isinstance(content, dict):
        raise VitptError(f"{path}: damaged (expected a JSON object)", exit_code=Exit.DATA)
    return content
