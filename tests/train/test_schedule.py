import pytest
from oracles import ORACLES

from vitpt.recipe.schema import Schedule
from vitpt.train.schedule import learning_rate, total_steps

CASES = [case for case in ORACLES["schedules"]["cases"] if case["kind"] in ("cosine", "linear")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['kind']}-{case['args']['T']}-{case['args']['base']}")
def test_reference_values(case):
    args = case["args"]
    schedule = Schedule(kind=case["kind"], warmup_steps=args["w"], end_lr=args.get("end", 0.0))
    for done, expected in case["values"].items():
        found = learning_rate(schedule, args["base"], args["T"], int(done))
        assert found == pytest.approx(expected, rel=ORACLES["schedules"]["tol_rel"], abs=1e-18)


def test_first_update_of_a_warmup_has_rate_zero():
    assert learning_rate(Schedule(warmup_steps=10), 1e-3, 100, 0) == 0.0


@pytest.mark.parametrize("case", ORACLES["steps"]["cases"], ids=lambda case: str(case["steps"]))
def test_steps_of_epochs(case):
    assert total_steps(case["epochs"], case["n"], case["batch"]) == case["steps"]
