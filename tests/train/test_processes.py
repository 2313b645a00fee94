"""Several processes see what one sees; killed processes lose nothing."""

import random
import signal
import subprocess
import time

import numpy as np
import pytest
from running import (
    command,
    digests,
    environment,
    metrics,
    run,
    same_weights,
    status,
    tiny_recipe,
    torchrun,
    weights,
)

LONG = ("train.steps=300", "save.every_steps=7", "eval.every_steps=60")


def options(overrides):
    """The overrides as the command line takes them."""
    return [part for value in overrides for part in ("-o", value)]


def train_losses(out):
    return [record["train/loss"] for record in metrics(out) if "train/loss" in record]


@pytest.mark.two_process
@pytest.mark.parametrize(
    ("ranks", "objective"),
    [
        (2, "mpp"),
        (3, "supervised"),  # 10 samples over 3 processes: 4, 4, 2 and two empty slots
        pytest.param(2, "supervised", marks=pytest.mark.slow),
        pytest.param(3, "mpp", marks=pytest.mark.slow),
    ],
)
def test_several_processes_consume_the_same_data(tiny_shards, tmp_path, objective, ranks):
    recipe = tiny_recipe(tmp_path, tiny_shards, objective)
    extra = ("log.every_steps=1", "train.steps=20", "train.micro_batch_size=3")
    run(recipe, tmp_path / "one", *extra)
    done = torchrun(ranks, "pretrain", recipe, "--out", "many", *options(extra), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"processes:   {ranks}" in done.stderr
    assert done.stderr.count("step 20/20") == 1  # rank 0 alone prints
    assert np.array_equal(digests(tmp_path / "one"), digests(tmp_path / "many"))
    assert train_losses(tmp_path / "many") == pytest.approx(train_losses(tmp_path / "one"), rel=1e-5)
    for one, many in zip(metrics(tmp_path / "one"), metrics(tmp_path / "many"), strict=True):
        if "val/loss" in one:
            assert many["val/loss"] == pytest.approx(one["val/loss"], rel=1e-4)


@pytest.mark.two_process
def test_a_run_goes_on_with_another_number_of_processes(tiny_shards, tmp_path):
    recipe = tiny_recipe(tmp_path, tiny_shards)
    run(recipe, tmp_path / "straight")
    first = torchrun(2, "pretrain", recipe, "--out", "run", "-o", "data.threads=1", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    # take away the end of the run, so that one process finishes it
    for step in (20, 24):
        for path in (tmp_path / f"run/checkpoints/step-{step:08d}").iterdir():
            path.unlink()
    (tmp_path / "run/summary.json").unlink()
    report = run(recipe, tmp_path / "run")
    assert any("after step 1" in line for line in report.lines)
    assert np.array_equal(digests(tmp_path / "straight"), digests(tmp_path / "run"))
    assert train_losses(tmp_path / "run") == pytest.approx(train_losses(tmp_path / "straight"), rel=1e-5)


def start(recipe, cwd):
    return subprocess.Popen(
        command("pretrain", recipe, "--out", "run", *options(LONG)),
        cwd=cwd,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_step(process, least):
    """Read the process's lines until it has logged at least this step, or ends."""
    for line in process.stderr:
        if line.startswith("step ") and int(line.split()[1].split("/")[0]) >= least:
            return


def kill_and_go_on(recipe, cwd, kills, seed):
    chance = random.Random(seed)
    for _ in range(kills):
        process = start(recipe, cwd)
        reached = (status(cwd / "run")["step"] or 0) if (cwd / "run/status.json").exists() else 0
        wait_for_step(process, min(reached + 5, 290))
        time.sleep(chance.uniform(0, 0.25))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stderr.close()
    run(recipe, cwd / "run", *LONG)


@pytest.fixture(scope="module")
def long_run(tiny_shards, tmp_path_factory):
    folder = tmp_path_factory.mktemp("long")
    recipe = tiny_recipe(folder, tiny_shards)
    run(recipe, folder / "run", *LONG)
    return recipe, folder / "run"


def test_kill_9_at_random_moments_changes_no_bit(long_run, tmp_path):
    recipe, straight = long_run
    kill_and_go_on(recipe, tmp_path, kills=3, seed=1)
    assert same_weights(straight, tmp_path / "run")
    assert np.array_equal(digests(straight), digests(tmp_path / "run"))
    steps = [record["step"] for record in metrics(tmp_path / "run")]
    assert steps == [record["step"] for record in metrics(straight)]


@pytest.mark.slow
def test_kill_9_at_20_random_moments_changes_no_bit(long_run, tmp_path):
    recipe, straight = long_run
    kill_and_go_on(recipe, tmp_path, kills=20, seed=2)
    assert same_weights(straight, tmp_path / "run")
    assert np.array_equal(digests(straight), digests(tmp_path / "run"))


@pytest.mark.parametrize(
    ("number", "code", "state"), [(signal.SIGTERM, 75, "preempted"), (signal.SIGINT, 130, "interrupted")]
)
def test_signals_save_and_tell(long_run, tmp_path, number, code, state):
    recipe, straight = long_run
    process = start(recipe, tmp_path)
    wait_for_step(process, 30)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert "run the same command again" in errors.splitlines()[-1]
    assert "Traceback" not in errors
    assert status(tmp_path / "run")["state"] == state
    assert status(tmp_path / "run")["exit_code"] == code
    run(recipe, tmp_path / "run", *LONG)
    assert same_weights(straight, tmp_path / "run")
    assert weights(tmp_path / "run").keys() == weights(straight).keys()


@pytest.mark.two_process
def test_sigterm_to_one_of_two_processes_stops_both(tiny_shards, tmp_path):
    recipe = tiny_recipe(tmp_path, tiny_shards)
    import sys

    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    args = ["pretrain", str(recipe), "--out", "run", "-o", "train.steps=100000", "-o", "log.every_steps=5"]
    process = subprocess.Popen(
        [*launcher, "-m", "vitpt", *args], cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True
    )
    wait_for_step(process, 10)
    children = subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False
    ).stdout.split()
    assert len(children) == 2
    subprocess.run(["kill", "-TERM", children[1]], check=True)
    process.communicate(timeout=90)
    assert status(tmp_path / "run")["state"] == "preempted"
    assert status(tmp_path / "run")["exit_code"] == 75


def test_accelerate_launch_on_a_cpu_trains(tiny_shards, tmp_path):
    import sys

    recipe = tiny_recipe(tmp_path, tiny_shards)
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--cpu"]
    done = subprocess.run(
        [*launcher, "-m", "vitpt", "pretrain", str(recipe), "--out", "run"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert status(tmp_path / "run")["state"] == "finished"
    run(recipe, tmp_path / "direct")
    assert np.array_equal(digests(tmp_path / "direct"), digests(tmp_path / "run"))
