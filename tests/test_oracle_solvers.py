"""The oracles' solvers and their criterion."""

import oracles
import pytest
import torch
from beside_oracles import trajectory
from training import assert_close, problem


def test_many_qr_iterations_find_the_basis_of_eigh_in_descending_order():
    (Z,), _ = problem([(6, 6)], 0)
    L = torch.diag(torch.tensor([32.0, 16, 8, 4, 2, 1], dtype=torch.float64))
    V = torch.linalg.qr(Z).Q
    Q = oracles.qr_algorithm(V @ L @ V.T, torch.eye(6, dtype=torch.float64), 1e-12, 200)
    assert_close((Q.T @ V).abs(), torch.eye(6, dtype=torch.float64), 1e-9)


@pytest.mark.parametrize("tau", [0.05, 0.3])
def test_qr_iterations_stop_as_soon_as_the_criterion_holds(tau):
    (G,), _ = problem([(8, 8)], 0)
    L, Q = G @ G.T, torch.eye(8, dtype=torch.float64)
    errors = []
    for iterations in range(30):
        Q_i = oracles.qr_algorithm(L, Q, tau, iterations)
        errors.append(oracles.criterion(Q_i.T @ L @ Q_i))
    assert errors[0] > tau >= errors[-1]
    needed = next(i for i, error in enumerate(errors) if error <= tau)
    assert all(error > tau for error in errors[:needed])
    assert errors[needed] == errors[-1]


def test_the_power_step_leaves_a_sorted_eigenbasis_alone_and_sorts_another():
    (G,), _ = problem([(5, 5)], 0)
    Q = torch.linalg.eigh(G @ G.T).eigenvectors
    Q_new, order = oracles.power_step(G @ G.T, Q)
    assert order.tolist() == [4, 3, 2, 1, 0]
    assert_close((Q_new.T @ Q.flip(1)).abs(), torch.eye(5, dtype=torch.float64), 1e-9)


def test_the_power_solver_permutes_d_with_the_columns():
    # Gradients of constant diagonal covariance: a reordering of coordinates must change nothing.
    W = torch.zeros(3, dtype=torch.float64)
    basis = torch.eye(3, dtype=torch.float64)
    grads = [[basis[t % 3] * (t % 3 + 1)] for t in range(12)]
    options = {"vectors": "full", "frequency": 3, "tau": 0.0, "rms": None, "betas": (0.9, 0.999)}
    power = trajectory(oracles.EShampoo([W], solver="power", **options), grads)
    assert_close(power, trajectory(oracles.AdamW([W]), grads))
    descending = [[-G.flip(0)] for (G,) in grads]  # eigh turns the order around and D stays behind
    eigh = trajectory(oracles.EShampoo([W], **options), descending)
    assert (eigh - trajectory(oracles.AdamW([W]), descending)).abs().max() > 1e-5


def test_the_solvers_agree_at_convergence_of_the_qr_iteration():
    # With D* the order of the columns does not matter, so a converged QR iteration is eigh.
    params, grads = problem([(3, 4)], 10, condition=2.0)
    options = {"tau": 0.0, "frequency": 5, "merge_dims": False, "correction": "optimal"}
    eigh = trajectory(oracles.EShampoo(params, **options), grads)
    qr = trajectory(oracles.EShampoo(params, solver="qr", qr_iterations=3000, **options), grads)
    few = trajectory(oracles.EShampoo(params, solver="qr", qr_iterations=1, **options), grads)
    assert_close(qr, eigh, 1e-9)
    assert (few - eigh).abs().max() > 1e-6


def test_tau_zero_recomputes_at_every_check_and_tau_one_never():
    params, grads = problem([(4, 3)], 20)
    for tau, computed in [(0.0, [True] * 4), (1.0, [False] * 4), (lambda t: t // 15, None)]:
        oracle = oracles.EShampoo(params, frequency=5, tau=tau, merge_dims=False)
        trajectory(oracle, grads)
        for history in oracle.blocks[0][0].history:
            assert [t for t, _, _ in history] == [5, 10, 15, 20]
            assert [c for _, _, c in history] == (computed or [True, True, False, False])


def test_the_basis_is_kept_exactly_when_the_criterion_holds():
    params, grads = problem([(4, 3)], 60, condition=3.0)
    oracle = oracles.EShampoo(params, tau=0.2, frequency=1, merge_dims=False)
    trajectory(oracle, grads)
    history = [entry for mode in oracle.blocks[0][0].history for entry in mode]
    assert all(computed == (error > 0.2) for _, error, computed in history)
    assert {computed for _, _, computed in history} == {True, False}


def test_a_zero_factor_meets_the_criterion():
    assert oracles.criterion(torch.zeros(3, 3)) == 0.0


def test_a_partial_diagonalisation_removes_the_energy_inside_its_set_alone():
    (G,), _ = problem([(6, 6)], 0)
    Λ, S = G @ G.T, [0, 2, 5]
    off = Λ - torch.diag(Λ.diag())
    inside = off[S][:, S]
    expected = ((off**2).sum() - (inside**2).sum()).sqrt() / torch.linalg.norm(Λ)
    assert oracles.criterion_after_partial(Λ, S) == pytest.approx(expected.item(), abs=1e-13)
    assert oracles.criterion_after_partial(Λ, list(range(6))) == pytest.approx(0.0, abs=1e-13)
    assert oracles.criterion_after_partial(Λ, [3]) == oracles.criterion(Λ)
