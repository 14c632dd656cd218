"""The criterion and the orthogonality of bases."""

import numpy as np
import pytest
import torch
from matrices import (
    approximation_error,
    departure,
    factor_and_basis,
    off_diagonal_share,
    orthogonal,
)

from eshampoo.math import linalg

# The criterion ------------------------------------------------------------------------------------


def test_the_criterion_is_the_relative_error_of_each_factor_in_a_stack():
    pairs = [factor_and_basis(seed, 6) for seed in range(5)]
    stack = torch.stack([torch.tensor(Q.T @ L @ Q) for L, Q in pairs])
    expected = torch.tensor([approximation_error(L, Q) for L, Q in pairs], dtype=torch.float64)
    torch.testing.assert_close(linalg.criterion(stack), expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("leading", [(), (2, 3)])
def test_the_criterion_takes_any_leading_dimensions(leading):
    L, Q = factor_and_basis(0, 6)
    value = linalg.criterion(torch.tensor(Q.T @ L @ Q).expand(*leading, 6, 6))
    expected = torch.full(leading, approximation_error(L, Q), dtype=torch.float64)
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("d", [1, 3])
def test_the_criterion_of_a_zero_factor_is_zero(d):
    assert linalg.criterion(torch.zeros(2, d, d)).tolist() == [0.0, 0.0]


def test_the_criterion_resists_cancellation_in_float32():
    d, share = 1024, 1e-3
    rng = np.random.default_rng(10)
    noise = rng.standard_normal((d, d))
    off = noise + noise.T - 2 * np.diag(np.diag(noise))
    diagonal = np.diag(np.exp(rng.standard_normal(d)))
    Λ = diagonal + off * (share * np.linalg.norm(diagonal) / np.linalg.norm(off))
    stack = torch.tensor(Λ, dtype=torch.float32)[None]
    assert linalg.criterion(stack).item() == pytest.approx(off_diagonal_share(Λ), rel=1e-2)
    diagonal_share = (stack[0].diag().norm() / stack[0].norm()) ** 2
    subtracted = (1 - diagonal_share).clamp(min=0).sqrt().item()  # √(‖Λ̂‖² − ‖diag Λ̂‖²) / ‖Λ̂‖
    assert subtracted != pytest.approx(off_diagonal_share(Λ), rel=1e-2)  # what must not be done


@pytest.mark.parametrize("scale", [1e-25, 1e-12, 1.0, 1e12, 1e18])
def test_the_criterion_is_sound_at_any_scale(scale):
    """Where squares overflow it says 1, so that a basis is computed; never NaN, never above 1."""
    generator = torch.Generator().manual_seed(0)
    G = torch.randn(1, 5, 5, generator=generator)
    A = G @ G.transpose(1, 2)
    value = linalg.criterion(A * scale * scale if scale < 1e18 else A * 3e37)
    assert 0 <= value.item() <= 1
    if scale in (1e12, 1e18):
        assert value.item() == 1
    if scale == 1.0:
        assert 0 < value.item() < 1


# Orthogonality ------------------------------------------------------------------------------------


def test_orthonormalize_squares_the_departure():
    Q = orthogonal(3, 16)
    disturbed = Q + 1e-4 * torch.randn(Q.shape, dtype=Q.dtype)
    after = linalg.orthonormalize(disturbed)
    assert departure(disturbed.float()) > 1e-4
    assert (after.mT @ after - torch.eye(16)).abs().max() < 1e-6
