"""The verbs of a step, on stacks of blocks.

    admit_       which blocks take part; their step counts
    weigh        what this step's values weigh in the averages
    observe_     G̃ = Q_LᵀGQ_R, and the factors see it
    refresh      (the engine: criteria, and new bases where they are due: `change_basis_`)
    direction    momentum and scale see G̃; U, back in parameter space

Legend: G gradient, G̃ the gradient in the eigenbasis, M̃ momentum, D scale, L, R factors, Λ̂ a factor
in its basis, Q basis, V change of basis, t step; all stacked on a leading N. `live` [N] is 1 for
the blocks that take part in this step and 0 for the others, which keep every bit of their state.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from . import linalg
from .bucket import Stacks
from .linalg import Change
from .methods import Method
from .options import Options

GRAM_ROWS, GRAM_COLUMNS = 384, 256
"""XXᵀ of an X of this size is computed in its lower block triangle only: 30 % faster."""

CHUNK = 1 << 16
"""Entries that a thread does element-wise work on at a time on a CPU, to stay in its cache."""


BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
"""Whole numbers as wide as those of the state."""

SETTLE_EVERY = 64
"""Steps between two looks for averages that are about to become denormal numbers."""


def per_block(weights: Tensor, like: Tensor) -> Tensor:
    """Shape [N] or [N, 1] as [N, 1, …, 1]."""
    return weights.view(-1, *[1] * (like.dim() - 1))


def diagonal(A: Tensor) -> Tensor:
    """diag A [N, d], a view."""
    return A.diagonal(dim1=1, dim2=2)


def share(beta: float, live: Tensor) -> Tensor:
    """What a new value weighs in an average: 1 − β, or 1 in a sum (β = 1); 0 where not live."""
    return live * (1.0 - beta if beta < 1 else 1.0)


def average_(average: Tensor, value: Tensor, beta: float, weight: Tensor) -> None:
    """X ← βX + (1−β)·value, or X + value for β = 1 (AdaGrad's sum), with the weight of `share`."""
    if beta < 1:
        average.lerp_(value, weight)
    else:
        average.addcmul_(value, weight)


def average_gram_(factor: Tensor, X: Tensor, beta: float, weight: Tensor) -> None:
    """L ← βL + (1−β) XXᵀ for X [N, d, r], the lower part in block rows, the rest mirrored."""
    N, d, r = X.shape
    if d < GRAM_ROWS or r < GRAM_COLUMNS:
        average_(factor, torch.bmm(X, X.transpose(1, 2)), beta, weight)
        return
    height = -(-d // 4)
    for start in range(0, d, height):
        rows = slice(start, min(start + height, d))
        product = torch.bmm(X[:, rows], X[:, : rows.stop].transpose(1, 2))
        average_(factor[:, rows, : rows.stop], product, beta, weight)
        if start == 0:  # nothing to the left of the diagonal block
            continue
        # Mirrored by way of memory in which the entries of a column do not lie a power of two
        # apart, where they would throw each other out of the cache.
        strip = product.new_empty(N, product.shape[1], start + 16)[:, :, :start]
        strip.copy_(factor[:, rows, :start])
        factor[:, :start, rows] = strip.transpose(1, 2)


def bias(beta: float, t: Tensor) -> Tensor:
    """1 − β^t for t ≥ 1, accurate in float32 also for β near 1; 1 for a sum."""
    if beta in (0.0, 1.0):
        return torch.ones_like(t)
    return -torch.expm1(t * math.log(beta))


def admit_(
    step: Tensor,  # [N]
    skipped: Tensor,  # [N]
    grads: Sequence[Tensor],  # stacks of N blocks in all
    present: Tensor | None,  # [N]: which of them have a gradient; None: all
    o: Options,
) -> Tensor:
    """Zero the gradients that are not finite, count the step of the others: `live` [N].

    A gradient whose squares overflow is not finite either; one whose squares vanish is zero, so
    that it leaves no denormal numbers, which processors are slow with. The host reads nothing.
    """
    live = torch.ones_like(step) if present is None else present.to(step.dtype)
    if o.nonfinite == "skip":
        norms = [torch.linalg.vector_norm(G.flatten(1), dim=1) for G in grads]
        norm = torch.cat(norms) if len(norms) > 1 else norms[0]
        finite = norm < math.inf  # NaN is not
        some = norm > math.sqrt(torch.finfo(norm.dtype).tiny)
        # Of the bits, because 0 · NaN is NaN; masked_fill_ takes five times as long.
        bits = BITS[norm.dtype]
        keep = (finite & some).to(bits).split([len(G) for G in grads])
        for G, kept in zip(grads, keep, strict=True):
            G.view(bits).mul_(per_block(kept, G))
        skipped.add_(live > finite)
        live.mul_(finite)
    step.add_(live)
    return live


class Weights(NamedTuple):
    """What things weigh at this step, per block [N, 1]; computed once for many parts."""

    live: Tensor
    moving: Tensor  # `live`, but a delayed method only observes its first gradient
    share1: Tensor  # of G̃ in M̃
    share2: Tensor  # of GGᵀ in the factors
    share3: Tensor  # of G̃^{⊙2} in D
    bias1: Tensor  # 1 − β1^t
    gain: Tensor  # M̃ is divided by gain · √D + shift,
    shift: Tensor  # which is (1−β1^t) (√D/√(1−β3^t) + ε)
    pace: Tensor  # −α

    def split(self, sizes: list[int]) -> "list[Weights]":
        """Those of so many blocks each."""
        if len(sizes) == 1:
            return [self]
        return [Weights(*part.unbind(0)) for part in torch.split(torch.stack(self), sizes, 1)]


def weigh(step: Tensor, live: Tensor, o: Options, method: Method, optimal: bool) -> Weights:
    """The numbers of Algorithm 2 that depend on t, from `step` and `live` [N]."""
    t, live = step.clamp_min(1.0).unsqueeze(1), live.unsqueeze(1)
    moving = live * (step >= 1).unsqueeze(1) if method.delayed else live
    bias1 = momentum_bias(t, o)
    gain = bias1 / bias(beta_of_scale(o, optimal), t).sqrt()
    return Weights(
        live,
        moving,
        share(o.betas[0], moving),
        share(o.betas[1], live),
        share(o.beta_scale, moving),
        bias1,
        gain,
        (gain if method.bias_in_step else bias1) * max(o.eps, 1e-30),
        (moving * -o.lr).to(live.dtype),
    )


def beta_of_scale(o: Options, optimal: bool) -> float:
    """The averaging constant of D; that of the factors if D = diag(QᵀAQ)."""
    return o.betas[1] if optimal else o.beta_scale


def settle_(s: Stacks, live: Tensor) -> None:
    """Zero averages that are on their way down to denormal numbers: their gradients have stopped.

    What stays needs 150 further steps to become denormal at β1 = 0.9, more than `SETTLE_EVERY`.
    """
    for X in (s.exp_avg, s.exp_avg_sq, s.full, *s.factors.values()):
        if X is not None:
            least = per_block(live, X) * (2**24 * torch.finfo(X.dtype).tiny)
            X.masked_fill_(X.abs() < least, 0.0)


def observe_(s: Stacks, G: Tensor, w: Weights, o: Options, method: Method) -> None:
    """G ← G̃ = Q_LᵀGQ_R (or G), and L ← β2 L + (1−β2) GGᵀ in it (Eq. ema-shampoo-practical)."""
    if not s.factors:
        return
    beta2 = o.betas[1]
    weight = w.share2.unsqueeze(2)
    if method.rotated:
        linalg.rotate_(G, s.bases, s.transposed)
    if method.whitened:
        # λ from before this gradient; before the first, the identity.
        previous = s.step - w.live.squeeze(1)
        first = per_block(previous < 1, G)
        roots = {i: torch.where(first, 1.0, x) for i, x in whitening(s, previous, o).items()}
    for i, factor in s.factors.items():
        X, seen = G, weight
        if method.whitened:
            # KL-Shampoo: L ← β2 L + (1−β2)/n · G R⁻¹ Gᵀ
            for j in roots.keys() - {i}:
                X = X * roots[j]
            X = X / math.sqrt(math.prod(G.shape[1:]) / G.shape[i + 1])
            # R⁻¹ reaches 1/ε, so squares can overflow; L then stands still.
            finite = torch.isfinite(torch.linalg.vector_norm(X.flatten(1), dim=1))
            X, seen = X.masked_fill(per_block(~finite, X), 0.0), weight * finite.view(-1, 1, 1)
        average_gram_(factor, linalg.unfold(X, i), beta2, seen)
    if s.full is not None:
        g = G.flatten(1)
        average_(s.full, g.unsqueeze(2) * g.unsqueeze(1), beta2, weight)


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


def direction(s: Stacks, G: Tensor, w: Weights, o: Options, method: Method) -> Tensor:
    """Momentum and scale see G̃, and give U = Q_L ( D^{-p} ⊙ M̃ ) Q_Rᵀ (Lemma 1); G̃ is used up."""
    if method.second_moment:
        return linalg.rotate_(adam_(s, G, w, o), s.transposed, s.bases)
    average_(s.exp_avg, G, o.betas[0], per_block(w.share1, G))
    M = look_ahead(s.exp_avg, G, o)
    U = M / per_block(w.bias1, M)
    if method.rotated:
        for roots in whitening(s, s.step, o).values():
            U = U * roots
        return linalg.rotate_(U, s.transposed, s.bases)
    return linalg.rotate_(U, s.roots, s.roots)  # which are symmetric


def adam_(s: Stacks, G: Tensor, w: Weights, o: Options) -> Tensor:
    """Adam in the eigenbasis (Alg. 2 l.11–14), in place of G̃:

    M̃ ← β1 M̃ + (1−β1) G̃,   D ← β3 D + (1−β3) G̃^{⊙2},   G̃ ← M̃/(1−β1^t) ⊘ (√(D/(1−β3^t)) + ε)

    With bias_in_step it is  M̃/(1−β1^t) · √(1−β3^t) ⊘ (√D + ε).
    """
    D = scale(s)
    optimal = s.exp_avg_sq is None
    least = rounding(s, beta_of_scale(o, optimal), o)
    bounded = o.correction == "bounded" and s.factors  # without a basis nothing changes hands
    limit = adam_bound(s.step.clamp_min(1.0).unsqueeze(1), o) if bounded else None
    for M_c, D_c, G_c in chunks(s.exp_avg, D, G):
        average_(M_c, G_c, o.betas[0], w.share1)
        root = G_c.square()
        if not optimal:
            average_(D_c, root, o.beta_scale, w.share3)
        torch.sqrt(D_c, out=root)
        if least is not None:
            torch.maximum(root, least, out=root)
        torch.addcmul(w.shift, w.gain, root, out=root)
        torch.div(look_ahead(M_c, G_c, o), root, out=G_c)
        if limit is not None:
            torch.clamp(G_c, -limit, limit, out=G_c)
    return G


def adam_bound(t: Tensor, o: Options) -> Tensor:
    """c_t: no gradients bring |m̂|/√v̂ further than this, while the basis stands still.

    With the weights a_k, b_k of the two averages, |Σ a_k g_k| ≤ √(Σ a_k²/b_k) √(Σ b_k g_k²).
    """
    beta1, beta3 = o.betas[0], o.beta_scale
    if beta3 == 0:
        return torch.full_like(t, math.inf)  # √v̂ is the last gradient alone
    ratio = beta1**2 / beta3
    total = t if ratio == 1 else (1 - ratio**t) / (1 - ratio)  # Σ_{k<t} a_k²/b_k · (1−β3)/(1−β1)²
    if o.nesterov:
        total = beta1**2 * total + 1 + 2 * beta1
    weight = (1 - beta1) ** 2 / (1 - beta3 if beta3 < 1 else 1.0)
    return (weight * total * bias(beta3, t)).sqrt() / momentum_bias(t, o)


def rounding(s: Stacks, beta3: float, o: Options) -> Tensor | None:
    """The least √D [N, 1] that is more than the rounding of G̃: 64 u √E‖G‖²; None without a basis.

    Rotations leave an error of about u‖G‖ in every entry. Where nothing else ever was (the null
    space of a factor), Adam would divide the error by itself and take a full-size step.
    """
    for diagonal in s.diagonals.values():
        # ‖G‖² in the average of the factor, where only rounding is negative, …
        energy: Tensor = torch.linalg.vector_norm(diagonal, 1, dim=1, keepdim=True)
        if beta3 != o.betas[1]:  # … and in that of D
            t = s.step.clamp_min(1.0).unsqueeze(1)
            energy = energy * weights(beta3, t) / weights(o.betas[1], t)
        return energy.mul_((64 * torch.finfo(energy.dtype).eps) ** 2).sqrt_()
    return None


def weights(beta: float, t: Tensor) -> Tensor:
    """The sum of what the values of an average weigh: 1 − β^t, or t in a sum."""
    return t if beta == 1 else bias(beta, t)


def look_ahead(M: Tensor, G: Tensor, o: Options) -> Tensor:
    """M̃, or with nesterov β1 M̃ + (1−β1) G̃."""
    return torch.lerp(G, M, o.betas[0]) if o.nesterov else M


def momentum_bias(t: Tensor, o: Options) -> Tensor:
    """1 − β1^t, one step ahead with nesterov."""
    return bias(o.betas[0], t + 1 if o.nesterov else t)


def scale(s: Stacks) -> Tensor:
    """D, or the optimal D* = diag(QᵀAQ) (Alg. 1, Prop. 2)."""
    if s.exp_avg_sq is not None:
        return s.exp_avg_sq
    A = s.factors[0] if s.full is None else s.full
    return diagonal(A).clamp_min(0.0).reshape(s.exp_avg.shape)


def spectrum(
    diagonal: Tensor,  # [N, d]: diag Λ̂
    step: Tensor,  # [N]
    order: int,  # k, the number of factors
    o: Options,
) -> Tensor:
    """λ: diag Λ̂/(1−β2^t), trace-scaled if asked, negative rounding shifted away, plus ε."""
    eigenvalues = diagonal / bias(o.betas[1], step.clamp_min(1.0)).unsqueeze(1)
    if o.trace_scaling and order > 1:
        # S⁻¹ is shared out: Tr^{-(k-1)/k} for each of the k factors.
        trace = eigenvalues.sum(1, keepdim=True).clamp_min(torch.finfo(diagonal.dtype).tiny)
        eigenvalues = eigenvalues * trace ** (-(order - 1) / order)
    return eigenvalues - eigenvalues.amin(1, keepdim=True).clamp_max(0.0) + o.eps


def whitening(s: Stacks, step: Tensor, o: Options) -> dict[int, Tensor]:
    """λ^{-1/2} of every factor, shaped to scale its mode."""
    order = s.exp_avg.dim() - 1
    return {
        i: linalg.along(spectrum(diagonal, step, len(s.factors), o).rsqrt(), i, order)
        for i, diagonal in s.diagonals.items()
    }


def root(Q: Tensor, eigenvalues: Tensor, order: int, o: Options) -> Tensor:
    """L^{-1/(2k)} for "shampoo", L^{-1/2} for "shampoo2" (Eq. shampoo)."""
    powers = eigenvalues ** (-0.5 if o.variant == "shampoo2" else -0.5 / order)
    return torch.bmm(Q * powers.unsqueeze(1), Q.transpose(1, 2))


def graft_direction(s: Stacks, G: Tensor, w: Weights, o: Options) -> Tensor:
    """The update of the grafting method, from the same momentum as Shampoo's own."""
    M, bias1 = look_ahead(s.exp_avg, G, o), per_block(w.bias1, G)
    if s.exp_avg_sq is None:
        return M / bias1
    beta = 1.0 if o.graft == "adagrad" else o.betas[1]
    average_(s.exp_avg_sq, G.square(), beta, per_block(share(beta, w.moving), G))
    t = s.step.clamp_min(1.0)
    correction = bias(o.betas[1], t) if o.graft == "adam" else torch.ones_like(t)
    D = s.exp_avg_sq / per_block(correction, s.exp_avg_sq)
    return M / (bias1 * (D.sqrt() + o.eps))


def squared_norms(U: Tensor) -> Tensor:
    """‖U‖_F² per block."""
    return U.flatten(1).square().sum(1)


def seen_from_basis(s: Stacks, method: Method) -> Stacks:
    """The stacks with Λ̂ = QᵀLQ for factors: at hand if the state lives in the eigenbasis."""
    if method.rotated:
        return s
    turned = {i: torch.bmm(s.transposed[i], torch.bmm(s.factors[i], Q)) for i, Q in s.bases.items()}
    return replace(s, factors=turned)


def turn_(X: Tensor, mode: int, V: Tensor, subset: Tensor | None) -> None:
    """X ← X ×_i Vᵀ; V acts on the coordinates `subset` only, if given."""
    turned = linalg.mode_product(linalg.take(X, subset, mode), V, mode)
    linalg.put_(X, turned, subset, mode)


def change_basis_(s: Stacks, mode: int, change: Change, o: Options, method: Method) -> None:
    """Q ← QV; if the state lives in the eigenbasis, it moves along."""
    V, subset = change.V, change.subset
    turn_(s.bases[mode], 1, V, subset)
    if not method.rotated:
        return
    s.factors[mode].copy_(change.factor)
    turn_(s.exp_avg, mode, V, subset)
    if s.full is not None:
        order = s.exp_avg.dim() - 1
        A = s.full.view(-1, *s.exp_avg.shape[1:], *s.exp_avg.shape[1:])
        turn_(A, mode, V, subset)
        turn_(A, order + mode, V, subset)
    if s.exp_avg_sq is not None:
        if o.correction == "basis_aware":
            # D ← V^{⊙2}ᵀ D: exact if the full matrix was diagonal in the old basis.
            turn_(s.exp_avg_sq, mode, V.square(), subset)
        elif change.order is not None:
            s.exp_avg_sq.copy_(linalg.take(s.exp_avg_sq, change.order, mode))
