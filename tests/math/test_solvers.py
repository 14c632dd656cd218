"""When bases are computed, what the solvers guarantee, and what happens to the state then."""

import pickle

import oracles
import pytest
import torch
from cases import (
    METHODS,
    CountOps,
    Pair,
    assert_close,
    computations,
    feed,
    parameters,
    problem,
    run,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from torch.utils.flop_counter import FlopCounterMode

from eshampoo import EShampoo, Shampoo, linalg, schedules

ROTATED = ["EShampoo", "KLShampoo", "SOAP"]
PLAIN = {"merge_dims": False, "lr": 1e-2, "betas": (0.9, 0.9)}


def factors(count, d, seed=0, near=None):
    """Random symmetric positive definite matrices; with `near`, almost diagonal ones."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(count, d, 2 * d, generator=generator, dtype=torch.float64)
    A = X @ X.mT / (2 * d)
    if near is not None:
        D = torch.diag_embed(torch.rand(count, d, generator=generator, dtype=torch.float64) + 0.5)
        A = D + near * (A - torch.diag_embed(A.diagonal(dim1=1, dim2=2)))
    return A


def orthogonal(count, d, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(count, d, d, generator=generator, dtype=torch.float64)).Q


def counts(method, tau, steps=24, frequency=3, **options):
    tensors, grads = problem([(4, 4), (3, 3, 3)], steps, condition=3.0)
    params = parameters(tensors)
    optimizer = METHODS[method](params, frequency=frequency, tau=tau, **{**PLAIN, **options})
    run(optimizer, params, grads)
    return optimizer


# How often ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["eigh", "qr", "power", "partial"])
@pytest.mark.parametrize("method", ["EShampoo", "Shampoo", "KLShampoo"])
def test_tau_zero_always_computes_and_tau_one_never(method, solver):
    for tau, expected in [(0.0, 8), (1.0, 0), (7.5, 0)]:
        optimizer = counts(method, tau, solver=solver)
        assert computations(optimizer) == [expected] * 5
        assert [r.checks for r in optimizer.basis_report()] == [8] * 5


def test_tau_one_or_more_is_adamw_for_ever():
    tensors, grads = problem([(4, 4)], 30)
    ours, theirs = parameters(tensors), parameters(tensors)
    run(EShampoo(ours, frequency=1, tau=1.0), ours, grads)
    run(torch.optim.AdamW(theirs), theirs, grads)
    assert_close(ours[0].detach(), theirs[0].detach(), 1e-13)


@pytest.mark.parametrize("method", ["EShampoo", "Shampoo", "KLShampoo", "SOAP"])
def test_counts_fall_as_tau_grows(method):
    taus = (0.0, 0.02, 0.1, 0.3, 0.6, 1.0)
    totals = [counts(method, tau, 40, 1).basis_computations for tau in taus]
    assert totals == sorted(totals, reverse=True)
    assert len(set(totals)) >= 4


def test_a_basis_is_computed_exactly_when_the_criterion_exceeds_tau():
    optimizer = counts("EShampoo", 0.25, 40, 2, record=True)
    history = [check for r in optimizer.basis_report() for check in r.history]
    assert {computed for _, _, computed in history} == {True, False}
    for step, value, computed in history:
        assert step % 2 == 0
        assert computed == (value > 0.25)


def test_the_recorded_history_is_the_oracles():
    tensors, grads = problem([(4, 4), (3, 3, 3)], 20, condition=3.0)
    pair = Pair("EShampoo", tensors, tau=0.2, frequency=2, **PLAIN)
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
    monkeypatch.setattr("eshampoo.bucket.HISTORY", 5)
    optimizer = counts("EShampoo", 1.0, 12, 1, record=True)
    for report in optimizer.basis_report():
        assert [step for step, *_ in report.history] == [8, 9, 10, 11, 12]
        assert report.checks == 12


SCHEDULES = {
    "constant": (schedules.constant(0.0), [0.0] * 24),
    "piecewise": (schedules.piecewise((7, 13), (0.0, 1.0, 0.0)), [0.0] * 6 + [1] * 6 + [0.0] * 12),
    "linear": (schedules.linear(0.0, 2.0, 20), [t / 10 for t in range(1, 21)] + [2.0] * 4),
    "any callable": (lambda t: 0.0 if t % 2 else 1.0, [0.0, 1.0] * 12),
}


@pytest.mark.parametrize(("schedule", "values"), SCHEDULES.values(), ids=SCHEDULES)
def test_a_schedule_gives_tau_of_each_step(schedule, values):
    assert [schedule(t) for t in range(1, 25)] == pytest.approx(values)
    optimizer = counts("EShampoo", schedule, 24, 1, record=True)
    for report in optimizer.basis_report():
        assert [step for step, *_ in report.history] == list(range(1, 25))
        for step, value, computed in report.history:
            tau = values[step - 1]
            assert computed == (tau == 0 or value > tau), step


def test_schedules_are_picklable_data():
    for name in ("constant", "piecewise", "linear"):
        schedule = SCHEDULES[name][0]
        assert pickle.loads(pickle.dumps(schedule)) == schedule


def test_every_group_has_a_tau_of_its_own():
    tensors, grads = problem([(4, 4)] * 3, 9)
    params = parameters(tensors)
    taus = [0.0, 1.0, schedules.piecewise((5,), (0.0, 1.0))]
    groups = [{"params": [p], "tau": tau} for p, tau in zip(params, taus, strict=True)]
    optimizer = EShampoo(groups, frequency=1, merge_dims=False)
    run(optimizer, params, grads)
    assert computations(optimizer) == [9, 9, 0, 0, 4, 4]


# What a check costs -------------------------------------------------------------------------------


def step_in(mode, method, check, tau=1.0, shape=(12, 20), **options):
    """One step, plain or with a check, seen by a dispatch mode."""
    tensors, grads = problem([shape], 9)
    params = parameters(tensors)
    optimizer = METHODS[method](params, frequency=4, tau=tau, **{**PLAIN, **options})
    observing = method == "SOAP"  # its first gradient is not counted
    run(optimizer, params, grads[: (7 if check else 5) + observing])
    feed(params, grads[8])
    with mode:
        optimizer.step()
    assert optimizer.basis_report()[0].checks == (2 if check else 1) + observing
    return mode


@pytest.mark.parametrize("method", ROTATED)
def test_a_kept_basis_costs_no_matrix_product(method):
    plain = step_in(CountOps(), method, check=False)
    check = step_in(CountOps(), method, check=True)
    assert check.products() == plain.products() > 0
    flops = [
        step_in(FlopCounterMode(display=False), method, c).get_total_flops() for c in (False, True)
    ]
    assert flops[0] == flops[1]
    assert not {"_linalg_eigh", "linalg_qr"} & check.counts.keys()


@pytest.mark.parametrize("graft", [None, "adam"])
def test_a_plain_step_of_stale_shampoo_costs_two_units_of_products_and_the_others_three(graft):
    m, n = 12, 20
    unit = 2 * m * n * (m + n)

    def units(method, **options):
        counter = step_in(FlopCounterMode(display=False), method, check=False, **options)
        return counter.get_total_flops() / unit

    assert 1 < units("Shampoo", graft=graft) <= 2
    for method in ROTATED:
        assert 2 < units(method) <= 3


# What the solvers guarantee -----------------------------------------------------------------------


def rotated(V, A):
    return V.mT @ A @ V


def whole(change, d):
    """V on all coordinates."""
    if change.subset is None:
        return change.V
    V = torch.eye(d, dtype=change.V.dtype).repeat(len(change.V), 1, 1)
    for k, S in enumerate(change.subset.tolist()):
        V[k][torch.tensor(S).unsqueeze(1), torch.tensor(S)] = change.V[k]
    return V


@pytest.mark.parametrize("slots", ["rank", "match"])
@pytest.mark.parametrize("solver", ["eigh", "qr", "power", "partial"])
def test_every_solver_returns_an_orthogonal_change_and_the_factor_seen_after_it(solver, slots):
    A = factors(5, 21)
    solution = linalg.solve(A, solver, slots, [0.1] * 5, 0.5, 20)
    assert solution.failed == []
    seen = []
    for change in solution.changes:
        V, before = whole(change, 21), A[change.which]
        seen += change.which
        assert_close(V.mT @ V, torch.eye(21, dtype=V.dtype).expand_as(V), 1e-12)
        assert_close(change.factor, rotated(V, before), 1e-12)
        assert_close(change.factor, change.factor.mT, 1e-13)
    assert sorted(seen) == list(range(5))


@pytest.mark.parametrize("tau", [0.3, 0.1, 0.01])
@pytest.mark.parametrize("slots", ["rank", "match"])
def test_the_criterion_is_at_most_tau_after_enough_qr_iterations(tau, slots):
    A = factors(6, 9, near=0.4)
    change = linalg.qr(A, slots, [tau] * 6, 2000)
    assert (linalg.criterion(A) > tau).any()
    assert (linalg.criterion(change.factor) <= tau).all()


def test_qr_stops_each_factor_as_soon_as_its_own_tau_holds():
    A = factors(4, 9, near=0.4)
    taus = [0.5, 0.2, 0.1, 0.05]
    change = linalg.qr(A, "rank", taus, 500)
    for k, tau in enumerate(taus):
        alone = linalg.qr(A[k : k + 1], "rank", [tau], 500)
        assert_close(alone.V[0], change.V[k], 1e-12)
        Q = oracles.qr_algorithm(A[k], torch.eye(9, dtype=A.dtype), tau, 500)
        if oracles.criterion(A[k]) > tau:
            assert_close(rotated(Q, A[k]).diagonal(), change.factor[k].diagonal(), 1e-10)


def test_qr_does_at_most_its_iterations():
    A = factors(3, 9)
    one, two = (linalg.qr(A, "rank", [1e-6] * 3, i).factor for i in (1, 2))
    Q, R = torch.linalg.qr(A)
    assert_close(one, R @ Q, 1e-12)
    Q, R = torch.linalg.qr(one)
    assert_close(two, R @ Q, 1e-12)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    d=st.integers(2, 40),
    seed=st.integers(0, 99),
    near=st.sampled_from([None, 0.3, 0.02]),
    target=st.sampled_from([0.0, 0.01, 0.1, 0.4]),
)
def test_partial_brings_the_criterion_to_its_target_and_to_the_predicted_value(
    d, seed, near, target
):
    A = factors(4, d, seed, near)
    order, predicted = linalg.prefixes(A)
    assert_close(predicted[:, 0], linalg.criterion(A), 1e-13)
    for change in linalg.partial(A, "rank", [target] * 4).changes:
        after = linalg.criterion(change.factor)
        assert (after <= target + 1e-14).all()
        size = change.V.shape[1]
        expected = predicted[change.which, size] if size < d else torch.zeros_like(after)
        assert_close(after, expected, 1e-12)
        for k, position in enumerate(change.which):
            S = change.subset[k].tolist()
            assert set(S) == set(order[position, :size].tolist())
            assert_close(after[k].item(), oracles.criterion_after_partial(A[position], S), 1e-12)


def test_the_predictions_are_those_of_all_prefixes_and_fall():
    A = factors(3, 12, near=0.3)
    order, predicted = linalg.prefixes(A)
    for k in range(3):
        for size in range(12):
            expected = oracles.criterion_after_partial(A[k], order[k, :size].tolist())
            assert_close(predicted[k, size].item(), expected, 1e-13)
    assert (predicted.diff(dim=1) <= 0).all()


def test_partial_takes_no_more_coordinates_than_its_batch_size_asks():
    A = factors(6, 64, near=0.03)
    _, predicted = linalg.prefixes(A)
    target = 0.5 * linalg.criterion(A).min().item()
    needed = (predicted > target).sum(1)
    for change in linalg.partial(A, "rank", [target] * 6).changes:
        for position in change.which:
            assert needed[position] <= change.V.shape[1] < needed[position] + 8
    assert needed.min() < 56


def test_inside_partial_eigenvalues_go_to_slots_by_rank():
    A = factors(4, 24, near=0.3)
    for change in linalg.partial(A, "rank", [0.05] * 4).changes:
        for k, position in enumerate(change.which):
            S = change.subset[k]
            before, after = A[position].diagonal()[S], change.factor[k].diagonal()[S]
            assert torch.equal(before.argsort(), after.argsort())
            outside = [i for i in range(24) if i not in S.tolist()]
            assert torch.equal(
                A[position][outside][:, outside], change.factor[k][outside][:, outside]
            )


@pytest.mark.parametrize("solver", ["eigh", "qr", "power", "partial"])
@pytest.mark.parametrize("method", ROTATED)
def test_the_stored_factor_is_the_true_one_seen_from_the_stored_basis(method, solver):
    tensors, grads = problem([(12, 12)], 13, condition=3.0)
    pair = Pair(method, tensors, tau=0.1, frequency=3, solver=solver, **PLAIN)
    for step in grads:
        pair.step(step)
    (p,), ((block,),) = pair.params, pair.oracle.blocks
    state = pair.optimizer.state[p]
    assert computations(pair.optimizer)[0] > 2
    bases = [state["basis_0"][0], state["basis_1"][0]]
    for i, Q in enumerate(bases):
        assert_close(state[f"factor_{i}"][0], Q.T @ block.L[i] @ Q, 1e-9)
    assert_close(state["exp_avg"][0], bases[0].T @ block.M @ bases[1], 1e-9)


@pytest.mark.parametrize("solver", ["eigh", "qr", "power", "partial"])
@pytest.mark.parametrize("correction", ["naive", "basis_aware"])
def test_on_a_change_of_basis_d_is_kept_permuted_or_mapped(solver, correction):
    tensors, grads = problem([(12, 9)], 9, condition=3.0)
    params = parameters(tensors)
    optimizer = EShampoo(
        params, betas=(0.9, 0.9), beta3=0.75, tau=0.05, frequency=3, solver=solver,
        correction=correction, merge_dims=False,
    )  # fmt: skip
    run(optimizer, params, grads[:8])
    state = optimizer.state[params[0]]

    def now():
        names = ("basis_0", "basis_1", "exp_avg_sq", "factor_0", "factor_1")
        return [state[name][0].clone() for name in names]

    P, S, D, left, right = now()
    run(optimizer, params, grads[8:])
    P_new, S_new, D_new, *_ = now()
    assert not torch.equal(P, P_new)
    (G,) = grads[8]
    carried = (D_new - 0.25 * (P_new.T @ G @ S_new) ** 2) / 0.75
    expected = D
    if correction == "basis_aware":
        expected = ((P.T @ P_new) ** 2).T @ D @ (S.T @ S_new) ** 2
    elif solver == "power":
        old = P.T @ G @ S
        rows = (0.9 * left + 0.1 * old @ old.T).diagonal().argsort(descending=True)
        columns = (0.9 * right + 0.1 * old.T @ old).diagonal().argsort(descending=True)
        expected = D[rows][:, columns]
        assert not torch.equal(rows, torch.arange(12))
    assert_close(carried, expected, 1e-12)


# Slots --------------------------------------------------------------------------------------------


def overlap(V, order):
    return V.square()[torch.arange(len(V)), order].sum().item()


def best_assignment(V):
    rows, columns = linear_sum_assignment(V.square().numpy(), maximize=True)
    assert (rows == range(len(V))).all()
    return torch.tensor(columns)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(d=st.integers(1, 24), seed=st.integers(0, 999))
def test_matched_slots_are_a_permutation_with_at_least_half_of_the_best_overlap(d, seed):
    V = orthogonal(3, d, seed)
    for V_k, order in zip(V, linalg.match(V), strict=True):
        assert sorted(order.tolist()) == list(range(d))
        assert overlap(V_k, order) >= 0.5 * overlap(V_k, best_assignment(V_k))
        assert torch.equal(order, oracles.matched(V_k))


@pytest.mark.parametrize("d", [2, 7, 30])
def test_near_a_permutation_matched_slots_are_the_best_assignment(d):
    generator = torch.Generator().manual_seed(d)
    for _ in range(10):
        order = torch.randperm(d, generator=generator)
        K = 0.1 / d**0.5 * torch.randn(d, d, generator=generator, dtype=torch.float64)
        V = torch.linalg.matrix_exp(K - K.T)[:, order]
        found = linalg.match(V.unsqueeze(0))[0]
        assert torch.equal(found, best_assignment(V))
        assert torch.equal(order[found], torch.arange(d))


def test_equal_overlaps_are_matched_too():
    V = torch.full((2, 4, 4), 0.5, dtype=torch.float64)
    for order in linalg.match(V):
        assert sorted(order.tolist()) == [0, 1, 2, 3]


def test_matched_slots_keep_a_nearly_diagonal_factor_in_place():
    A = factors(3, 10, near=0.02)
    (change,) = linalg.eigh(A, "match").changes
    assert (change.V.diagonal(dim1=1, dim2=2).abs() > 0.7).all()
    (ranked,) = linalg.eigh(A, "rank").changes
    assert (ranked.factor.diagonal(dim1=1, dim2=2).diff(dim=1) >= 0).all()


# Orthogonality ------------------------------------------------------------------------------------


def departure(Q):
    return (Q.mT @ Q - torch.eye(Q.shape[-1])).abs().max().item()


def test_orthonormalize_squares_the_departure():
    Q = orthogonal(3, 16)
    disturbed = Q + 1e-4 * torch.randn(Q.shape, dtype=Q.dtype)
    after = linalg.orthonormalize(disturbed)
    assert departure(disturbed.float()) > 1e-4
    assert (after.mT @ after - torch.eye(16)).abs().max() < 1e-6


@pytest.mark.parametrize("solver", ["eigh", "power"])
def test_bases_stay_orthogonal_over_thousands_of_changes_in_float32(solver):
    params = parameters([torch.zeros(16, 16)])
    optimizer = EShampoo(
        params, frequency=1, tau=0.0, merge_dims=False, betas=(0.9, 0.9), solver=solver
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for _ in range(5000):
        params[0].grad = torch.randn(16, 16, generator=generator)
        optimizer.step()
    assert computations(optimizer) == [5000, 5000]
    state = optimizer.state[params[0]]
    for name in ("basis_0", "basis_1"):
        assert departure(state[name]) < 1e-5


def test_stale_roots_are_reused_between_checks():
    tensors, grads = problem([(4, 4)], 12)
    params = parameters(tensors)
    optimizer = Shampoo(params, frequency=4, merge_dims=False)
    roots = []
    for step in grads:
        run(optimizer, params, [step])
        roots.append(optimizer.state[params[0]]["root_0"].clone())
    changed = [t + 1 for t in range(1, 12) if not torch.equal(roots[t], roots[t - 1])]
    assert changed == [4, 8, 12]
