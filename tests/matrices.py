"""Matrices for the tests of bases and of the criterion."""

import numpy as np
import torch


def orthogonal(count, d, seed=0):
    """Random orthogonal matrices."""
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(count, d, d, generator=generator, dtype=torch.float64)).Q


def departure(Q):
    """The largest entry of QᵀQ − I."""
    return (Q.mT @ Q - torch.eye(Q.shape[-1])).abs().max().item()


def factor_and_basis(seed, d):
    """A factor and a basis that is nearly its own: the situation in which the criterion matters."""
    rng = np.random.default_rng(seed)
    G = rng.standard_normal((d, d + 2)) * np.exp(rng.standard_normal((d, 1)))
    near = np.linalg.eigh(G @ G.T)[1] + 0.1 * rng.standard_normal((d, d))
    return G @ G.T, np.linalg.qr(near)[0]


def approximation_error(L, Q):
    """‖L − L̂‖_F / ‖L‖_F with L̂ = Q diag(Qᵀ L Q) Qᵀ: the criterion's left-hand side."""
    return np.linalg.norm(L - (Q * np.diag(Q.T @ L @ Q)) @ Q.T) / np.linalg.norm(L)


def off_diagonal_share(Λ):
    """‖Λ̂ − diag Λ̂‖_F / ‖Λ̂‖_F: its right-hand side."""
    return np.linalg.norm(Λ - np.diag(np.diag(Λ))) / np.linalg.norm(Λ)
