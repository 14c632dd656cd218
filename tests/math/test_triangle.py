"""Symmetric matrices of which one triangle is kept, against the whole ones."""

import pytest
import torch

from eshampoo.math.linalg import average_gram_, criterion, off_share
from eshampoo.math.triangle import (
    average_triangle_,
    diagonal_of,
    in_form,
    off_norm_of,
    pack,
    side,
    triangle_size,
    unpack,
)

SIZES = [1, 2, 3, 4, 5, 8, 13]


def symmetric(d, count=3, seed=0):
    A = torch.randn(count, d, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return A + A.transpose(1, 2)


@pytest.mark.parametrize("d", SIZES)
def test_a_triangle_holds_every_entry_once_and_gives_the_matrix_back(d):
    A = symmetric(d)
    P = pack(A)
    assert P.shape == (3, d * (d + 1) // 2) == (3, triangle_size(d))
    assert side(P) == side(A) == d
    lower = [[A[n, i, j].item() for i in range(d) for j in range(i + 1)] for n in range(3)]
    assert [sorted(row) for row in P.tolist()] == [sorted(row) for row in lower]
    assert torch.equal(unpack(P), A)
    assert torch.equal(in_form(A, P), P)
    assert torch.equal(in_form(P, A), A)
    assert unpack(A) is A


@pytest.mark.parametrize("d", SIZES)
def test_diagonal_and_criterion_are_those_of_the_matrix(d):
    A = symmetric(d)
    P = pack(A)
    assert torch.equal(diagonal_of(P), A.diagonal(dim1=1, dim2=2))
    found = off_share(off_norm_of(P), torch.linalg.vector_norm(diagonal_of(P), dim=1))
    torch.testing.assert_close(found, criterion(A), rtol=1e-14, atol=0)


def test_the_criterion_of_a_triangle_survives_float32():
    A = torch.diag_embed(torch.logspace(0, 3, 512)).unsqueeze(0)
    A[0, 300, 7] = A[0, 7, 300] = 1e-3
    assert abs(off_norm_of(pack(A)).item() - 2**0.5 * 1e-3) < 1e-9


@pytest.mark.parametrize(("d", "rest"), [*((d, 3) for d in SIZES), (384, 256), (389, 260)])
@pytest.mark.parametrize("beta", [0.9, 1.0])
def test_a_triangle_averages_what_the_matrix_averages(d, rest, beta):
    A = symmetric(d)
    P = pack(A)
    X = torch.randn(3, d, rest, dtype=torch.float64)
    share = torch.tensor([0.1, 0.0, 0.1], dtype=torch.float64).view(3, 1, 1)
    before = P.clone()
    average_triangle_(P, X, 0, beta, share)
    average_gram_(A, X, 0, beta, share)
    torch.testing.assert_close(unpack(P), A, rtol=1e-12, atol=1e-12)
    assert torch.equal(P[1], before[1])  # a share of 0 leaves every bit


@pytest.mark.parametrize("d", [2, 5, 400])
def test_a_sum_that_is_full_stays_positive_and_the_same_in_both_forms(d):
    """β = 1, float32: a sum that is full shrinks, so that it has seen every gradient."""
    chance = torch.Generator().manual_seed(0)
    A, share = torch.zeros(2, d, d), torch.ones(2, 1, 1)
    P = pack(A)
    for t in range(6):
        X = torch.randn(2, d, 300, generator=chance)
        X *= 10.0 ** torch.tensor([19.2, 16.5 + t / 2]).view(2, 1, 1) / X.norm()
        average_gram_(A, X, 0, 1.0, share)
        average_triangle_(P, X, 0, 1.0, share)
        largest = A.diagonal(dim1=1, dim2=2).amax(1)
        assert (largest > 0).all()
        assert torch.isfinite(A.diagonal(dim1=1, dim2=2).sum(1)).all()
        scaled = A / largest.view(2, 1, 1)
        assert torch.linalg.eigvalsh(scaled.double()).amin() > -1e-4
        assert torch.allclose(scaled, unpack(P) / largest.view(2, 1, 1), atol=1e-5)
