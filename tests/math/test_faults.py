"""What solvers do if a decomposition fails below, or if memory runs out."""

import pytest
import torch
from faults import FATAL, REPORTED, SILENT, Faults
from training import assert_close

from eshampoo.math import solvers

# Which decompositions a solver uses: of its own, and where factors lack rank.
USED = {
    "eigh": ("eigh", "svd", "qr"),
    "partial": ("eigh", "svd", "qr"),
    "qr": ("qr", "svd"),
    "power": ("qr", "svd"),
}
PAIRS = [(solver, name) for solver, names in USED.items() for name in names]
MARK, d = 1e4, 9


def factors(count, marked=(), dtype=torch.float32):
    """Matrices of rank 2 of 9; those that are marked are much larger."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(count, d, 2, generator=generator, dtype=torch.float64)
    X[list(marked)] *= MARK
    return (X @ X.mT).to(dtype)


def solve(A, solver):
    return solvers.solve(A, solver, [1e-3] * len(A), 20)


def check(A, changes, members):
    """These members, and no others, have an orthogonal change and the factor seen after it."""
    assert sorted(k for change in changes for k in change.members) == sorted(members)
    for change in changes:
        V, before = change.V.double(), A[change.members].double()
        assert V.isfinite().all()
        assert change.V.dtype == change.factor.dtype == A.dtype
        if change.subset is not None:
            S = change.subset
            before = torch.stack([B[s][:, s] for B, s in zip(before, S, strict=True)])
            after = [B[s][:, s] for B, s in zip(change.factor.double(), S, strict=True)]
            after = torch.stack(after)
        else:
            after = change.factor.double()
        assert_close(V.mT @ V, torch.eye(V.shape[1]).double().expand_as(V), 1e-5)
        size = before.abs().amax((1, 2), keepdim=True)
        assert_close(after / size, V.mT @ before @ V / size, 1e-5)


@pytest.mark.parametrize("fault", [*REPORTED, *SILENT])
@pytest.mark.parametrize(("solver", "name"), PAIRS)
def test_a_stack_that_fails_in_float32_is_solved_matrix_by_matrix_in_float64(
    monkeypatch, solver, name, fault
):
    A = factors(3)
    fails = Faults(
        monkeypatch, name, lambda B: B.dtype == torch.float32, REPORTED.get(fault, fault)
    )
    changes, failed = solve(A, solver)
    assert failed == []
    check(A, changes, range(3))
    # The level below which an eigenvalue counts as zero is that of float32.
    assert {(torch.float64, 1)} <= {(dtype, shape[0]) for dtype, shape in fails.calls}
    monkeypatch.undo()
    expected, _ = solve(A, solver)
    sound = {k: change.V[i] for change in expected for i, k in enumerate(change.members)}
    for change in changes:
        for i, k in enumerate(change.members):
            signs = torch.sign((change.V[i] * sound[k]).sum(0))
            assert_close(change.V[i] * signs, sound[k], 1e-4)


@pytest.mark.parametrize("fault", ["LAPACK", "cuSOLVER", *SILENT])
@pytest.mark.parametrize(("solver", "name"), PAIRS)
def test_a_member_that_always_fails_has_no_change_and_the_others_have_theirs(
    monkeypatch, solver, name, fault
):
    A = factors(5, marked=[3])
    real, inside = getattr(solvers, solver), set()  # an SVD cannot tell whose matrix it sees

    def watched(B, *args):
        inside.clear()
        inside.update(["member"] if (B.abs() > MARK).any() else [])
        return real(B, *args)

    monkeypatch.setattr(solvers, solver, watched)
    Faults(monkeypatch, name, lambda B: "member" in inside, REPORTED.get(fault, fault))
    changes, failed = solve(A, solver)
    assert failed == [3]
    check(A, changes, [0, 1, 2, 4])


@pytest.mark.parametrize("fault", ["CUDA memory", "cuBLAS memory", "host memory"])
@pytest.mark.parametrize(("solver", "name"), PAIRS)
def test_out_of_memory_halves_the_stack_and_keeps_every_bit(monkeypatch, solver, name, fault):
    A = factors(7)
    expected, _ = solve(A, solver)
    faults = Faults(monkeypatch, name, lambda B: B.dim() == 3 and len(B) > 2, REPORTED[fault])
    changes, failed = solve(A, solver)
    assert failed == []
    assert {dtype for dtype, _ in faults.calls} == {torch.float32}  # never one alone in float64
    assert max(len(change.members) for change in changes) == 2
    whole = {k: change.V[i] for change in expected for i, k in enumerate(change.members)}
    for change in changes:
        for i, k in enumerate(change.members):
            assert_close(change.V[i], whole[k], 1e-6)


@pytest.mark.parametrize("solver", USED)
def test_a_matrix_for_which_the_device_has_no_memory_goes_to_the_host(monkeypatch, solver):
    """The host is the third place; here all are on the host, so places are counted."""
    tried = []

    def place(number):
        def move(A):
            tried.append((number, len(A)))
            if number < 2:
                raise REPORTED["CUDA memory"]
            return A.double().cpu()

        return move

    monkeypatch.setattr(solvers, "PLACES", tuple(map(place, range(3))))
    A = factors(2)
    changes, failed = solve(A, solver)
    assert failed == []
    assert tried == [(0, 2), (0, 1), (1, 1), (2, 1), (0, 1), (1, 1), (2, 1)]
    check(A, changes, range(2))


@pytest.mark.parametrize("fault", FATAL)
@pytest.mark.parametrize(("solver", "name"), PAIRS)
def test_errors_of_the_device_and_of_ours_are_raised(monkeypatch, solver, name, fault):
    faults = Faults(monkeypatch, name, lambda B: True, FATAL[fault])
    with pytest.raises(type(FATAL[fault])) as error:
        solve(factors(3), solver)
    assert error.value is FATAL[fault]
    assert len(faults.calls) == 1
