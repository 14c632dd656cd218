"""Solvers Λ̂ → V: what they guarantee, and which column goes where."""

import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from keyword_table import choices
from matrices import orthogonal
from scipy.optimize import linear_sum_assignment
from training import assert_close

from eshampoo.math import linalg, solvers


def factors(count, d, seed=0, near=None):
    """Random symmetric positive definite matrices; with `near`, almost diagonal ones."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(count, d, 2 * d, generator=generator, dtype=torch.float64)
    A = X @ X.mT / (2 * d)
    if near is not None:
        D = torch.diag_embed(torch.rand(count, d, generator=generator, dtype=torch.float64) + 0.5)
        A = D + near * (A - torch.diag_embed(A.diagonal(dim1=1, dim2=2)))
    return A


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


# Every solver -------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", choices("slots"))
@pytest.mark.parametrize("solver", choices("solver"))
def test_every_solver_returns_an_orthogonal_change_and_the_factor_seen_after_it(solver, slots):
    A = factors(5, 21)
    changes, failed = solvers.solve(A, solver, slots, [0.1] * 5, 0.5, 20)
    assert failed == []
    seen = []
    for change in changes:
        V, before = whole(change, 21), A[change.members]
        seen += change.members
        assert_close(V.mT @ V, torch.eye(21, dtype=V.dtype).expand_as(V), 1e-12)
        assert_close(change.factor, rotated(V, before), 1e-12)
        assert_close(change.factor, change.factor.mT, 1e-13)
    assert sorted(seen) == list(range(5))


# QR iterations ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [0.3, 0.1, 0.01])
@pytest.mark.parametrize("slots", choices("slots"))
def test_the_criterion_is_at_most_tau_after_enough_qr_iterations(tau, slots):
    A = factors(6, 9, near=0.4)
    change = solvers.qr(A, slots, [tau] * 6, 2000)
    assert (linalg.criterion(A) > tau).any()
    assert (linalg.criterion(change.factor) <= tau).all()


def test_qr_stops_each_factor_as_soon_as_its_own_tau_holds():
    A = factors(4, 9, near=0.4)
    taus = [0.5, 0.2, 0.1, 0.05]
    change = solvers.qr(A, "rank", taus, 500)
    for k, tau in enumerate(taus):
        alone = solvers.qr(A[k : k + 1], "rank", [tau], 500)
        assert_close(alone.V[0], change.V[k], 1e-12)
        Q = oracles.qr_algorithm(A[k], torch.eye(9, dtype=A.dtype), tau, 500)
        if oracles.criterion(A[k]) > tau:
            assert_close(rotated(Q, A[k]).diagonal(), change.factor[k].diagonal(), 1e-10)


def test_qr_does_at_most_its_iterations():
    A = factors(3, 9)
    one, two = (solvers.qr(A, "rank", [1e-6] * 3, i).factor for i in (1, 2))
    Q, R = torch.linalg.qr(A)
    assert_close(one, R @ Q, 1e-12)
    Q, R = torch.linalg.qr(one)
    assert_close(two, R @ Q, 1e-12)


# Partial ------------------------------------------------------------------------------------------


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
    order, predicted = solvers.prefixes(A)
    assert_close(predicted[:, 0], linalg.criterion(A), 1e-13)
    for change in solvers.partial(A, "rank", [target] * 4)[0]:
        after = linalg.criterion(change.factor)
        assert (after <= target + 1e-14).all()
        size = change.V.shape[1]
        expected = predicted[change.members, size] if size < d else torch.zeros_like(after)
        assert_close(after, expected, 1e-12)
        for k, position in enumerate(change.members):
            S = change.subset[k].tolist()
            assert set(S) == set(order[position, :size].tolist())
            assert_close(after[k].item(), oracles.criterion_after_partial(A[position], S), 1e-12)


def test_the_predictions_are_those_of_all_prefixes_and_fall():
    A = factors(3, 12, near=0.3)
    order, predicted = solvers.prefixes(A)
    for k in range(3):
        for size in range(12):
            expected = oracles.criterion_after_partial(A[k], order[k, :size].tolist())
            assert_close(predicted[k, size].item(), expected, 1e-13)
    assert (predicted.diff(dim=1) <= 0).all()


def test_partial_takes_no_more_coordinates_than_its_batch_size_asks():
    A = factors(6, 64, near=0.03)
    _, predicted = solvers.prefixes(A)
    target = 0.5 * linalg.criterion(A).min().item()
    needed = (predicted > target).sum(1)
    for change in solvers.partial(A, "rank", [target] * 6)[0]:
        for position in change.members:
            assert needed[position] <= change.V.shape[1] < needed[position] + 8
    assert needed.min() < 56


def test_inside_partial_eigenvalues_go_to_slots_by_rank():
    A = factors(4, 24, near=0.3)
    for change in solvers.partial(A, "rank", [0.05] * 4)[0]:
        for k, position in enumerate(change.members):
            S = change.subset[k]
            before, after = A[position].diagonal()[S], change.factor[k].diagonal()[S]
            assert torch.equal(before.argsort(), after.argsort())
            outside = [i for i in range(24) if i not in S.tolist()]
            assert torch.equal(
                A[position][outside][:, outside], change.factor[k][outside][:, outside]
            )


@pytest.mark.parametrize("scale", [1e-18, 1.0, 1e18])
def test_the_partial_solver_chooses_alike_at_any_scale(scale):
    generator = torch.Generator().manual_seed(0)
    G = torch.randn(2, 12, 12, generator=generator)
    A = G @ G.transpose(1, 2)
    order, after = solvers.prefixes(A)
    other, scaled = solvers.prefixes(A * scale)
    assert torch.equal(order, other)
    torch.testing.assert_close(after, scaled)


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
    for V_k, order in zip(V, solvers.match(V), strict=True):
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
        found = solvers.match(V.unsqueeze(0))[0]
        assert torch.equal(found, best_assignment(V))
        assert torch.equal(order[found], torch.arange(d))


def test_equal_overlaps_are_matched_too():
    V = torch.full((2, 4, 4), 0.5, dtype=torch.float64)
    for order in solvers.match(V):
        assert sorted(order.tolist()) == [0, 1, 2, 3]


def test_matched_slots_keep_a_nearly_diagonal_factor_in_place():
    A = factors(3, 10, near=0.02)
    (change,) = solvers.eigh(A, "match")[0]
    assert (change.V.diagonal(dim1=1, dim2=2).abs() > 0.7).all()
    (ranked,) = solvers.eigh(A, "rank")[0]
    assert (ranked.factor.diagonal(dim1=1, dim2=2).diff(dim=1) >= 0).all()
