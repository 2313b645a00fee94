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
