"""A null space that stays: the rule by itself, and in every solver."""

import oracles
import pytest
import torch
from faults import Faults
from hypothesis import given, settings
from hypothesis import strategies as st
from keyword_table import choices
from matrices import orthogonal
from training import assert_close

from eshampoo.math import null_space, solvers
from eshampoo.math.solvers import are_orthogonal


def deficient(count, d, rank, seed):
    """Random positive semidefinite matrices of a given rank."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(count, d, rank, generator=generator, dtype=torch.float64)
    return X @ X.mT / max(rank, 1)


def whole(change, d):
    """V on all coordinates."""
    V = torch.eye(d, dtype=change.V.dtype).repeat(len(change.V), 1, 1)
    for k in range(len(V)):
        S = torch.arange(d) if change.subset is None else change.subset[k]
        V[k][S.unsqueeze(1), S] = change.V[k]
    return V


def turned_within(V, null, seed):
    """V with another basis of the span of its null columns, as another ulp would give."""
    V = V.clone()
    for k in range(len(V)):
        n = int(null[k].sum())
        V[k][:, null[k]] = V[k][:, null[k]] @ orthogonal(1, n, seed + k)[0]
    return V


def overlaps(V, null):
    """Σ_j V_jj over the null columns: how near they are to the old ones."""
    return torch.stack([V_k.diagonal()[at].sum() for V_k, at in zip(V, null, strict=True)])


# The rule -----------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(d=st.integers(2, 24), seed=st.integers(0, 999), share=st.sampled_from([0.1, 0.5, 0.9]))
def test_null_columns_are_as_near_to_the_old_ones_as_any_and_the_others_stay(d, seed, share):
    generator = torch.Generator().manual_seed(seed)
    V, null = orthogonal(4, d, seed), torch.rand(4, d, generator=generator) < share
    found = null_space.align_null_space(V, null, null.sum(1).tolist())
    assert_close(found.mT @ found, torch.eye(d, dtype=V.dtype).expand_as(V), 1e-12)
    for k in range(4):
        at = null[k]
        assert torch.equal(found[k][:, ~at], V[k][:, ~at])
        # The same span, and the largest Σ V_jj that any basis of it has: the nuclear norm.
        before, after = V[k][:, at], found[k][:, at]
        assert_close(before @ before.T, after @ after.T, 1e-12)
        sigma = torch.linalg.svdvals(before[at])
        lost = sigma[sigma < null_space.APART].sum().item()
        assert abs(overlaps(found[k : k + 1], null[k : k + 1]) - sigma.sum()) <= 1e-12 + 2 * lost
        assert_close(found[k], oracles.stay(V[k], at.nonzero().flatten().tolist()), 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "dtype"), [(20, torch.float32), (180, torch.float64)])
def test_several_large_null_spaces_are_aligned_on_several_threads(two_threads, dtype, rank):
    """Here LU factors of several matrices of 160 rows and more would have pivots that are 0."""
    d = 380
    V, null = orthogonal(3, d, 0).to(dtype), torch.arange(d).expand(3, d) < d - rank
    for nullity in ([d - rank] * 3, [d - rank, 0, d - rank]):
        marked = null & (torch.tensor(nullity) > 0).unsqueeze(1)
        found = null_space.align_null_space(V, marked, nullity)
        assert_close(
            found.mT @ found, torch.eye(d, dtype=dtype).expand_as(V), 1e4 * torch.finfo(dtype).eps
        )
        alone = torch.stack(
            [
                oracles.stay(v, n.nonzero().flatten().tolist())
                for v, n in zip(V.double(), marked, strict=True)
            ]
        )
        assert_close(found.double(), alone, 1e6 * torch.finfo(dtype).eps)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(d=st.integers(2, 20), seed=st.integers(0, 999))
def test_which_basis_of_the_null_space_the_solver_found_does_not_matter(d, seed):
    null = torch.arange(d).expand(3, d) < d - 1 - seed % (d - 1)
    V, nullity = orthogonal(3, d, seed), null.sum(1).tolist()
    other = turned_within(V, null, seed)
    assert_close(
        null_space.align_null_space(V, null, nullity),
        null_space.align_null_space(other, null, nullity),
        1e-8,
    )


def test_directions_that_no_slot_is_near_go_to_the_free_slots_in_order():
    # Gradients have come in the coordinates 0, 1 and 4 only; the null space gets the slots 0 to 3.
    null = torch.tensor([[True] * 4 + [False] * 3])
    V = torch.eye(7, dtype=torch.float64)[:, [2, 3, 5, 6, 0, 1, 4]].unsqueeze(0)
    for seed in range(5):
        found = null_space.align_null_space(turned_within(V, null, seed), null, [4])
        assert_close(found[0][:, :4], torch.eye(7, dtype=V.dtype)[:, [5, 6, 2, 3]], 1e-12)


def test_matrices_without_a_null_space_keep_every_bit():
    V = orthogonal(3, 6, 0)
    assert null_space.align_null_space(V, torch.zeros(3, 6, dtype=torch.bool), [0, 0, 0]) is V
    null = torch.zeros(3, 6, dtype=torch.bool)
    null[1, :2] = True
    found = null_space.align_null_space(V, null, [0, 2, 0])
    assert torch.equal(found[[0, 2]], V[[0, 2]])
    assert not torch.equal(found[1], V[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("d", [4, 16, 64, 200])
def test_the_level_finds_the_rank_in_every_solver(d, dtype):
    for rank in (1, d // 4, d // 2):
        A = deficient(4, d, rank, d).to(dtype)
        u = torch.finfo(dtype).eps
        null = solvers.vanishing(solvers.eigh_of_stack(A)[0], u)
        assert null.sum(1).tolist() == [d - rank] * 4
        assert solvers._decompose(A, u, torch.arange(d).expand(4, d))[3] == [d - rank] * 4


# Every solver -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1, 4, 8])
@pytest.mark.parametrize("solver", choices("solver"))
def test_every_solver_finds_the_same_change_when_the_factor_is_disturbed(solver, rank):
    d, taus = 9, [0.0 if solver == "partial" else 0.01] * 4
    full = deficient(4, d, rank, seed=rank)
    zero, equal = full.clone(), full.clone()
    zero[:, [0, 3, 5]], zero[:, :, [0, 3, 5]] = 0.0, 0.0  # where no gradient ever came
    equal[:, 1], equal[:, 6] = equal[:, 0], equal[:, 5]  # the same input twice
    equal[:, :, 1], equal[:, :, 6] = equal[:, :, 0], equal[:, :, 5]
    # Equal coordinates are sorted by their rounding, and "power" sorts.
    for A in (full, zero) if solver == "power" else (full, zero, equal):
        generator = torch.Generator().manual_seed(1)
        E = torch.randn(A.shape, generator=generator, dtype=A.dtype) * 1e-16 * A
        (one,), _ = solvers.solve(A, solver, taus, 60)
        (two,), _ = solvers.solve(A + E + E.mT, solver, taus, 60)
        signs = torch.sign((one.V * two.V).sum(1, keepdim=True))
        assert_close(one.V * signs, two.V, 1e-9)
        V = whole(one, d)
        assert_close(V.mT @ V, torch.eye(d, dtype=V.dtype).expand_as(V), 1e-12)
        assert_close(V.mT @ A @ V, one.factor, 1e-11)


# Libraries that go wrong without a word -----------------------------------------------------------


@pytest.mark.parametrize("n", [3, 9])  # of 12: the rule by the null space, and by the rest
def test_a_wrong_svd_is_an_error(monkeypatch, n):
    """As MKL's in float32: U is not orthogonal. What follows: tests/math/test_faults.py."""
    V, null = orthogonal(2, 12, 0).float(), torch.arange(12).expand(2, 12) < n
    Faults(monkeypatch, "svd", lambda A: True, "not orthogonal")
    with pytest.raises(torch.linalg.LinAlgError, match="not orthogonal"):
        solvers.aligned(V, null, [n, n])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    d=st.integers(1, 40), seed=st.integers(0, 999), dtype=st.sampled_from(["float32", "float64"])
)
def test_a_matrix_that_is_not_orthogonal_is_seen(d, seed, dtype):
    V = orthogonal(2, d, seed).to(getattr(torch, dtype))
    assert are_orthogonal(V).tolist() == [True, True]
    i, j = torch.randint(d, (2,), generator=torch.Generator().manual_seed(seed)).tolist()
    V[1, :, i] *= 1.01
    V[0, i, j] = float("nan")
    assert are_orthogonal(V).tolist() == [False, False]
