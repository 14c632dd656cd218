"""When bases are computed, what happens to the state then, and what if a decomposition fails."""

import pytest
import torch
from beside_oracles import Pair
from counting import count, flops, of_a_step
from faults import REPORTED, Faults
from keyword_table import FIRST_IS_FAST, METHODS, choices
from matrices import departure
from training import assert_close, checked, computations, parameters, problem, run

from eshampoo import EShampoo, Shampoo, schedules
from eshampoo.math.lean import unpack

ROTATED = ["EShampoo", "KLShampoo", "SOAP"]
PLAIN = {"merge_dims": False, "lr": 1e-2, "betas": (0.9, 0.9)}


# How often ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", choices("solver"))
@pytest.mark.parametrize("method", ["EShampoo", "Shampoo", "KLShampoo"])
def test_tau_zero_always_computes_and_tau_one_never(method, solver):
    for tau, expected in [(0.0, 8), (1.0, 0), (7.5, 0)]:
        optimizer = checked(method, tau, solver=solver)
        assert computations(optimizer) == [expected] * 5
        assert [r.checks for r in optimizer.basis_report()] == [8] * 5


def test_tau_one_or_more_is_adamw_for_ever():
    tensors, grads = problem([(4, 4)], 30)
    ours, theirs = parameters(tensors), parameters(tensors)
    run(EShampoo(ours, frequency=1, tau=1.0), ours, grads)
    run(torch.optim.AdamW(theirs, betas=(0.9, 0.95)), theirs, grads)
    assert_close(ours[0].detach(), theirs[0].detach(), 1e-13)


@pytest.mark.parametrize("method", FIRST_IS_FAST)
def test_counts_fall_as_tau_grows(method):
    taus = (0.0, 0.02, 0.1, 0.3, 0.6, 1.0)
    totals = [checked(method, tau, 40, 1).basis_computations for tau in taus]
    assert totals == sorted(totals, reverse=True)
    assert len(set(totals)) >= 4


def test_a_basis_is_computed_exactly_when_the_criterion_exceeds_tau():
    optimizer = checked("EShampoo", 0.25, 40, 2, record=True)
    history = [check for r in optimizer.basis_report() for check in r.history]
    assert {computed for _, _, computed in history} == {True, False}
    for step, value, computed in history:
        assert step % 2 == 0
        assert computed == (value > 0.25)


def test_every_group_has_a_tau_of_its_own():
    tensors, grads = problem([(4, 4)] * 3, 9)
    params = parameters(tensors)
    taus = [0.0, 1.0, schedules.piecewise((5,), (0.0, 1.0))]
    groups = [{"params": [p], "tau": tau} for p, tau in zip(params, taus, strict=True)]
    optimizer = EShampoo(groups, frequency=1, budget=None)
    run(optimizer, params, grads)
    assert computations(optimizer) == [9, 9, 0, 0, 4, 4]


# What a check costs -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ROTATED)
def test_a_kept_basis_costs_no_matrix_product(method):
    plain, check = (of_a_step(count, method, c) for c in (False, True))
    assert check.products == plain.products > 0
    assert of_a_step(flops, method, False) == of_a_step(flops, method, True)
    assert check.times("_linalg_eigh") == check.times("linalg_qr") == 0


# What a change of basis does ----------------------------------------------------------------------


@pytest.mark.parametrize("solver", choices("solver"))
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


@pytest.mark.parametrize("solver", choices("solver"))
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


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["eigh", "power"])
def test_bases_stay_orthogonal_over_a_thousand_changes_in_float32(solver):
    params = parameters([torch.zeros(16, 16)])
    optimizer = EShampoo(
        params, frequency=1, tau=0.0, budget=None, betas=(0.9, 0.9), solver=solver
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for _ in range(1000):  # without a remedy QᵀQ − I would have grown to 5e-5
        params[0].grad = torch.randn(16, 16, generator=generator)
        optimizer.step()
    assert computations(optimizer) == [1000, 1000]
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


@pytest.mark.parametrize("form", ["full", "lean"])
def test_shampoo_has_roots_from_its_first_check_on_also_if_that_check_keeps_the_basis(form):
    """Q = I is then the first basis, with the diagonals of the factors for eigenvalues."""
    tensors, grads = problem([(4, 3)], 5)
    params = parameters(tensors)
    options = {"frequency": 2, "tau": 1.0, "betas": (0.9, 0.9), "eps": 1e-6, "state": form}
    optimizer = Shampoo(params, **options)
    run(optimizer, params, grads[:2])
    roots = [optimizer.state[params[0]][f"root_{i}"].clone() for i in (0, 1)]
    run(optimizer, params, grads[2:])  # with a check that computes nothing, and leaves stale roots
    assert optimizer.basis_computations == 0
    for i, root in enumerate(roots):
        grams = [G @ G.T if i == 0 else G.T @ G for (G,) in grads[:2]]
        L = (0.09 * grams[0] + 0.1 * grams[1]) / (1 - 0.9**2)
        expected = torch.diag((L.diag() + 1e-6) ** (-1 / 4))
        assert_close((root if form == "full" else unpack(root))[0], expected, 1e-12)
        assert torch.equal(root, optimizer.state[params[0]][f"root_{i}"])


# Decompositions that fail -------------------------------------------------------------------------


# The decomposition that a solver uses.
USED = {"eigh": "eigh", "partial": "eigh", "qr": "qr", "power": "qr"}


@pytest.mark.parametrize("fault", ["cuSOLVER", "CUDA memory", "nan"])
@pytest.mark.parametrize("solver", USED)
def test_a_failed_decomposition_is_tried_again_in_float64(monkeypatch, solver, fault):
    tensors, grads = problem([(5, 4), (5, 4)], 12)
    options = {"frequency": 3, "tau": 0.05, "solver": solver, "merge_dims": False, "lr": 1e-2}
    sound, failing = parameters(tensors, torch.float32), parameters(tensors, torch.float32)
    run(METHODS["EShampoo"](sound, **options), sound, grads)
    in_float32 = lambda A: A.dtype == torch.float32  # noqa: E731
    faults = Faults(monkeypatch, USED[solver], in_float32, REPORTED.get(fault, fault))
    optimizer = METHODS["EShampoo"](failing, **options)
    run(optimizer, failing, grads)
    assert torch.float64 in {dtype for dtype, _ in faults.calls}
    assert optimizer.basis_computations > 4
    assert all(report.failures == 0 for report in optimizer.basis_report())
    for a, b in zip(sound, failing, strict=True):
        assert_close(a.detach(), b.detach(), 1e-4)


@pytest.mark.parametrize("solver", USED)
def test_without_any_decomposition_the_basis_is_kept_counted_and_reported(monkeypatch, solver):
    tensors, grads = problem([(5, 4), (4, 4)], 14)
    params = parameters(tensors)
    options = {"frequency": 2, "tau": 0.01, "merge_dims": False, "solver": solver}
    optimizer = METHODS["EShampoo"]([("first", params[0]), ("second", params[1])], **options)
    run(optimizer, params, grads[:3])
    before = {p: optimizer.state[p]["basis_0"].clone() for p in params}
    with monkeypatch.context() as patch:
        Faults(patch, USED[solver], lambda A: A.shape[-1] == 5, REPORTED["MAGMA"])
        run(optimizer, params, grads[3:7])
        assert torch.equal(before[params[0]], optimizer.state[params[0]]["basis_0"])
        assert not torch.equal(before[params[1]], optimizer.state[params[1]]["basis_0"])
        failures = [(r.name, r.mode, r.failures) for r in optimizer.basis_report()]
        assert failures == [
            ("first", 0, 2), ("first", 1, 0), ("second", 0, 0), ("second", 1, 0)
        ]  # fmt: skip
        assert optimizer.state[params[0]]["basis_failures"].tolist() == [[2, 0]]
        moved = params[0].detach().clone()
        with pytest.raises(RuntimeError, match="factor 0 of parameter 'first'") as error:
            run(optimizer, params, grads[7:8])
        assert "3 times" in str(error.value)
        assert "second" not in str(error.value)
        assert not torch.equal(moved, params[0].detach())
    run(optimizer, params, grads[8:10])
    assert all(report.failures == 0 for report in optimizer.basis_report())
    assert not torch.equal(before[params[0]], optimizer.state[params[0]]["basis_0"])


def test_failures_that_are_not_in_a_row_do_not_add_up(monkeypatch):
    tensors, grads = problem([(5, 4)], 12)
    params = parameters(tensors)
    optimizer = METHODS["EShampoo"](params, frequency=1, tau=0.0, budget=None, merge_dims=False)
    for t, step in enumerate(grads):
        with monkeypatch.context() as patch:
            if t % 3:  # twice in a row; three times would be an error
                Faults(patch, "eigh", lambda A: True, REPORTED["LAPACK"])
            run(optimizer, params, [step])
    assert optimizer.basis_computations == 8
