"""The verbs of a step, on stacks of blocks.

    admit_       which blocks take part; their step counts
    observe_     G̃ = Q_LᵀGQ_R, and the factors see it
    refresh      (the engine: criteria, and new bases where they are due: `change_basis_`)
    direction    momentum and scale see G̃; U, back in parameter space

Legend: G gradient, G̃ the gradient in the eigenbasis, M̃ momentum, D scale, L, R factors, Λ̂ a factor
in its basis, Q basis, V change of basis, t step; all stacked on a leading N. `live` [N] marks the
blocks that take part in this step: the others keep every bit of their state.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from . import linalg
from .bucket import Stacks
from .linalg import Change
from .methods import Method
from .options import Options

GRAM_WHOLE = 384
"""From this size on only the lower block triangle of a Gram matrix is computed: 30 % faster."""

CHUNK = 1 << 16
"""Entries that element-wise work is done on at a time on a CPU, so that they stay in its cache."""


SETTLE_EVERY = 64
"""Steps between two looks for averages that are about to become denormal numbers."""


def per_block(weights: Tensor, like: Tensor) -> Tensor:
    """Shape [N] as [N, 1, …, 1]."""
    return weights.view(-1, *[1] * (like.dim() - 1))


def diagonal(A: Tensor) -> Tensor:
    """diag A [N, d], a view."""
    return A.diagonal(dim1=1, dim2=2)


def share(beta: float, live: Tensor, like: Tensor) -> Tensor:
    """What a new value weighs, per block: 1 − β, or 1 in a sum (β = 1); 0 where not live."""
    return live.to(like.dtype) * (1.0 - beta if beta < 1 else 1.0)


def average_(average: Tensor, value: Tensor, beta: float, weight: Tensor) -> None:
    """X ← βX + (1−β)·value, or X + value for β = 1 (AdaGrad's sum), with the weight of `share`."""
    if beta < 1:
        average.lerp_(value, per_block(weight, average))
    else:
        average.addcmul_(value, per_block(weight, average))


def average_gram_(factor: Tensor, X: Tensor, beta: float, weight: Tensor) -> None:
    """L ← βL + (1−β) XXᵀ for X [N, d, r], the lower part in block rows, the rest mirrored."""
    d = factor.shape[1]
    rows = d if d < GRAM_WHOLE else -(-d // 4)
    for start in range(0, d, rows):
        stop = min(start + rows, d)
        product = torch.bmm(X[:, start:stop], X[:, :stop].transpose(1, 2))
        average_(factor[:, start:stop, :stop], product, beta, weight)
        factor[:, :start, start:stop] = factor[:, start:stop, :start].transpose(1, 2)


def bias(beta: float, step: Tensor) -> Tensor:
    """1 − β^t, accurate in float32 also for β near 1; 1 for a sum."""
    if beta in (0.0, 1.0):
        return torch.ones_like(step)
    return -torch.expm1(step.clamp_min(1.0) * math.log(beta))


def admit_(s: Stacks, G: Tensor, present: Tensor, o: Options) -> Tensor:
    """Zero the gradients that are not finite, count the step of the others: `live` [N].

    A gradient whose squares overflow is not finite either; one whose squares vanish is zero, so
    that it leaves no denormal numbers, which processors are slow with. The host reads nothing.
    """
    live = present
    if o.nonfinite == "skip":
        norms = torch.linalg.vector_norm(G.flatten(1), dim=1)
        finite = torch.isfinite(norms)
        least = math.sqrt(torch.finfo(G.dtype).tiny)
        G.masked_fill_(per_block(~finite | (norms <= least), G), 0.0)
        live = present & finite
        s.skipped.add_(present & ~finite)
    s.step.add_(live)
    return live


def settle_(s: Stacks, live: Tensor) -> None:
    """Zero averages that are on their way down to denormal numbers: their gradients have stopped.

    What stays needs 150 further steps to become denormal at β1 = 0.9, more than `SETTLE_EVERY`.
    """
    for X in (s.exp_avg, s.exp_avg_sq, s.full, *s.factors.values()):
        if X is not None:
            least = per_block(live, X) * (2**24 * torch.finfo(X.dtype).tiny)
            X.masked_fill_(X.abs() < least, 0.0)


def observe_(s: Stacks, G: Tensor, live: Tensor, o: Options, method: Method) -> Tensor:
    """G̃ = Q_LᵀGQ_R (or G), and L ← β2 L + (1−β2) GGᵀ in the basis (Eq. ema-shampoo-practical)."""
    beta2 = o.betas[1]
    weight = share(beta2, live, G)
    if method.rotated:
        G = linalg.rotate(G, s.bases)
    if method.whitened:
        # λ from before this gradient; before the first, the identity.
        previous = s.step - live.to(s.step.dtype)
        first = per_block(previous < 1, G)
        roots = {i: torch.where(first, 1.0, w) for i, w in whitening(s, previous, o).items()}
    for i, factor in s.factors.items():
        X, seen = G, weight
        if method.whitened:
            # KL-Shampoo: L ← β2 L + (1−β2)/n · G R⁻¹ Gᵀ
            for j in roots.keys() - {i}:
                X = X * roots[j]
            X = X / math.sqrt(math.prod(G.shape[1:]) / G.shape[i + 1])
            # R⁻¹ reaches 1/ε, so squares can overflow; L then stands still.
            finite = torch.isfinite(torch.linalg.vector_norm(X.flatten(1), dim=1))
            X, seen = X.masked_fill(per_block(~finite, X), 0.0), weight * finite
        average_gram_(factor, linalg.unfold(X, i), beta2, seen)
    if s.full is not None:
        g = G.flatten(1)
        average_(s.full, g.unsqueeze(2) * g.unsqueeze(1), beta2, weight)
    return G


def chunks(*stacks: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same entries of several stacks, a few at a time, as views [N, c]."""
    flat = [stack.flatten(1) for stack in stacks]
    N, size = flat[0].shape
    width = max(1, CHUNK // N) if flat[0].device.type == "cpu" else size
    for start in range(0, size, width):
        yield tuple(stack[:, start : start + width] for stack in flat)


def direction(s: Stacks, G: Tensor, moving: Tensor, o: Options, method: Method) -> Tensor:
    """Momentum and scale see G̃, and give U = Q_L ( D^{-p} ⊙ M̃ ) Q_Rᵀ (Lemma 1); G̃ is used up."""
    if method.second_moment:
        return linalg.rotate_back(adam_(s, G, moving, o, method), s.bases)
    average_(s.exp_avg, G, o.betas[0], share(o.betas[0], moving, G))
    M = look_ahead(s.exp_avg, G, o)
    U = M / per_block(momentum_bias(s.step, o), M)
    if method.rotated:
        for w in whitening(s, s.step, o).values():
            U = U * w
        return linalg.rotate_back(U, s.bases)
    return linalg.rotate(U, s.roots)  # the roots are symmetric


def adam_(s: Stacks, G: Tensor, moving: Tensor, o: Options, method: Method) -> Tensor:
    """Adam in the eigenbasis (Alg. 2 l.11–14), in place of G̃:

    M̃ ← β1 M̃ + (1−β1) G̃,   D ← β3 D + (1−β3) G̃^{⊙2},   G̃ ← M̃/(1−β1^t) ⊘ (√(D/(1−β3^t)) + ε)

    With bias_in_step it is  M̃/(1−β1^t) · √(1−β3^t) ⊘ (√D + ε).
    """
    D = scale(s)
    G = G.contiguous()  # chunks are views; a rotation that leaves the last mode out permutes
    optimal = s.exp_avg_sq is None
    beta3 = o.betas[1] if optimal else o.beta_scale
    bias1, root_bias = momentum_bias(s.step, o), bias(beta3, s.step).sqrt()
    # M̃ is divided by (1−β1^t) (√D/√(1−β3^t) + ε) = gain · √D + shift.
    gain = (bias1 / root_bias).unsqueeze(1)
    shift = (gain if method.bias_in_step else bias1.unsqueeze(1)) * max(o.eps, 1e-30)
    share1, share3 = share(o.betas[0], moving, G), share(o.beta_scale, moving, G)
    least = rounding(s, beta3, o)
    bounded = o.correction == "bounded" and s.factors  # without a basis nothing changes hands
    limit = adam_bound(s.step, o).unsqueeze(1) if bounded else None
    for M_c, D_c, G_c in chunks(s.exp_avg, D, G):
        average_(M_c, G_c, o.betas[0], share1)
        if not optimal:
            average_(D_c, G_c.square(), o.beta_scale, share3)
        ahead = look_ahead(M_c, G_c, o)
        root = D_c.sqrt()
        if least is not None:
            torch.maximum(root, least, out=root)
        torch.div(ahead, torch.addcmul(shift, gain, root), out=G_c)
        if limit is not None:
            torch.clamp(G_c, -limit, limit, out=G_c)
    return G


def adam_bound(step: Tensor, o: Options) -> Tensor:
    """c_t: no gradients bring |m̂|/√v̂ further than this, while the basis stands still.

    With the weights a_k, b_k of the two averages, |Σ a_k g_k| ≤ √(Σ a_k²/b_k) √(Σ b_k g_k²).
    """
    beta1, beta3, t = o.betas[0], o.beta_scale, step.clamp_min(1.0)
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
    for factor in s.factors.values():
        energy = diagonal(factor).sum(1).clamp_min(0.0)  # ‖G‖² in the average of the factor …
        if beta3 != o.betas[1]:  # … and in that of D
            energy = energy * weights(beta3, s.step) / weights(o.betas[1], s.step)
        return (64 * torch.finfo(factor.dtype).eps * energy.sqrt()).unsqueeze(1)
    return None


def weights(beta: float, step: Tensor) -> Tensor:
    """The sum of what the values of an average weigh: 1 − β^t, or t in a sum."""
    return step.clamp_min(1.0) if beta == 1 else bias(beta, step)


def look_ahead(M: Tensor, G: Tensor, o: Options) -> Tensor:
    """M̃, or with nesterov β1 M̃ + (1−β1) G̃."""
    return torch.lerp(G, M, o.betas[0]) if o.nesterov else M


def momentum_bias(step: Tensor, o: Options) -> Tensor:
    """1 − β1^t, one step ahead with nesterov."""
    return bias(o.betas[0], step.clamp_min(1.0) + 1 if o.nesterov else step)


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
    eigenvalues = diagonal / bias(o.betas[1], step).unsqueeze(1)
    if o.trace_scaling and order > 1:
        # S⁻¹ is shared out: Tr^{-(k-1)/k} for each of the k factors.
        trace = eigenvalues.sum(1, keepdim=True).clamp_min(torch.finfo(diagonal.dtype).tiny)
        eigenvalues = eigenvalues * trace ** (-(order - 1) / order)
    return eigenvalues - eigenvalues.amin(1, keepdim=True).clamp_max(0.0) + o.eps


def whitening(s: Stacks, step: Tensor, o: Options) -> dict[int, Tensor]:
    """λ^{-1/2} of every factor, shaped to scale its mode."""
    order = s.exp_avg.dim() - 1
    return {
        i: linalg.along(spectrum(diagonal(factor), step, len(s.factors), o).rsqrt(), i, order)
        for i, factor in s.factors.items()
    }


def root(Q: Tensor, eigenvalues: Tensor, order: int, o: Options) -> Tensor:
    """L^{-1/(2k)} for "shampoo", L^{-1/2} for "shampoo2" (Eq. shampoo)."""
    powers = eigenvalues ** (-0.5 if o.variant == "shampoo2" else -0.5 / order)
    return torch.bmm(Q * powers.unsqueeze(1), Q.transpose(1, 2))


def graft_direction(s: Stacks, G: Tensor, moving: Tensor, o: Options) -> Tensor:
    """The update of the grafting method, from the same momentum as Shampoo's own."""
    M, bias1 = look_ahead(s.exp_avg, G, o), momentum_bias(s.step, o)
    if s.exp_avg_sq is None:
        return M / per_block(bias1, M)
    beta = 1.0 if o.graft == "adagrad" else o.betas[1]
    average_(s.exp_avg_sq, G.square(), beta, share(beta, moving, G))
    correction = bias(o.betas[1], s.step) if o.graft == "adam" else torch.ones_like(s.step)
    D = s.exp_avg_sq / per_block(correction, s.exp_avg_sq)
    return M / (per_block(bias1, M) * (D.sqrt() + o.eps))


def squared_norms(U: Tensor) -> Tensor:
    """‖U‖_F² per block."""
    return U.flatten(1).square().sum(1)


def seen_from_basis(s: Stacks, mode: int, method: Method) -> Tensor:
    """Λ̂ = QᵀLQ: at hand if the state lives in the eigenbasis."""
    if method.rotated:
        return s.factors[mode]
    Q = s.bases[mode]
    return torch.bmm(Q.transpose(1, 2), torch.bmm(s.factors[mode], Q))


def change_basis_(
    s: Stacks,
    G: Tensor | None,
    mode: int,
    slots: list[int],  # K positions in the stacks
    change: Change,
    o: Options,
    method: Method,
) -> None:
    """Q ← QV; if the state lives in the eigenbasis, it moves along."""
    V, index = change.V, change.subset

    def turn_(X: Tensor, along: int, A: Tensor) -> None:
        rows = X[slots]
        turned = linalg.mode_product(linalg.take(rows, index, along), A, along)
        X[slots] = linalg.put_(rows, turned, index, along)

    turn_(s.bases[mode], 1, V)
    if not method.rotated:
        return
    s.factors[mode][slots] = change.factor
    turn_(s.exp_avg, mode, V)
    if G is not None:
        turn_(G, mode, V)
    if s.full is not None:
        order = s.exp_avg.dim() - 1
        A = s.full.view(-1, *s.exp_avg.shape[1:], *s.exp_avg.shape[1:])
        turn_(A, mode, V)
        turn_(A, order + mode, V)
    if s.exp_avg_sq is not None:
        if o.correction == "basis_aware":
            # D ← V^{⊙2}ᵀ D: exact if the full matrix was diagonal in the old basis.
            turn_(s.exp_avg_sq, mode, V.square())
        elif change.order is not None:
            s.exp_avg_sq[slots] = linalg.take(s.exp_avg_sq[slots], change.order, mode)
