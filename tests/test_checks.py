"""When the criterion is evaluated with frequency="auto": the steps, and who follows them."""

import copy
from fractions import Fraction
from functools import partial
from itertools import pairwise

import pytest
import torch
from beside_oracles import compare
from hypothesis import example, given, settings
from hypothesis import strategies as st
from keyword_table import COMMON, METHODS, choices
from training import assert_same, checked, feed, parameters, problem, run, through_a_file

from eshampoo import EShampoo, schedules
from eshampoo.checks import is_new, steps_so_far
from eshampoo.options import Options

AUTO = {"frequency": "auto", "merge_dims": False, "record": True}


def when_new(beta, novelty):
    return partial(is_new, beta, novelty)


def steps(checks, last, first=1):
    return [t for t in range(first, last + 1) if checks(t)]


def by_the_rule(beta, novelty, last):
    """The steps t with ρ(s, t) ≥ ν, s the last of them before t, in fractions."""
    b, v = Fraction(repr(float(beta))), Fraction(repr(float(novelty)))
    found, powers = [1], [Fraction(1), b]
    for t in range(2, last + 1):
        powers.append(powers[-1] * b)
        s = found[-1]
        old = Fraction(s, t) if b == 1 else powers[t - s] * (1 - powers[s]) / (1 - powers[t])
        if 1 - old >= v:
            found.append(t)
    return found


# The steps ----------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(
    beta=st.floats(0, 1) | st.sampled_from([0.0, 0.9, 0.95, 0.99, 0.999, 0.9999, 1.0]),
    # Next to 1 the decimal number that a float is printed as has another distance to 1.
    novelty=st.floats(0, 0.999, exclude_min=True) | st.sampled_from([0.01, 0.05, 0.1, 0.5, 1.0]),
)
# Equalities that floating point gets wrong: β = 1 − ν, β² = 1 − ν, and one of both terms.
@example(beta=0.9, novelty=0.1)
@example(beta=0.99, novelty=0.01)
@example(beta=0.9, novelty=0.19)
@example(beta=0.5, novelty=0.8)
@example(beta=1.0, novelty=0.1)
@example(beta=0.9999999999999999, novelty=0.25)
@example(beta=1.0, novelty=1e-300)
@example(beta=0.0, novelty=1.0)
@example(beta=5e-324, novelty=1.0)
def test_the_steps_are_those_of_the_rule_in_exact_arithmetic(beta, novelty):
    assert steps(when_new(beta, novelty), 80) == by_the_rule(beta, novelty, 80)


@pytest.mark.parametrize("beta", [0.9, 0.95, 0.99, 0.999, 1.0])
@pytest.mark.parametrize("novelty", [0.03, 0.1, 0.3])
def test_a_long_run_follows_the_rule_too(beta, novelty):
    assert steps(when_new(beta, novelty), 700) == by_the_rule(beta, novelty, 700)


def test_what_the_steps_are():
    every = list(range(1, 50))
    assert steps(when_new(0.0, 0.1), 49) == steps(when_new(0.9, 0.1), 49) == every
    assert steps(when_new(0.999, 1.0), 49) == steps(when_new(1.0, 1.0), 49) == [1]
    assert steps(when_new(1.0, 0.5), 100) == [1, 2, 4, 8, 16, 32, 64]
    assert steps(Options(frequency=7).checks_at, 30) == [7, 14, 21, 28]
    assert when_new(0.999, 0.1)(0)  # the first gradient of SOAP


@pytest.mark.parametrize(
    ("beta", "novelty", "gap"), [(0.999, 0.1, 106), (0.95, 0.1, 3), (0.99, 0.5, 69)]
)
def test_distances_never_shrink_and_end_at_the_memory_of_the_average(beta, novelty, gap):
    found = steps(when_new(beta, novelty), 12_000)
    distances = [b - a for a, b in pairwise(found)]
    assert distances == sorted(distances)
    assert distances[0] == 1
    assert distances[-1] == gap


@pytest.mark.parametrize("beta", [0.5, 0.95, 0.999, 1 - 1e-8, 1 - 2**-53, 1.0])
def test_a_question_does_not_depend_on_those_before(beta):
    checks = when_new(beta, 0.1)
    steps_so_far.cache_clear()
    late = steps(checks, 10**6 + 1000, first=10**6)
    early = steps(checks, 300)
    assert steps(checks, 10**6 + 1000, first=10**6) == late
    assert len(steps_so_far(beta, 0.1)) < 500  # a million steps are not a million numbers
    checks(10**12)
    steps_so_far.cache_clear()
    assert steps(checks, 300) == early


# Who follows them ---------------------------------------------------------------------------------


@pytest.mark.parametrize("beta2", [0.0, 0.9, 0.95, 1.0])
@pytest.mark.parametrize("method", ["EShampoo", "Shampoo", "SOAP"])
def test_the_history_shows_the_steps(method, beta2):
    """Of the first block, whose checks come when all others would have theirs."""
    tensors, grads = problem([(4, 4)], 30)
    params = parameters(tensors)
    options = {"betas": (0.9, beta2), "frequency": "auto", "novelty": 0.3, "record": True}
    optimizer = METHODS[method](params, tau=0.2, merge_dims=False, **options)
    run(optimizer, params, grads)
    first = [0] if method == "SOAP" else []
    expected = first + by_the_rule(beta2, 0.3, 29 if method == "SOAP" else 30)
    for report in optimizer.basis_report():
        assert [t for t, *_ in report.history] == expected
        assert report.checks == len(expected)


@pytest.mark.parametrize("solver", choices("solver"))
@pytest.mark.parametrize("method", ["EShampoo", "Shampoo", "KLShampoo", "SOAP"])
def test_every_solver_follows_the_oracle(method, solver):
    late = schedules.piecewise((4,), (1.0, 0.1))  # random gradients have full rank by then
    options = {"frequency": "auto", "novelty": 0.2, "solver": solver, "merge_dims": False}
    tau = 0.1 if method == "SOAP" else late
    pair = compare(method, [(5, 5), (9, 9)], 20, 1e-9, tau=tau, **options, betas=(0.9, 0.9))
    assert pair.optimizer.basis_computations > 8


def test_blocks_without_a_gradient_count_their_own_steps():
    tensors, grads = problem([(4, 4), (4, 4), (3, 3)], 24)
    params = parameters(tensors)
    optimizer = EShampoo(params, betas=(0.9, 0.999), tau=0.1, **AUTO, novelty=0.2)
    missing = {(t, 1) for t in (1, 2, 7, 8, 9, 10)}
    for t, step in enumerate(grads, start=1):
        run(optimizer, params, [[None if (t, i) in missing else G for i, G in enumerate(step)]])
    seen = [[t for t, *_ in r.history] for r in optimizer.basis_report()[::2]]
    assert seen == [by_the_rule(0.999, 0.2, last) for last in (24, 18, 24)]


@pytest.mark.filterwarnings("ignore:.*had NaN or Inf")
@pytest.mark.parametrize("method", ["EShampoo", "Shampoo"])
def test_a_skipped_gradient_is_a_missing_gradient(method):
    options = {**AUTO, "betas": (0.9, 0.9), "budget": 0.0}
    tensors, grads = problem([(4, 4), (4, 4), (3, 3)], 30)
    skipping, missing = parameters(tensors), parameters(tensors)
    ours, theirs = METHODS[method](skipping, **options), METHODS[method](missing, **options)
    bad = {(1, 0), (2, 1), (3, 1), (4, 2), (8, 0), (9, 0), (10, 0), (11, 1), (12, 1), (13, 1)}
    for t, step in enumerate(grads, start=1):
        hit = [(t, i) in bad for i in range(3)]
        feed(skipping, [G / 0 if h else G for G, h in zip(step, hit, strict=True)])
        feed(missing, [None if h else G for G, h in zip(step, hit, strict=True)])
        ours.step()
        theirs.step()
        for a, b in zip(skipping, missing, strict=True):
            assert torch.equal(a.detach(), b.detach()), t
    found = [r._replace(skipped=0) for r in ours.basis_report()]
    assert found == theirs.basis_report()
    assert any(r.waited for r in found)


def test_beta_novelty_and_frequency_are_live():
    tensors, grads = problem([(4, 4)], 60)
    params = parameters(tensors)
    optimizer = EShampoo(params, tau=1.0, **AUTO, betas=(0.9, 0.999))
    changes = {
        1: {},
        13: {"novelty": 0.3},
        25: {"betas": (0.9, 0.95)},
        37: {"frequency": 5},
        49: {"frequency": "auto", "novelty": 1.0},
    }
    sequences = [(0.999, 0.1), (0.999, 0.3), (0.95, 0.3), None, (0.95, 1.0)]
    expected = []
    for (start, change), pair in zip(changes.items(), sequences, strict=True):
        optimizer.param_groups[0].update(change)
        run(optimizer, params, grads[start - 1 : start + 11])
        found = by_the_rule(*pair, 60) if pair else range(0, 60, 5)
        expected += [t for t in found if start <= t < start + 12]
    assert [t for t, *_ in optimizer.basis_report()[0].history] == expected


@pytest.mark.slow
@pytest.mark.parametrize("method", ["EShampoo", "Shampoo"])
def test_a_run_resumes_with_the_same_checks(method):
    blocks = {"merge_dims": False, "max_dim": 5}
    options = {**COMMON, "frequency": "auto", "novelty": 0.2, "tau": 0.0, "budget": 0.0, **blocks}
    tensors, grads = problem([(4, 4), (7, 5), (6,)], 30)
    params = parameters(tensors, torch.float32)
    optimizer = METHODS[method](params, **options)
    saves = []
    for step in grads:
        saves.append((copy.deepcopy(params), through_a_file(optimizer.state_dict())))
        run(optimizer, params, [step])
    assert any(r.waited for r in optimizer.basis_report())
    for at, (weights, saved) in [*enumerate(saves)][::4]:
        resumed = METHODS[method](weights, **blocks)  # all other keywords are in the file
        resumed.load_state_dict(saved)
        run(resumed, weights, grads[at:])
        for p, q in zip(params, weights, strict=True):
            assert torch.equal(p.detach(), q.detach()), at
            assert_same(optimizer.state[p], resumed.state[q], f"from {at}")
        assert resumed.basis_report() == optimizer.basis_report()


def test_schedules_of_tau_see_the_steps_of_the_checks():
    seen = []

    def tau(t):
        seen.append(t)
        return 0.0 if t < 10 else 1.0

    optimizer = checked("EShampoo", tau, 40, "auto", record=True)
    assert sorted(set(seen)) == by_the_rule(0.9, 0.1, 40)
    for report in optimizer.basis_report():
        assert [t for t, _, computed in report.history if computed] == list(range(1, 10))


def test_with_the_first_step_comes_the_first_basis():
    tensors, grads = problem([(4, 4)], 1)
    params = parameters(tensors)
    optimizer = EShampoo(params, tau=0.1, frequency="auto", merge_dims=False)
    run(optimizer, params, grads)
    assert [r.computations for r in optimizer.basis_report()] == [1, 1]
