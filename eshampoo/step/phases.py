"""The paper's lines: what a step computes, on stacks of blocks.

    coefficients   the numbers of Algorithm 2 that depend on t
    observe_       G̃ = Q_LᵀGQ_R, and the factors see it
    direction_     momentum and scale see G̃; U, back in parameter space (Lemma 1)

What differs between methods is an argument: a cell of the table in `methods.py`. The cells of
EShampoo are here, those of Shampoo, CASPR and KL-Shampoo in `eigenvalues.py`, Muon's in `polar.py`.

Legend: G gradient, G̃ the gradient where the state lives, M̃ momentum, D scale, L, R factors, Λ̂ a
factor in its basis, Q basis, V change of basis, t step; all stacked on a leading N. `live` [N] is 1
for the blocks that take part in this step, and −0.0 for those that keep every bit of their state.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..math.linalg import (
    add_,
    average_,
    average_gram_,
    diagonal,
    means,
    per_block,
    rotate_,
)
from ..math.rounding import average_rounded_
from ..math.triangle import average_triangle_
from ..options import Options
from ..state.state import State

# How many entries a CPU thread works on at a time in element-wise work, to stay in its cache.
CHUNK = 1 << 16

# The least √D that counts as signal: this many machine epsilons times √E‖G‖², or with `rms` this
# share of the root mean square.
ROUNDING, SIGNAL = 64.0, 1e-3


# -------------------------------------------------------------------- the lines


class Coefficients(NamedTuple):
    """The numbers of a step that depend on t, per block [N, 1]; computed once for many parts."""

    live: Tensor
    moving: Tensor  # `live`, but 0 while the method only observes
    share1: Tensor  # of G̃ in M̃
    share2: Tensor  # of GGᵀ in the factors
    share3: Tensor  # of G̃^{⊙2} in D
    bias1: Tensor  # 1 − β1^t
    gain: Tensor  # M̃ is divided by gain · D^p + shift,
    shift: Tensor  # which is (1−β1^t) ((D/(1−β3^t))^p + ε)
    bound: Tensor  # the most that the quotient may be, or ∞
    pace: Tensor  # −α

    def split(self, sizes: list[int]) -> "list[Coefficients]":
        """Split the coefficients of neighbouring parts."""
        if len(sizes) == 1:
            return [self]
        return [
            Coefficients(*views.unbind(0)) for views in torch.split(torch.stack(self), sizes, 1)
        ]


def coefficients(
    step: Tensor,  # [N]
    live: Tensor,  # [N]
    o: Options,
    moves: Callable[[Tensor, Tensor], Tensor],
    epsilon: Callable[[Tensor, Tensor], Tensor],
    averaged: bool,  # D is an average with β3, and not read from the factors
    p: float,
    age: Tensor,  # [N]: gradients that the statistics have seen; `step` itself if all
) -> Coefficients:
    """The numbers of Algorithm 2 that depend on t, from `step` and `live` [N]."""
    (beta1, beta2), beta3 = o.betas, o.beta_scale
    moving = moves(live, step).unsqueeze(1)
    t, live = step.clamp_min(1.0).unsqueeze(1), live.unsqueeze(1)
    beta = beta3 if averaged else beta2
    bias1, bias3 = momentum_bias(t, o), bias(beta, t)
    bound = adam_bound(t, o, beta, bias1, bias3) if o.bounded else t * math.inf
    if age is not step:
        bias3 = bias(beta, age.clamp_min(1.0).unsqueeze(1))
    gain = bias1 / power(bias3, p)
    return Coefficients(
        live,
        moving,
        share(beta1, moving),
        share(beta2, live),
        share(beta3, moving),
        bias1,
        gain,
        epsilon(gain, bias1) * o.least_eps,
        bound,
        (moving.abs() * -o.rate).to(live.dtype),
    )


# Two cells of a row: what each factor sees and with which share, and how the scale divides.
Statistic = Callable[[State, Tensor, Coefficients, Options], list[tuple[Tensor, Tensor]]]
Divide = Callable[[State, Tensor, Coefficients, Options, float], Tensor]


def observe_(s: State, G: Tensor, c: Coefficients, o: Options, statistic: Statistic | None) -> None:
    """G ← G̃ = Q_LᵀGQ_R (or G), and L ← β2 L + (1−β2) GGᵀ with it (Eq. ema-shampoo-practical).

    Without a statistic the factors do not see G̃.
    """
    rotate_(G, *s.inward)
    if statistic is None:
        return
    seen = statistic(s, G, c, o)
    for (mode, factor), (X, share2) in zip(s.factors.items(), seen, strict=True):
        average = average_gram_ if factor.dim() == 3 else average_triangle_
        average(factor, X, mode, o.betas[1], share2)
    if s.full is not None:
        average_gram_(s.full, G.flatten(1), 0, o.betas[1], c.share2.unsqueeze(2))


def see_(s: State, G: Tensor, c: Coefficients, o: Options) -> None:
    """D ← β3 D + (1−β3) G̃^{⊙2}, in a call that divides nothing by D."""
    D = s.own_moment
    if D is not None:
        average_(D, means(G.square(), D), o.beta_scale, per_block(c.share3, D))


def begin_(s: State, live: Tensor) -> None:
    """At a block's first observation, forget the statistics that it has from its steps."""
    assert s.observations is not None
    lasts = 1.0 - live.squeeze(1) * (s.observations == 1)
    for X in (s.own_moment, s.full, *s.factors.values()):
        if X is not None:
            X.mul_(per_block(lasts, X))


def direction_(
    s: State, G: Tensor, c: Coefficients, o: Options, divide_: Divide, p: float
) -> Tensor:
    """U = Q_L ( D^{-p} ⊙ M̃ ) Q_Rᵀ (Lemma 1), once momentum and scale have seen G̃."""
    return rotate_(divide_(s, G, c, o, p), *s.outward)


# -------------------------------------------------------------------- averages over time


def share(beta: float, live: Tensor) -> Tensor:
    """The weight of a new value in an average: 1 − β, or 1 in a sum (β = 1); 0 where not live."""
    return live * (1.0 - beta if beta < 1 else 1.0)


def bias(beta: float, t: Tensor) -> Tensor:
    """1 − β^t for t ≥ 1, accurate in float32 also for β near 1; 1 for a sum."""
    if beta in (0.0, 1.0):
        return torch.ones_like(t)
    return (t * math.log(beta)).expm1_().neg_()


def momentum_bias(t: Tensor, o: Options) -> Tensor:
    """1 − β1^t, one step ahead with nesterov."""
    return bias(o.betas[0], t + 1 if o.ahead else t)


def average_momentum_(s: State, G: Tensor, share1: Tensor) -> Tensor:
    """M ← β1 M + (1−β1) G, returned as it is before rounding."""
    M = average_rounded_(s.exp_avg.flatten(1), G.flatten(1), share1, s.step)
    return M.view_as(G)


def look_ahead(M: Tensor, G: Tensor, o: Options) -> Tensor:
    """M̃, or with nesterov β1 M̃ + (1−β1) G̃."""
    return torch.lerp(G, M, o.betas[0]) if o.ahead else M


def power(X: Tensor, p: float) -> Tensor:
    """X^p, and √X for p = 1/2."""
    return X.sqrt() if p == 0.5 else X**p


# -------------------------------------------------------------------- cells: p, first step, ε


def as_asked(o: Options) -> float:
    """p from the param group."""
    return o.exponent


def one_half(o: Options) -> float:
    """p = 1/2, whatever the param group says: Adam."""
    return 0.5


def always(live: Tensor, step: Tensor) -> Tensor:
    """Every gradient moves its block."""
    return live


def after_the_first(live: Tensor, step: Tensor) -> Tensor:
    """The first gradient, at t = 0, only builds the basis (SOAP)."""
    return live * (step >= 1)


def beside_corrected(gain: Tensor, bias1: Tensor) -> Tensor:
    """ε is added to √(D/(1−β3^t)), as in Adam."""
    return bias1


def beside_uncorrected(gain: Tensor, bias1: Tensor) -> Tensor:
    """ε is added to √D, and the bias corrections scale the step (SOAP)."""
    return gain


# -------------------------------------------------------------------- cells: statistic and scale


def gram(s: State, G: Tensor, c: Coefficients, o: Options) -> list[tuple[Tensor, Tensor]]:
    """L averages GGᵀ: what each factor sees, and with which share."""
    return [(G, c.share2.unsqueeze(2))] * len(s.factors)


def second_moment(o: Options) -> tuple[str, ...]:
    """D, an average of G̃^{⊙2}, or the full matrix that D is the diagonal of (Alg. 1)."""
    own = "full_matrix" if o.correction == "optimal" else "exp_avg_sq"
    return (own, "graft_sq") if o.graft_moment else (own,)


def one_moment(o: Options) -> tuple[str, ...]:
    """D, an average of G^{⊙2}."""
    return ("exp_avg_sq",)


def adam_(s: State, G: Tensor, c: Coefficients, o: Options, p: float) -> Tensor:
    """Adam without a basis: D^{-p} ⊙ M with D an average of G^{⊙2}."""
    assert s.exp_avg_sq is not None
    return divide_by_moment_(s, s.exp_avg_sq, G, c, o, p)


def eigenvalue_corrected_(s: State, G: Tensor, c: Coefficients, o: Options, p: float) -> Tensor:
    """D^{-p} ⊙ M̃ with D an average of G̃^{⊙2} (Alg. 2 l.11–14), or D* = diag(QᵀAQ) (Alg. 1)."""
    D, averaged = s.exp_avg_sq, s.exp_avg_sq is not None
    if D is None:
        values = s.diagonals[0] if s.full is None else diagonal(s.full)
        D = values.clamp_min(0.0).reshape(s.exp_avg.shape)
    least = floor(s, o, o.beta_scale if averaged else o.betas[1])
    if o.moment != "entry":  # D has one number for many entries
        average_(D, means(G.square(), D), o.beta_scale, per_block(c.share3, D))
        D, averaged = D.expand_as(G), False
    if least is not None and p != 0.5:
        least = least ** (2 * p)
    return divide_by_moment_(s, D, G, c, o, p, averaged, least, o.bounded)


def divide_by_moment_(
    s: State,
    D: Tensor,
    G: Tensor,
    c: Coefficients,
    o: Options,
    p: float,
    averaged: bool = True,
    least: Tensor | None = None,  # [N, 1]: the least that D^p counts as
    bounded: bool = False,  # whether the quotient is clipped at its bound
) -> Tensor:
    """Adam's lines, in place of G̃:

    M̃ ← β1 M̃ + (1−β1) G̃,   D ← β3 D + (1−β3) G̃^{⊙2},   G̃ ← M̃/(1−β1^t) ⊘ ((D/(1−β3^t))^p + ε)

    With ε beside the uncorrected √D it is  M̃/(1−β1^t) · √(1−β3^t) ⊘ (√D + ε).
    """
    beta3, start = o.beta_scale, 0
    for M_c, D_c, G_c in chunks(s.exp_avg, D, G):
        if M_c.dtype == G_c.dtype:
            M_c.lerp_(G_c, c.share1)
        else:
            M_c = average_rounded_(M_c, G_c, c.share1, s.step, start)
            start += M_c.shape[1]
        root = G_c.square()
        if averaged:
            D_c.lerp_(root, c.share3) if beta3 < 1 else add_(D_c, root, c.share3)
        torch.sqrt(D_c, out=root) if p == 0.5 else torch.pow(D_c, p, out=root)
        if least is not None:
            torch.maximum(root, least, out=root)
        torch.addcmul(c.shift, c.gain, root, out=root)
        torch.div(look_ahead(M_c, G_c, o), root, out=G_c)
        if bounded:
            # Like clamp, which takes three times as long with bounds that are broadcast.
            torch.minimum(torch.maximum(G_c, -c.bound, out=G_c), c.bound, out=G_c)
    return G


def chunks(*stacks: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same entries of several stacks, a few at a time, as views [N, c]."""
    flat = [stack.flatten(1) for stack in stacks]
    N, size = flat[0].shape
    width = max(1, CHUNK * torch.get_num_threads() // N)
    if flat[0].device.type != "cpu" or size <= width:
        yield tuple(flat)
        return
    for start in range(0, size, width):
        yield tuple(stack[:, start : start + width] for stack in flat)


def floor(s: State, o: Options, beta: float) -> Tensor | None:
    """The least √D [N, 1] that counts as signal, for a D that averages squares with this β.

    None without a basis, 0 while Q = I.

    Rotations leave an error of about u‖G‖ in every entry. Where there was nothing else (in the null
    space of a factor), Adam would divide the error by itself and take a full-size step. Values over
    64 u √E‖G‖² are not rounding. An update of fixed size amplifies small entries, so with `rms` the
    least is a thousandth of the root mean square √(E‖G‖²/∏d). A lean basis leaves a larger error.
    """
    beta2 = o.betas[1]
    share = ROUNDING * torch.finfo(s.step.dtype).eps
    if o.rms is not None:
        share = SIGNAL / math.sqrt(math.prod(s.exp_avg.shape[1:]))
    share = max(share, s.leak)

    def total(beta: float, t: Tensor) -> Tensor:
        """The total weight of all values in an average: 1 − β^t, or t in a sum."""
        return t if beta == 1 else bias(beta, t)

    for values in s.diagonals.values():
        # ‖G‖² in the average of the factor, where only rounding is negative, …
        energy: Tensor = torch.linalg.vector_norm(values, 1, dim=1, keepdim=True)
        if beta != beta2:  # … and in that of D
            t = s.age.clamp_min(1.0).unsqueeze(1)
            energy = energy * total(beta, t) / total(beta2, t)
        return energy.mul_(share**2).sqrt_().mul_(s.turned.unsqueeze(1))
    return None


def adam_bound(t: Tensor, o: Options, beta3: float, bias1: Tensor, bias3: Tensor) -> Tensor:
    """c_t, the largest |m̂|/√v̂ that any gradients can reach while the basis stands still.

    With the shares a_k, b_k of the two averages, |Σ a_k g_k| ≤ √(Σ a_k²/b_k) √(Σ b_k g_k²).
    """
    beta1 = o.betas[0]
    if beta3 == 0:
        return torch.full_like(t, math.inf)  # √v̂ is the last gradient alone
    ratio = beta1**2 / beta3
    total = t if ratio == 1 else (1 - ratio**t) / (1 - ratio)  # Σ_{k<t} a_k²/b_k · (1−β3)/(1−β1)²
    if o.nesterov:
        total = beta1**2 * total + 1 + 2 * beta1
    unit = (1 - beta1) ** 2 / (1 - beta3 if beta3 < 1 else 1.0)
    return (unit * total * bias3).sqrt() / bias1
