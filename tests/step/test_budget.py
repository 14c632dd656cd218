"""What bases may cost: credit, free ones, and those that wait."""

import copy
from math import log, prod

import pytest
import torch
from beside_oracles import Pair
from keyword_table import METHODS, choices
from training import parameters, problem, run, trained

from eshampoo import EShampoo
from eshampoo.math.solvers import EIGH_PRODUCTS, eigh_cost, least_cost, qr_cost

SHAPES = [(6, 6), (12, 5), (3, 4, 5)]
PLAIN = {"lr": 1e-2, "betas": (0.9, 0.9), "record": True}


def spent(optimizer):
    """What was spent on every factor, in the order of the report if no block is ragged."""
    found = [
        value.flatten().tolist()
        for state in optimizer.state.values()
        for name, value in state.items()
        if name.startswith("basis_spent")
    ]
    return [cost for costs in found for cost in costs]


def allowance(t, novelty=0.1):
    """How many bases a factor may always have: one at every step while νt < 1, (1 + ln νt)/ν."""
    return (1 + log(max(1.0, novelty * t))) / novelty


def first_steps(may_have, last):
    """The steps up to `last` at which a basis is computed, if n of them are allowed at step t."""
    steps = []
    for t in range(1, last + 1):
        if may_have(len(steps) + 1, t):
            steps.append(t)
    return steps


def earned(report, budget, t):
    return budget * 3 * prod(report.shape) * report.size * t


def dearest(report, o):
    """The most that a computation can cost."""
    d = report.size
    qr, eigh = qr_cost(d), eigh_cost(d)
    cost = {"eigh": eigh, "power": qr, "qr": qr * o["qr_iterations"], "partial": eigh + 2 * d**3}
    return cost[o["solver"]]


@pytest.mark.parametrize("solver", choices("solver"))
@pytest.mark.parametrize("method", ["EShampoo", "Shampoo", "KLShampoo", "SOAP"])
def test_no_more_is_spent_than_was_earned(method, solver):
    tensors, grads = problem(SHAPES, 40, condition=3.0)
    params = parameters(tensors)
    optimizer = METHODS[method](
        params, frequency="auto", tau=0.01, solver=solver, budget=0.5, **PLAIN
    )
    o = optimizer.param_groups[0]
    waited = 0
    for t, step in enumerate(grads, start=0 if method == "SOAP" else 1):
        run(optimizer, params, [step])
        for report, cost in zip(optimizer.basis_report(), spent(optimizer), strict=True):
            # What a computation costs beyond its least is known afterwards.
            beyond = dearest(report, o) - least_cost(solver, report.size, "cpu")
            paid = earned(report, 0.5, t) + beyond
            assert cost <= paid or report.computations <= allowance(t)
            assert (cost > 0) == (report.computations > 0)
    for report in optimizer.basis_report():
        assert report.checks == len(report.history)
        assert report.computations == sum(computed for *_, computed in report.history)
        wanted = [value > 0.01 or t == 0 for t, value, _ in report.history]
        assert report.waited == sum(wanted) - report.computations
        waited += report.waited
    assert waited > 0


@pytest.mark.parametrize("novelty", [0.1, 0.25])
def test_a_computation_waits_until_there_is_credit_for_it(novelty):
    tensors, grads = problem([(6, 6)], 60)
    params = parameters(tensors)
    optimizer = EShampoo(params, frequency=1, tau=0.0, novelty=novelty, **PLAIN)
    run(optimizer, params, grads)
    # A step earns 0.25 · 3 d³ and a basis costs (5 + 1300/6) d³, so all of these are free.
    free = first_steps(lambda n, t: n <= allowance(t, novelty), 60)
    for report in optimizer.basis_report():
        assert [t for t, _, computed in report.history if computed] == free
        assert (report.computations, report.waited) == (len(free), 60 - len(free))
    assert spent(optimizer) == [len(free) * eigh_cost(6)] * 2


def test_a_large_budget_pays_for_more_than_the_free_ones():
    tensors, grads = problem([(6, 6)], 60)
    params = parameters(tensors)
    optimizer = EShampoo(params, frequency=1, tau=0.0, budget=50.0, **PLAIN)
    run(optimizer, params, grads)
    # 150 d³ a step, (5 + 1300/6) d³ a basis: 0.677 of them at every step.
    assert [r.computations for r in optimizer.basis_report()] == [40] * 2


@pytest.mark.parametrize("solver", choices("solver"))
def test_without_any_budget_only_the_free_ones_are_computed(solver):
    tensors, grads = problem([(6, 6)], 20)
    params = parameters(tensors)
    optimizer = EShampoo(params, frequency=1, tau=0.0, budget=0.0, solver=solver, **PLAIN)
    run(optimizer, params, grads)
    assert [(r.computations, r.waited) for r in optimizer.basis_report()] == [(16, 4)] * 2


def test_what_was_spent_without_a_budget_counts_when_there_is_one():
    tensors, grads = problem([(6, 6)], 100)
    params = parameters(tensors)
    optimizer = EShampoo(params, frequency=1, tau=0.0, budget=None, **PLAIN)
    run(optimizer, params, grads[:40])
    assert spent(optimizer) == [40 * eigh_cost(6)] * 2
    optimizer.param_groups[0]["budget"] = 50.0
    run(optimizer, params, grads[40:80])
    (left, _) = optimizer.basis_report()
    later = [t for t, _, computed in left.history if computed and t > 40]
    paid = first_steps(lambda n, t: n * eigh_cost(6) <= 50.0 * t * 3 * 6**3, 80)
    assert later == paid[40:]
    optimizer.param_groups[0]["budget"] = None
    run(optimizer, params, grads[80:])
    assert all(computed for t, _, computed in optimizer.basis_report()[0].history if t > 80)


@pytest.mark.parametrize("solver", choices("solver"))
def test_what_is_charged_is_what_was_done(solver):
    tensors, grads = problem([(20, 12)], 12, condition=3.0)
    options = {k: v for k, v in PLAIN.items() if k != "record"}
    options |= {"frequency": 2, "tau": 0.1, "solver": solver, "qr_iterations": 4}
    pair = Pair("EShampoo", tensors, budget=20.0, **options)
    for step in grads:
        pair.step(step)
    ((block,),) = pair.oracle.blocks
    assert spent(pair.optimizer) == block.spent
    assert min(block.spent) > 0
    assert [r.waited for r in pair.optimizer.basis_report()] == block.waited


def test_factors_of_one_block_have_credit_of_their_own():
    tensors, grads = problem([(24, 4)], 40)
    params = parameters(tensors)
    optimizer = EShampoo(params, frequency=1, tau=0.0, budget=15.0, **PLAIN)
    run(optimizer, params, grads)
    # Of 15 · 3 · 24 · 4 · d t a factor pays 5 d³ + 1300 d²: the large one has its free ones alone.
    large, small = optimizer.basis_report()
    assert (large.computations, small.computations) == (23, 32)


def test_neighbours_do_not_change_what_waits():
    tensors, grads = problem([(6, 6)] * 3, 30)
    options = {**PLAIN, "frequency": "auto", "tau": 0.05, "budget": 0.25}
    together = parameters(tensors)
    optimizer = EShampoo(together, **options)
    run(optimizer, together, grads)
    for i, W in enumerate(tensors):
        alone = parameters([W])
        single = EShampoo(alone, **options)
        run(single, alone, [[step[i]] for step in grads])
        rows = optimizer.basis_report()[2 * i : 2 * i + 2]
        assert [(r.computations, r.waited) for r in rows] == [
            (r.computations, r.waited) for r in single.basis_report()
        ]


def test_the_cost_of_eigh_is_that_of_the_device(monkeypatch):
    assert eigh_cost(100, "cuda") == 170 * 100**3
    monkeypatch.setitem(EIGH_PRODUCTS, "cuda", 20.0)
    assert least_cost("eigh", 100, "cuda") == 20 * 100**3
    assert eigh_cost(100) == least_cost("eigh", 100, "cpu") == 18 * 100**3


@pytest.mark.parametrize("name", ["basis_checks", "basis_work", "criterion"])
def test_other_counters_must_be_there(name):
    optimizer, *_ = trained("EShampoo", [(4, 4)], 4)
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][0][name]
    with pytest.raises(ValueError, match=name):
        optimizer.load_state_dict(saved)


def test_a_counter_of_the_wrong_shape_is_refused():
    optimizer, *_ = trained("EShampoo", [(4, 4)], 4, merge_dims=False)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["basis_spent"] = torch.zeros(1, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match="basis_spent"):
        optimizer.load_state_dict(saved)
