"""Reports of bases: every factor, what was checked and computed, and the history."""

import itertools

import pytest
from beside_oracles import Pair
from torch import nn
from training import assert_same, checked, parameters, problem, run

from eshampoo import EShampoo, Shampoo


def test_the_report_has_every_factor_in_the_order_of_the_parameters():
    tensors, grads = problem([(7, 3), (4,), (3, 3, 3), (4, 3), ()], 9)
    names = ["wide", "bias", "cube", "last", "scale"]
    params = parameters(tensors)
    optimizer = EShampoo(
        [
            {"params": list(zip(names[:2], params[:2], strict=True)), "frequency": 2},
            {"params": list(zip(names[2:], params[2:], strict=True)), "frequency": 3, "tau": 1.0},
        ],
        max_dim=4, merge_dims=False, tau=0.0,
    )  # fmt: skip
    run(optimizer, params, grads)
    report = optimizer.basis_report()
    expected = [
        ("wide", (7, 3), b, m, s) for b, rows in enumerate((4, 3)) for m, s in ((0, rows), (1, 3))
    ]
    expected += [("cube", (3, 3, 3), 0, m, 3) for m in range(3)]
    expected += [("last", (4, 3), 0, 0, 4), ("last", (4, 3), 0, 1, 3)]
    assert [(r.name, r.shape, r.block, r.mode, r.size) for r in report] == expected
    assert [(r.checks, r.computations) for r in report] == [(4, 4)] * 4 + [(3, 0)] * 5
    assert all(0 <= r.criterion <= 1 and r.failures == r.skipped == 0 for r in report)
    assert all(r.history == () for r in report)
    assert optimizer.basis_computations == sum(r.computations for r in report) == 16


def test_the_report_says_what_the_state_says():
    tensors, grads = problem([(4, 4), (4, 4)], 7)
    params = parameters(tensors)
    optimizer = Shampoo(params, frequency=2, tau=0.3, merge_dims=False)
    run(optimizer, params, grads)
    report = iter(optimizer.basis_report())
    for p, mode in itertools.product(params, range(2)):
        state, line = optimizer.state[p], next(report)
        assert line.checks == state["basis_checks"][0, mode]
        assert line.computations == state["basis_computations"][0, mode]
        assert line.criterion == state["criterion"][0, mode]
    assert_same([], list(report))


def test_names_appear_in_reports_and_groups():
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    optimizer = EShampoo(net.named_parameters())
    assert {r.name for r in optimizer.basis_report()} == {"0.weight", "2.weight"}
    unnamed = EShampoo(net.parameters())
    assert {r.name for r in unnamed.basis_report()} == {None}
    assert optimizer.state_dict()["param_groups"][0]["param_names"][0] == "0.weight"


def test_the_recorded_history_is_the_oracles():
    tensors, grads = problem([(4, 4), (3, 3, 3)], 20, condition=3.0)
    options = {"merge_dims": False, "lr": 1e-2, "betas": (0.9, 0.9)}
    pair = Pair("EShampoo", tensors, tau=0.2, frequency=2, **options)
    pair.optimizer.param_groups[0]["record"] = True
    for step in grads:
        pair.step(step)
    expected = [h for blocks in pair.oracle.blocks for b in blocks for h in b.history]
    for report, history in zip(pair.optimizer.basis_report(), expected, strict=True):
        assert len(report.history) == report.checks == 10
        assert report.criterion == report.history[-1][1]
        assert report.computations == sum(computed for *_, computed in report.history)
        for (t, value, computed), (t_, value_, computed_) in zip(
            report.history, history, strict=True
        ):
            assert (t, computed) == (t_, computed_)
            assert value == pytest.approx(value_, abs=1e-9)


def test_the_history_is_bounded(monkeypatch):
    monkeypatch.setattr("eshampoo.state.bucket.HISTORY", 5)
    optimizer = checked("EShampoo", 1.0, 12, 1, record=True)
    for report in optimizer.basis_report():
        assert [step for step, *_ in report.history] == [8, 9, 10, 11, 12]
        assert report.checks == 12
