"""Checks that are spread over the steps: by cost, the same everywhere, and none is lost."""

import copy
from collections import Counter
from itertools import pairwise

import pytest
import torch
from cases import METHODS, parameters, problem, run, through_a_file

from eshampoo import EShampoo
from eshampoo.checks import AT_ONCE, Every, when_new
from eshampoo.math.solvers import eigh_cost

SHAPES = [(6, 5)] * 6 + [(9, 4)] * 3 + [(3,)]


@pytest.mark.parametrize("checks", [when_new(0.999, 0.1), when_new(0.95, 0.1), Every(7), Every(50)])
@pytest.mark.parametrize("phase", [0.0, 0.3, 0.999])
def test_between_two_checks_of_all_there_is_one_of_a_block(checks, phase):
    common = [t for t in range(1, 9000) if checks(t)]
    own = [t for t in range(1, 9000) if checks(t, phase)]
    for last, following in pairwise(common):
        found = [t for t in own if last < t <= following]
        early = int(phase * (following - last)) if last >= AT_ONCE else 0
        assert found == [following - early]


def at_each_step(method, stagger, steps=120, form="full"):
    """The optimizer after some steps, its parameters, and the steps of the checks by factor."""
    tensors, grads = problem(SHAPES, steps)
    params = parameters(tensors)
    options = {"frequency": "auto", "record": True, "stagger": stagger, "state": form}
    optimizer = METHODS[method](params, **options)
    run(optimizer, params, grads)
    seen = [[t for t, _, _ in report.history] for report in optimizer.basis_report()]
    return optimizer, params, seen


@pytest.mark.slow
@pytest.mark.parametrize("method", ["EShampoo", "Shampoo", "SOAP", "KLShampoo"])
def test_the_checks_are_spread_by_their_cost(method):
    _, _, together = at_each_step(method, False)
    optimizer, _, spread = at_each_step(method, True)
    assert len({tuple(steps) for steps in together}) == 1
    common = together[0]
    assert all(
        [t for t in steps if t <= AT_ONCE] == [t for t in common if t <= AT_ONCE]
        for steps in spread
    )
    cost = Counter()
    for report, steps in zip(optimizer.basis_report(), spread, strict=True):
        for t in steps:
            cost[t] += eigh_cost(report.size)
    total = sum(eigh_cost(report.size) for report in optimizer.basis_report())
    largest = max(eigh_cost(a) + eigh_cost(b) for a, b in SHAPES[:-1])
    for last, following in pairwise(t for t in common if t > AT_ONCE):
        share = total / (following - last)
        assert all(cost[t] <= share + largest for t in range(last + 1, following + 1))


def bases_by_step(stagger):
    """How many bases each step after the first twenty computes, of 48 that all want one."""
    tensors, grads = problem([(6, 5)] * 24, 60)
    params = parameters(tensors)
    options = {"tau": 0.0, "record": True, "stagger": stagger}
    optimizer = EShampoo(params, **options)
    run(optimizer, params, grads)
    histories = [report.history for report in optimizer.basis_report()]
    return Counter(t for h in histories for t, _, computed in h if computed and t > AT_ONCE)


def test_bases_are_spread_over_more_than_the_gap_of_two_checks():
    """All factors have credit at the same step; with gaps of 3, a third of them would use it."""
    together, spread = bases_by_step(False), bases_by_step(True)
    assert max(together.values()) == 48
    assert max(spread.values()) <= 48 / 4
    assert abs(sum(together.values()) - sum(spread.values())) <= 48


@pytest.mark.parametrize("method", ["EShampoo", "Shampoo"])
def test_a_basis_does_not_depend_on_who_else_is_checked(method):
    """Each block does what it does alone, where its phase is 0: as if others had stopped."""
    tensors, grads = problem([(6, 5)], 60)
    options = {"frequency": 5, "tau": 0.0, "stagger": True}
    alone, among = parameters(tensors), parameters(tensors * 4)
    run(METHODS[method](alone, **options), alone, grads)
    run(METHODS[method](among, **options), among, [step * 4 for step in grads])
    torch.testing.assert_close(among[0], alone[0], rtol=0, atol=1e-12)
    assert not torch.equal(among[0], among[3])  # which was checked at other steps


def test_phases_survive_a_file():
    tensors, grads = problem(SHAPES, 120)
    params = parameters(tensors)
    optimizer = EShampoo(params, stagger=True)
    run(optimizer, params, grads[:50])
    weights = copy.deepcopy(params)
    resumed = EShampoo(weights, stagger=True)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    run(optimizer, params, grads[50:])
    run(resumed, weights, grads[50:])
    assert all(torch.equal(p, q) for p, q in zip(params, weights, strict=True))
    assert optimizer.basis_report() == resumed.basis_report()
