"""Cells of Shampoo, CASPR and KL-Shampoo, whose scale is made of the eigenvalues of the factors.

Legend: as in `phases.py`; λ are the eigenvalues of a factor, p is the exponent of the method.
"""

import math

import torch
from torch import Tensor

from ..math.linalg import along, per_block
from ..options import Options
from ..state.state import State
from .phases import ROUNDING, Coefficients, average_momentum_, bias, look_ahead, power

DAMPING = 0.01
"""What KL-Shampoo adds to every eigenvalue, as a share of their mean.

The first gradient in a direction without signal (a rare token) is divided by this share, fills the
other factor, and so shortens the steps in all other directions, by the root of the share.
"""

# -------------------------------------------------------------------- statistic


def whitened_gram(s: State, G: Tensor, c: Coefficients, o: Options) -> list[tuple[Tensor, Tensor]]:
    """KL-Shampoo: L averages G R⁻¹ Gᵀ/n, with the R before this gradient, at first R = s·I."""
    previous, start = s.age - c.live.squeeze(1), first_eigenvalue(s, G, c, o)
    powers = {}
    for i, values in s.diagonals.items():
        eigenvalues = damped_spectrum(values, previous, o)
        seen_before = eigenvalues.amax(1, keepdim=True) > 0
        eigenvalues = torch.where(seen_before, eigenvalues, start)
        powers[i] = along(eigenvalues.rsqrt(), i, G.dim() - 1)
    seen = []
    for i in s.factors:
        X = G
        for j in powers.keys() - {i}:
            X = X * powers[j]
        X = X / math.sqrt(math.prod(G.shape[1:]) / G.shape[i + 1])
        # R⁻¹ is as large as gradients were small, so squares can overflow; L then stands still.
        finite = torch.isfinite(torch.linalg.vector_norm(X.flatten(1), dim=1))
        X = X.masked_fill(per_block(~finite, X), 0.0)
        seen.append((X, c.share2.unsqueeze(2) * finite.view(-1, 1, 1)))
    return seen


def first_eigenvalue(s: State, G: Tensor, c: Coefficients, o: Options) -> Tensor:
    """s [N, 1] with s^k = E G²: of all D = s·I ⊗ … ⊗ s·I, the nearest to the first gradient.

    Any other start gives the first factors the wrong scale: from the identity, for k = 2, each
    factor has the scale of G², and so D has that of G⁴.
    """
    share = c.share2 / bias(o.betas[1], s.age.clamp_min(1.0)).unsqueeze(1)
    rms: Tensor = torch.linalg.vector_norm(G.flatten(1), dim=1, keepdim=True)
    rms = rms * (share / math.prod(G.shape[1:])).sqrt()
    return rms ** (2 / len(s.factors))


# -------------------------------------------------------------------- scale: what it keeps


def moment_of_graft(o: Options) -> tuple[str, ...]:
    """The second moment of the method that lends the norm, if that method has one."""
    return ("exp_avg_sq",) if o.graft_moment else ()


def moment_of_graft_beside(o: Options) -> tuple[str, ...]:
    """The same for a method that lives in the eigenbasis, where D would be `exp_avg_sq`."""
    return ("graft_sq",) if o.graft_moment else ()


def nothing(o: Options) -> tuple[str, ...]:
    """Nothing: D = λ_L ⊗ λ_R is in the factors."""
    return ()


# -------------------------------------------------------------------- scale: how it divides


def by_eigenvalues_(s: State, G: Tensor, c: Coefficients, o: Options, p: float) -> Tensor:
    """M̃ ⊘ (D^p + ε) with D = λ_L ⊗ λ_R, the eigenvalues of this step."""
    M = momentum_(s, G, c, o, p)
    root = torch.ones_like(per_block(s.step, M))
    for i, values in s.diagonals.items():
        eigenvalues = damped_spectrum(values, s.age, o)
        root = root * along(power(eigenvalues, p), i, M.dim() - 1)
    return M / (root + o.least_eps)


def by_sum_of_sides_(s: State, G: Tensor, c: Coefficients, o: Options, p: float) -> Tensor:
    """CASPR: D^{-p} ⊙ M̃ with D^{-p} = (Σ_i λ_i^{-p/k} / k)^k, and λ of this step.

    For a matrix this is (L^{-1/2}M + 2 L^{-1/4}MR^{-1/4} + MR^{-1/2})/4 in the basis. In a sum, no
    side compensates for another, so √λ counts as at least 64 u √Tr L once a basis has turned:
    anything smaller is rounding, as in `floor`.
    """
    M, k = momentum_(s, G, c, o, p), len(s.factors)
    total = torch.zeros_like(per_block(s.step, M))
    rounding = (ROUNDING * torch.finfo(M.dtype).eps) ** 2 * s.turned.unsqueeze(1)
    for i, values in s.diagonals.items():
        eigenvalues = spectrum(values, s.age, k, o, s.leak)
        least = (eigenvalues * rounding).sum(1, keepdim=True)
        sides = inverse_power(torch.maximum(eigenvalues, least), p / k)
        total = total + along(sides, i, M.dim() - 1)
    return M * (total / k) ** k


def momentum_(s: State, G: Tensor, c: Coefficients, o: Options, p: float) -> Tensor:
    """M/(1−β1^t): D^{-p} with D = λ_L ⊗ λ_R is in the cached roots."""
    M = look_ahead(average_momentum_(s, G, c.share1), G, o)
    return M / per_block(c.bias1, M)


# -------------------------------------------------------------------- eigenvalues


def spectrum(
    values: Tensor,  # [N, d]: diag Λ̂
    age: Tensor,  # [N]
    k: int,  # number of factors
    o: Options,
    leak: float,  # of a lean basis
) -> Tensor:
    """λ of Shampoo: diag Λ̂/(1−β2^t), with or without S⁻¹, shifted to be at least 0, plus ε."""
    eigenvalues = values / bias(o.betas[1], age.clamp_min(1.0)).unsqueeze(1)
    if leak > 0:  # as for √D of EShampoo: what may be mere leakage is not divided by its own size
        eigenvalues = eigenvalues.maximum(leak**2 * eigenvalues.sum(1, keepdim=True))
    if o.trace_scaling and k > 1:
        # S⁻¹ is shared out: Tr^{-(k-1)/k} for each of the k factors.
        trace = eigenvalues.sum(1, keepdim=True).clamp_min(torch.finfo(values.dtype).tiny)
        eigenvalues = eigenvalues * trace ** (-(k - 1) / k)
    return eigenvalues - eigenvalues.amin(1, keepdim=True).clamp_max(0.0) + o.eps


def damped_spectrum(values: Tensor, age: Tensor, o: Options) -> Tensor:
    """λ of KL-Shampoo: diag Λ̂/(1−β2^t), negative rounding set to 0, plus a share of their mean."""
    eigenvalues = values.clamp_min(0.0) / bias(o.betas[1], age.clamp_min(1.0)).unsqueeze(1)
    return eigenvalues + DAMPING * eigenvalues.mean(1, keepdim=True)


def inverse_power(eigenvalues: Tensor, q: float) -> Tensor:
    """λ^{-q}, and 0 where λ vanishes, as it can if ε = 0: a pseudo-inverse."""
    vanishes = eigenvalues < torch.finfo(eigenvalues.dtype).tiny
    return (eigenvalues**-q).masked_fill_(vanishes, 0.0)


def inverse_root(Q: Tensor, eigenvalues: Tensor, k: int, o: Options, p: float) -> Tensor:
    """L^{-p/k} for "shampoo", L^{-p} for "shampoo2" (Eq. shampoo)."""
    powers = inverse_power(eigenvalues, p if o.variant == "shampoo2" else p / k)
    return torch.bmm(Q * powers.unsqueeze(1), Q.transpose(1, 2))
