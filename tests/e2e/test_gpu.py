"""Training on a GPU: DALI decodes there, bf16, and a run that was stopped goes on. `pytest -m gpu -rs` says why it is left out."""

import json
import signal

import numpy as np
import pytest
import torch
from running import Quiet, digests, job, metrics, run, status, tiny_recipe

from vitpt import checkpoint
from vitpt.errors import Exit, VitptError
from vitpt.train.fit import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
STEPS = ("train.steps=10", "eval.every_steps=10", "save.every_steps=10", "log.every_steps=1")
GPU = (*STEPS, "train.precision=bf16", "data.decoder=dali_gpu")


class StopAfter(Quiet):
    """Sends SIGTERM to this process when a step is done."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def advance(self, step: int) -> None:
        if step == self.step:
            signal.raise_signal(signal.SIGTERM)


def losses(out):
    return [record["train/loss"] for record in metrics(out)]


@pytest.mark.parametrize("objective", ["supervised", "mpp"])
def test_ten_steps_stopped_and_gone_on_with(tiny_shards, tmp_path, objective):
    recipe = tiny_recipe(tmp_path, tiny_shards, objective)
    run(recipe, tmp_path / "straight", *GPU)
    with pytest.raises(VitptError) as caught:
        train(job(recipe, tmp_path / "stopped", *GPU), StopAfter(4))
    assert caught.value.exit_code == Exit.PREEMPTED
    report = run(recipe, tmp_path / "stopped", *GPU)
    assert any("after step 4" in line for line in report.lines)
    assert status(tmp_path / "stopped")["state"] == "finished"

    versions = checkpoint.read_state(checkpoint.find(tmp_path / "stopped"))["versions"]
    assert (versions["device"], versions["precision"], versions["decoder"]) == ("cuda", "bf16", "dali_gpu")
    assert np.array_equal(digests(tmp_path / "straight"), digests(tmp_path / "stopped"))
    # sums on a GPU may come in another order each time
    assert losses(tmp_path / "stopped") == pytest.approx(losses(tmp_path / "straight"), rel=1e-2)
    assert metrics(tmp_path / "stopped")[-1]["bad_samples"] == 0
    assert json.loads((tmp_path / "stopped/summary.json").read_text())["steps"] == 10


def test_the_gpus_decoder_sees_the_same_data_as_the_cpus(tiny_shards, tmp_path):
    recipe = tiny_recipe(tmp_path, tiny_shards)
    run(recipe, tmp_path / "gpu", *GPU)
    run(recipe, tmp_path / "cpu", *GPU, "data.decoder=cpu")
    assert np.array_equal(digests(tmp_path / "gpu"), digests(tmp_path / "cpu"))
    assert losses(tmp_path / "gpu") == pytest.approx(losses(tmp_path / "cpu"), rel=5e-2)
