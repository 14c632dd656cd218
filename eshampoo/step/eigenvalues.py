"""Cells of Shampoo and KL-Shampoo, whose scale is made of the eigenvalues of the factors.

Legend: as in `phases.py`; λ are the eigenvalues of a factor, p is the exponent of the method.
"""

import math

import torch
from torch import Tensor

from ..math.linalg import along, average_, per_block
from ..options import Options
from ..state.state import State
from .phases import Coefficients, bias, look_ahead

# -------------------------------------------------------------------- statistic


def whitened_gram(s: State, G: Tensor, c: Coefficients, o: Options) -> list[tuple[Tensor, Tensor]]:
    """KL-Shampoo: L averages G R⁻¹ Gᵀ/n, with R from before this gradient."""
    previous = s.step - c.live.squeeze(1)
    first = per_block(previous < 1, G)  # before the first gradient, R is the identity
    powers = {
        i: torch.where(first, 1.0, x) for i, x in eigenvalue_powers(s, previous, o, 0.5).items()
    }
    seen = []
    for i in s.factors:
        X = G
        for j in powers.keys() - {i}:
            X = X * powers[j]
        X = X / math.sqrt(math.prod(G.shape[1:]) / G.shape[i + 1])
        # R⁻¹ reaches 1/ε, so squares can overflow; L then stands still.
        finite = torch.isfinite(torch.linalg.vector_norm(X.flatten(1), dim=1))
        X = X.masked_fill(per_block(~finite, X), 0.0)
        seen.append((X, c.share2.unsqueeze(2) * finite.view(-1, 1, 1)))
    return seen


# -------------------------------------------------------------------- scale: what it keeps


def moment_of_graft(o: Options) -> tuple[str, ...]:
    """The second moment of the method that lends the norm, if that method has one."""
    return ("exp_avg_sq",) if o.graft_moment else ()


def nothing(o: Options) -> tuple[str, ...]:
    """D = λ_L ⊗ λ_R is in the factors."""
    return ()


# -------------------------------------------------------------------- scale: how it divides


def by_eigenvalues_(s: State, G: Tensor, c: Coefficients, o: Options, p: float) -> Tensor:
    """D^{-p} ⊙ M̃ with D = λ_L ⊗ λ_R, the eigenvalues of this step."""
    U = momentum_(s, G, c, o, p)
    for powers in eigenvalue_powers(s, s.step, o, p).values():
        U = U * powers
    return U


def momentum_(s: State, G: Tensor, c: Coefficients, o: Options, p: float) -> Tensor:
    """M/(1−β1^t): D^{-p} with D = λ_L ⊗ λ_R is in the cached roots."""
    average_(s.exp_avg, G, o.betas[0], per_block(c.share1, G))
    M = look_ahead(s.exp_avg, G, o)
    return M / per_block(c.bias1, M)


# -------------------------------------------------------------------- eigenvalues


def spectrum(
    values: Tensor,  # [N, d]: diag Λ̂
    step: Tensor,  # [N]
    k: int,  # number of factors
    o: Options,
) -> Tensor:
    """λ: diag Λ̂/(1−β2^t), trace-scaled if asked, negative rounding shifted away, plus ε."""
    eigenvalues = values / bias(o.betas[1], step.clamp_min(1.0)).unsqueeze(1)
    if o.trace_scaling and k > 1:
        # S⁻¹ is shared out: Tr^{-(k-1)/k} for each of the k factors.
        trace = eigenvalues.sum(1, keepdim=True).clamp_min(torch.finfo(values.dtype).tiny)
        eigenvalues = eigenvalues * trace ** (-(k - 1) / k)
    return eigenvalues - eigenvalues.amin(1, keepdim=True).clamp_max(0.0) + o.eps


def eigenvalue_powers(s: State, step: Tensor, o: Options, p: float) -> dict[int, Tensor]:
    """λ^{-p} of every factor, shaped to scale its mode."""
    powers = {}
    for i, values in s.diagonals.items():
        eigenvalues = spectrum(values, step, len(s.factors), o)
        power = eigenvalues.rsqrt() if p == 0.5 else eigenvalues**-p
        powers[i] = along(power, i, s.exp_avg.dim() - 1)
    return powers


def inverse_root(Q: Tensor, eigenvalues: Tensor, k: int, o: Options, p: float) -> Tensor:
    """L^{-p/k} for "shampoo", L^{-p} for "shampoo2" (Eq. shampoo)."""
    powers = eigenvalues ** -(p if o.variant == "shampoo2" else p / k)
    return torch.bmm(Q * powers.unsqueeze(1), Q.transpose(1, 2))
