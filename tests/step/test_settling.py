"""Averages whose gradients have stopped are zeroed, and no others."""

import torch
from cases import parameters

from eshampoo import EShampoo
from eshampoo.step.settling import SETTLE_EVERY


def test_a_look_for_averages_that_vanish_leaves_eigenvalues_that_rounding_made_negative():
    """Singular values from 1 to 1e-6: M̃ is the average of all gradients, at step 64 too."""
    generator = torch.Generator().manual_seed(0)
    U = torch.linalg.qr(torch.randn(16, 12, generator=generator, dtype=torch.float64)).Q
    V = torch.linalg.qr(torch.randn(12, 12, generator=generator, dtype=torch.float64)).Q
    values = torch.logspace(0, -6, 12, dtype=torch.float64)
    (W,) = parameters([torch.zeros(16, 12)])
    optimizer = EShampoo([W], rms=None, budget=None, frequency=10, tau=0.0)
    M = torch.zeros(16, 12, dtype=torch.float64)
    for _ in range(SETTLE_EVERY):
        noise = 1 + 0.3 * torch.randn(12, generator=generator, dtype=torch.float64)
        G = U @ torch.diag(values * noise) @ V.T
        M = 0.9 * M + 0.1 * G
        W.grad = G.float()
        optimizer.step()
    state = optimizer.state[W]
    assert (state["factor_0"][0].diagonal() < 0).any()
    rotated = state["basis_0"][0].double() @ state["exp_avg"][0].double()
    kept = U.T @ rotated @ state["basis_1"][0].double().T @ V
    assert (kept.diagonal() / (U.T @ M @ V).diagonal() - 1).abs().max() < 0.2
