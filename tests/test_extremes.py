"""Gradients that are zero, of low rank, constant, tiny, huge or denormal: finite, bounded steps.

The bound is Adam's own. Its two averages m = Σ aₖ gₖ and v = Σ bₖ gₖ² have fixed weights, so by
Cauchy–Schwarz |m| ≤ √(Σ aₖ²/bₖ) √v whatever the gradients are; with the bias corrections this is
`most(t)` below: 1 at the first step, 7.3 at last for β = (0.9, 0.999).
"""

import math

import pytest
import torch
from cases import METHODS, parameters

from eshampoo import EShampoo, linalg

STEPS = 40
SHAPE = (6, 5)
BETAS = (0.9, 0.999)
INF = float("inf")


def most(t):
    """The largest |m̂|/√v̂ that Adam can reach at step t."""
    beta1, beta2 = BETAS
    total = sum((beta1**2 / beta2) ** k for k in range(t))
    corrections = math.sqrt(1 - beta2**t) / (1 - beta1**t)
    return corrections * (1 - beta1) / math.sqrt(1 - beta2) * math.sqrt(total)


def gradients(kind):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    one, u, v = draw(*SHAPE), draw(SHAPE[0], 1), draw(1, SHAPE[1])
    many = [draw(*SHAPE) for _ in range(STEPS)]
    zero = torch.zeros(SHAPE)
    return {
        "zero from the start": [zero] * STEPS,
        "rank 1 for ever": [u * v * draw(1) for _ in range(STEPS)],
        "constant": [one] * STEPS,
        "constant, then zero": [one] * 10 + [zero] * (STEPS - 10),
        "1e-30": [1e-30 * G for G in many],
        "1e+30": [1e30 * G for G in many],
        "denormal": [1e-40 * G for G in many],
        "1e-30 in places": [torch.where(G > 0, G, 1e-30) for G in many],
        "varying rank 1": [draw(SHAPE[0], 1) * draw(1, SHAPE[1]) for _ in range(STEPS)],
        "1e+10": [1e10 * G for G in many],
        "1e-5": [1e-5 * G for G in many],
        "random": many,
    }[kind]


NAMED = ["zero from the start", "rank 1 for ever", "constant", "constant, then zero", "1e-30", "1e+30",
         "denormal"]  # fmt: skip


def steps(method, kind, **options):
    """(t, update / lr, in the eigenbasis if there is one) of every step of a 6×5 matrix."""
    (W,) = parameters([torch.zeros(SHAPE)])
    optimizer = METHODS[method]([W], lr=1.0, betas=BETAS, weight_decay=0.0, **options)
    for t, G in enumerate(gradients(kind), start=1):
        before = W.detach().clone()
        W.grad = G.clone()
        optimizer.step()
        state = optimizer.state[W]
        assert all(bool(value.isfinite().all()) for value in state.values()), t
        U = (W.detach() - before).view(state["exp_avg"].shape)
        bases = {k: state[f"basis_{k}"] for k in range(U.dim() - 1)}
        yield t, U, linalg.rotate(U, bases)


@pytest.mark.filterwarnings("ignore:.*had NaN or Inf")  # 1e+30: the squares overflow
@pytest.mark.parametrize("frequency", [1, 3])
@pytest.mark.parametrize("kind", NAMED)
@pytest.mark.parametrize("method", ["EShampoo", "SOAP", "FullMatrixAdam"])
def test_no_coordinate_of_the_eigenbasis_moves_further_than_in_adam(method, kind, frequency):
    options = {} if method == "FullMatrixAdam" else {"merge_dims": False}
    for t, _, rotated in steps(method, kind, frequency=frequency, tau=0.0, **options):
        assert rotated.abs().max() <= most(t) * 1.01, t
