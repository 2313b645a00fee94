import pytest

from vitpt.errors import Exit, VitptError
from vitpt.evaluate.processes import make_accelerator


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [("tensorbord", Exit.USAGE, "did you mean tensorboard"), ("mlflow", Exit.ENVIRONMENT, "pip install mlflow")],
)
def test_a_tracker_that_cannot_be_used_is_named(name, code, words):
    with pytest.raises(VitptError, match=name) as caught:
        make_accelerator(trackers=(name,))
    assert caught.value.exit_code == code
    assert words in caught.value.hint


def test_processes_that_did_not_join_are_noticed(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(VitptError, match="started 2 processes, but 1 joined"):
        make_accelerator()
