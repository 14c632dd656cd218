"""Schedules of τ."""

import pickle

import pytest
import torch
from training import checked, feed, parameters

from eshampoo import EShampoo, schedules

SCHEDULES = {
    "constant": (schedules.constant(0.0), [0.0] * 24),
    "piecewise": (schedules.piecewise((7, 13), (0.0, 1.0, 0.0)), [0.0] * 6 + [1] * 6 + [0.0] * 12),
    "linear": (schedules.linear(0.0, 2.0, 20), [t / 10 for t in range(1, 21)] + [2.0] * 4),
    "any callable": (lambda t: 0.0 if t % 2 else 1.0, [0.0, 1.0] * 12),
}


@pytest.mark.parametrize(("schedule", "values"), SCHEDULES.values(), ids=SCHEDULES)
def test_a_schedule_gives_tau_of_each_step(schedule, values):
    assert [schedule(t) for t in range(1, 25)] == pytest.approx(values)
    optimizer = checked("EShampoo", schedule, 24, 1, record=True)
    for report in optimizer.basis_report():
        assert [step for step, *_ in report.history] == list(range(1, 25))
        for step, value, computed in report.history:
            tau = values[step - 1]
            assert computed == (tau == 0 or value > tau), step


def test_schedules_are_picklable_data():
    for name in ("constant", "piecewise", "linear"):
        schedule = SCHEDULES[name][0]
        assert pickle.loads(pickle.dumps(schedule)) == schedule


def test_a_schedule_that_returns_a_negative_tau_is_refused():
    (p,) = parameters([torch.ones(3, 3)])
    optimizer = EShampoo([p], tau=schedules.constant(-0.5), frequency=1)
    feed([p], [torch.ones(3, 3)])
    with pytest.raises(ValueError, match=r"-0\.5"):
        optimizer.step()


def test_schedules_refuse_what_makes_no_sense():
    with pytest.raises(ValueError, match="2 boundaries and 2 values"):
        schedules.piecewise((1, 2), (0.1, 0.2))
    with pytest.raises(ValueError, match="decrease"):
        schedules.piecewise((2, 1), (0.1, 0.2, 0.3))
    with pytest.raises(ValueError, match="steps=0"):
        schedules.linear(0.1, 0.2, 0)
