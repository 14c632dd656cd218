"""Symmetric matrices of which one triangle is kept, and averages in bfloat16 that do not stall."""

import pytest
import torch

from eshampoo.math.lean import (
    average_rounded_,
    average_triangle_,
    diagonal_of,
    pack,
    thresholds,
    unpack,
)
from eshampoo.math.linalg import average_gram_

SIZES = [1, 2, 3, 4, 5, 8, 13]


def symmetric(d, count=3, seed=0):
    A = torch.randn(count, d, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return A + A.transpose(1, 2)


@pytest.mark.parametrize("d", SIZES)
def test_a_triangle_holds_every_entry_once_and_gives_the_matrix_back(d):
    A = symmetric(d)
    P = pack(A)
    assert P.shape == (3, d * (d + 1) // 2)
    lower = [[A[n, i, j].item() for i in range(d) for j in range(i + 1)] for n in range(3)]
    assert [sorted(row) for row in P.tolist()] == [sorted(row) for row in lower]
    assert torch.equal(unpack(P), A)
    assert unpack(A) is A
    assert torch.equal(diagonal_of(P), A.diagonal(dim1=1, dim2=2))


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


# Fewer bits ---------------------------------------------------------------------------------------


def test_the_thresholds_run_evenly_through_all_values():
    along = thresholds(torch.zeros(1), 0, 4096)[0].sort().values
    over_time = torch.stack([thresholds(torch.tensor([float(t)]), 7, 1)[0, 0] for t in range(4096)])
    even = torch.arange(4096) * 16
    for found in (along, over_time.sort().values):
        assert 0 <= found.min() <= found.max() < 2**16
        assert (found - even).abs().max() < 2**16 * 0.005  # random numbers: 0.02


def test_the_thresholds_depend_on_the_position_and_the_step_alone():
    t = torch.tensor([3.0, 900.0])
    whole = thresholds(t, 0, 100)
    assert torch.equal(whole[:, 40:70], thresholds(t, 40, 30))
    assert torch.equal(whole[1:], thresholds(t[1:], 0, 100))
    assert not torch.equal(whole[0], whole[1])


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.9, 0.99, 0.999])
def test_an_average_in_bfloat16_comes_to_its_mean(beta):
    value = torch.linspace(1, 5, 1001).view(1, -1)
    share = torch.tensor([[1 - beta]])
    M, nearest = torch.zeros(1, 1001).bfloat16(), torch.zeros(1, 1001).bfloat16()
    steps = int(12 / (1 - beta))
    total = torch.zeros(1, 1001)
    for t in range(steps):
        average_rounded_(M, value, share, torch.tensor([float(t)]))
        nearest.copy_(nearest.float().lerp_(value, share))
        total += M.float() * (t >= steps // 2)
    mean = total / (steps - steps // 2)
    error = mean / value - 1
    assert error.abs().max() <= 2**-7  # one step of bfloat16
    assert error.mean().abs() <= 2**-11
    if beta == 0.999:  # what this is for
        assert (nearest.float() / value).max() < 0.8


def test_what_is_returned_is_not_rounded_and_a_share_of_zero_leaves_every_bit():
    M = torch.randn(2, 50).bfloat16()
    before, value = M.clone(), torch.randn(2, 50)
    share = torch.tensor([[0.1], [0.0]])
    average = average_rounded_(M, value, share, torch.tensor([5.0, 5.0]))
    assert torch.equal(average, before.float().lerp(value, share))
    assert torch.equal(M[1], before[1])
    assert ((M[0].float() - average[0]).abs() <= 2**-7 * average[0].abs()).all()
