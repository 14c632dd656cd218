"""Solvers Λ̂ → V: what they guarantee."""

import threading
from concurrent.futures import ThreadPoolExecutor

import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from keyword_table import choices
from training import assert_close

from eshampoo.math import linalg, solvers

EPS = torch.finfo(torch.float64).eps


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


@pytest.mark.parametrize("solver", choices("solver"))
def test_every_solver_returns_an_orthogonal_change_and_the_factor_seen_after_it(solver):
    A = factors(5, 21)
    changes, failed = solvers.solve(A, solver, [0.1] * 5, 20)
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
def test_the_criterion_is_at_most_tau_after_enough_qr_iterations(tau):
    A = factors(6, 9, near=0.4)
    change = solvers.qr(A, EPS, [tau] * 6, 2000)
    assert (linalg.criterion(A) > tau).any()
    assert (linalg.criterion(change.factor) <= tau).all()


def test_qr_stops_each_factor_as_soon_as_its_own_tau_holds():
    A = factors(4, 9, near=0.4)
    taus = [0.5, 0.2, 0.1, 0.05]
    change = solvers.qr(A, EPS, taus, 500)
    for k, tau in enumerate(taus):
        alone = solvers.qr(A[k : k + 1], EPS, [tau], 500)
        assert_close(alone.V[0], change.V[k], 1e-12)
        Q = oracles.qr_algorithm(A[k], torch.eye(9, dtype=A.dtype), tau, 500)
        if oracles.criterion(A[k]) > tau:
            assert_close(rotated(Q, A[k]).diagonal(), change.factor[k].diagonal(), 1e-10)


def test_qr_does_at_most_its_iterations():
    A = factors(3, 9)
    one, two = (solvers.qr(A, EPS, [1e-6] * 3, i).factor for i in (1, 2))
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
    for change in solvers.partial(A, EPS, [target] * 4):
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
    for change in solvers.partial(A, EPS, [target] * 6):
        for position in change.members:
            assert needed[position] <= change.V.shape[1] < needed[position] + 8
    assert needed.min() < 56


def test_inside_partial_eigenvalues_go_to_slots_by_rank():
    A = factors(4, 24, near=0.3)
    for change in solvers.partial(A, EPS, [0.05] * 4):
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


# eigh, where LAPACK is slow or has several matrices -----------------------------------------------


@pytest.mark.parametrize("columns", [0, 1, 20, 1536])
@pytest.mark.parametrize("size", [1e-20, 1.0, 1e34])
def test_padding_a_matrix_changes_only_the_rounding(columns, size):
    X = torch.randn(1, 512, columns)
    A = X @ X.mT * (size / 512)
    eigenvalues, V = solvers.eigh_of_stack(A)
    top = torch.linalg.eigvalsh(A).amax()
    A, V = A.double(), V.double()
    assert eigenvalues.shape == (1, 512)
    assert (eigenvalues.diff(dim=1) >= 0).all()
    assert (eigenvalues <= 4 * torch.finfo(torch.float32).eps * top).sum() == max(0, 512 - columns)
    assert_close(V.mT @ V, torch.eye(512, dtype=V.dtype).unsqueeze(0), 1e-5)
    assert_close(V.mT @ A @ V / size, torch.diag_embed(eigenvalues.double()) / size, 1e-5)


def test_large_matrices_have_a_thread_each_and_the_bits_of_one_thread(monkeypatch, two_threads):
    real, seen = torch.linalg.eigh, []

    def eigh(A):
        seen.append((threading.get_ident(), torch.get_num_threads(), A.shape))
        barrier.wait(timeout=60)  # both are here at the same time
        return real(A)

    barrier = threading.Barrier(2)
    A = factors(4, 256)
    with monkeypatch.context() as patch:
        patch.setattr(torch.linalg, "eigh", eigh)
        found = solvers.eigh_of_stack(A)
    assert {entry[1:] for entry in seen} == {(1, (256, 256))}
    assert len({entry[0] for entry in seen} - {threading.get_ident()}) == 2
    assert torch.get_num_threads() == default_of_new_threads() == 2
    torch.set_num_threads(1)
    for of_two, of_one in zip(found, solvers.eigh_of_stack(A), strict=True):
        assert torch.equal(of_two, of_one)
        assert of_two.stride() == of_one.stride()


def test_an_error_on_a_thread_is_raised_and_all_threads_are_back(monkeypatch, two_threads):
    def eigh(A):
        raise torch.linalg.LinAlgError("no")

    monkeypatch.setattr(torch.linalg, "eigh", eigh)
    count = threading.active_count()
    with pytest.raises(torch.linalg.LinAlgError):
        solvers.eigh_of_stack(factors(2, 256))
    assert threading.active_count() == count
    assert torch.get_num_threads() == default_of_new_threads() == 2


def default_of_new_threads():
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.get_num_threads).result()
