"""The phases of a step, on stacks of blocks: the paper's lines.

    mask_          which blocks take part in this step
    coefficients   the numbers of Algorithm 2 that depend on t
    observe_       G̃ = Q_LᵀGQ_R, and the factors see it
    direction_     momentum and scale see G̃; U, back in parameter space (Lemma 1)
    set_size_      U gets the size that `rms` says
    compare        with grafting: the norms of U and of the grafting method's update

What differs between methods is a cell of their row in the table, `methods.py`; the cells are here.

Legend: G gradient, G̃ the gradient where the state lives, M̃ momentum, D scale, L, R factors, Λ̂ a
factor in its basis, Q basis, V change of basis, U update, λ eigenvalues, p
exponent, t step; all stacked on a leading N.
`live` [N] is 1 for the blocks that take part in this step, and −0.0 for those that keep every bit
of their state.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.linalg import diagonal

from ..math.lean import average_rounded_, average_triangle_
from ..math.linalg import BITS, along, average_, average_gram_, means, polar_factor, rotate_
from ..options import Options
from ..state.state import State

if TYPE_CHECKING:
    from ..methods import Method

# How many entries a CPU thread works on at a time in element-wise work, to stay in its cache.
CHUNK = 1 << 16

# The least √D that counts as signal: this many machine epsilons times √E‖G‖², and with `rms` this
# share of the root mean square.
ROUNDING, SIGNAL = 64.0, 1e-3

# What KL-Shampoo adds to every eigenvalue, as a share of their mean. The first gradient in a
# direction without signal (a rare token) is divided by this share, fills the other factor, and so
# shortens the steps in all other directions, by the root of the share.
DAMPING = 0.01

# The root mean square of AdamW's updates, to which Muon's are scaled (Liu et al., 2025).
ADAMW_RMS = 0.2

# c, the root mean square of an update with rms="auto" if all recent gradients agree.
AGREED_RMS = 2.0


# -------------------------------------------------------------------- which blocks, and t


class Coefficients(NamedTuple):
    """The numbers of a step that depend on t, per block [N, 1]; computed once for many parts."""

    live: Tensor
    moves: Tensor  # `live`, but 0 while the method only observes
    share1: Tensor  # of G̃ in M̃
    share2: Tensor  # of GGᵀ in the factors
    share3: Tensor  # of G̃^{⊙2} in D
    bias1: Tensor  # 1 − β1^t
    gain: Tensor  # M̃ is divided by gain · D^p + shift,
    shift: Tensor  # which is (1−β1^t) ((D/(1−β3^t))^p + ε)
    minus_lr: Tensor  # −α
    age: Tensor  # how many gradients the statistics have seen
    root: Tensor  # √E‖G‖², with the weight that it has in D
    size: Tensor  # RMS(U) with `rms`; with "auto" in units of ‖M̃‖

    def split(self, sizes: list[int]) -> "list[Coefficients]":
        """Split the coefficients of neighbouring parts."""
        if len(sizes) == 1:
            return [self]
        parts = torch.split(torch.stack(self), sizes, 1)
        return [Coefficients(*views.unbind(0)) for views in parts]


def mask_(
    grads: Sequence[Tensor],  # stacks of N blocks in all
    present: Tensor | None,  # [N]: which of them have a gradient; None: all
    step: Tensor,  # [N]
    o: Options,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Zero gradients that are not finite; which blocks are `live`, which are skipped, ‖G‖ [N].

    Blocks that are not live get zeros added, and only −0.0 changes no bit. A gradient whose squares
    overflow counts as not finite; one whose squares vanish becomes zero, so that it leaves no
    denormal numbers, which slow processors down. The host reads nothing.
    """
    live = torch.ones_like(step)
    if present is not None:
        live = torch.where(present, live, -0.0)
    flat = [G.view(len(G), -1) for G in grads]
    norms = [torch.linalg.vector_norm(G, dim=1) for G in flat]
    norm = torch.cat(norms) if len(norms) > 1 else norms[0]
    if o.nonfinite == "propagate":  # with "raise", gradients are finite by now
        return live, None, norm
    finite = norm < math.sqrt(torch.finfo(norm.dtype).max)  # False for NaN
    some = norm > math.sqrt(torch.finfo(norm.dtype).tiny)
    bits = BITS[norm.dtype]
    keep = (finite & some).to(bits).unsqueeze(1).split([len(G) for G in flat])
    for G, kept in zip(flat, keep, strict=True):
        G.view(bits).mul_(kept)
    return torch.where(finite, live, -0.0), live > finite, torch.where(finite & some, norm, 0.0)


def coefficients(
    step: Tensor,  # [N]: t of this step
    live: Tensor,  # [N]
    o: Options,
    row: "Method",
    averaged: bool,  # D is an average with β3, and not read from the factors
    norm: Tensor,  # [N]: ‖G‖
    norm_sq: Tensor,  # [N, 2]: the average of ‖G‖² before this step, and its weight
    observations: Tensor | None = None,  # [N]: n, with this one; None: the statistics see steps
    observing: bool = False,  # whether this is an observation, in which nothing moves
) -> tuple[Coefficients, Tensor]:
    """The numbers of Algorithm 2 that depend on t, and e ← β1 e + (1−β1) ‖G‖² with its weight."""
    (beta1, beta2), beta3 = o.betas, o.beta_scale
    t, live = step.clamp_min(1.0).unsqueeze(1), live.unsqueeze(1)
    moves, factors_see, D_sees, age = roles(step.unsqueeze(1), live, observations, observing, row)
    beta = beta3 if averaged else beta2
    bias1 = bias(beta1, t + 1 if o.looks_ahead else t)
    seen = age.clamp_min(1.0)
    bias3 = bias(beta, t if observations is None else seen)
    gain = bias1 / to_power(bias3, row.exponent or o.exponent)
    share1 = share(beta1, moves)
    e, mean = average_norms(norm_sq, norm, share1)
    c = Coefficients(
        live,
        moves,
        share1,
        share(beta2, factors_see),
        share(beta3, D_sees),
        bias1,
        gain,
        # ε is added to √(D/(1−β3^t)), as in Adam, or to √D (SOAP).
        (bias1 if row.epsilon == "corrected" else gain) * o.least_eps,
        (moves.abs() * -o.rate).to(live.dtype),
        age,
        (mean * (seen if beta == 1 else bias(beta, seen))).sqrt_(),  # a sum has the weight t
        size_of_signal(mean, bias1, o),
    )
    return c, e


def roles(
    t: Tensor, live: Tensor, observations: Tensor | None, observing: bool, row: "Method"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Which blocks move, whose factors and whose D see G, and how many G the statistics have seen.

    SOAP's first gradient, at t = 0, only builds the basis. An observation moves nothing. Once a
    block has been observed, its statistics ignore steps.
    """
    moves = live * (t >= 1) if row.start < 0 else live
    age = t - row.start
    if observations is None:
        return moves, live, moves, age
    n = observations.unsqueeze(1)
    age = torch.where(n > 0, n, age)
    if observing:
        return torch.full_like(live, -0.0), live, live, age
    unseen = live * (n == 0)
    return moves, unseen, unseen, age


def average_norms(norm_sq: Tensor, norm: Tensor, share1: Tensor) -> tuple[Tensor, Tensor]:
    """e ← β1 e + (1−β1) ‖G‖² with its weight [N, 2], and ê, corrected for its bias [N, 1].

    A state that does not know e, such as AdamW's, starts with a weight of 0.
    """
    e = torch.lerp(norm_sq, torch.stack([norm.square(), torch.ones_like(norm)], 1), share1)
    return e, e[:, :1] / e[:, 1:].clamp_min(torch.finfo(e.dtype).tiny)


def size_of_signal(mean: Tensor, bias1: Tensor, o: Options) -> Tensor:
    """`rms`; or with "auto" c/((1−β1^t)√ê), which times ‖M̃‖ is c·ρ; 0 if nothing is known."""
    if o.rms != "auto":
        return torch.full_like(mean, o.rms or 1.0)
    return AGREED_RMS * (mean > 0) / (bias1 * mean.sqrt()).clamp_min_(torch.finfo(mean.dtype).tiny)


def share(beta: float, live: Tensor) -> Tensor:
    """The weight of a new value in an average: 1 − β, or 1 in a sum (β = 1); 0 where not live."""
    return live * (1.0 - beta if beta < 1 else 1.0)


def bias(beta: float, t: Tensor) -> Tensor:
    """1 − β^t for t ≥ 1, accurate in float32 also for β near 1; 1 for a sum."""
    if beta in (0.0, 1.0):
        return torch.ones_like(t)
    return (t * math.log(beta)).expm1_().neg_()


def to_power(X: Tensor, p: float) -> Tensor:
    """X^p, and √X for p = 1/2."""
    return X.sqrt() if p == 0.5 else X**p


# -------------------------------------------------------------------- what a factor averages


# A cell: what each factor sees, and with which share.
Statistic = Callable[[State, Tensor, Coefficients, Options], list[tuple[Tensor, Tensor]]]


def observe_(
    s: State, G: Tensor, c: Coefficients, o: Options, row: "Method", factors_see: bool = True
) -> None:
    """G ← G̃ = Q_LᵀGQ_R (or G), and L ← β2 L + (1−β2) GGᵀ with it (Eq. ema-shampoo-practical)."""
    if not s.roots:
        rotate_(G, *s.frames)
    if not factors_see or not s.factors:
        return
    statistic = whitened_gram if o.factors == "kl" else row.statistic
    seen = statistic(s, G, c, o)
    for (mode, factor), (X, share2) in zip(s.factors.items(), seen, strict=True):
        average = average_gram_ if factor.dim() == 3 else average_triangle_
        average(factor, X, mode, o.betas[1], share2)
    if s.full is not None:
        average_gram_(s.full, G.flatten(1), 0, o.betas[1], c.share2.unsqueeze(2))


def gram(s: State, G: Tensor, c: Coefficients, o: Options) -> list[tuple[Tensor, Tensor]]:
    """L averages GGᵀ: what each factor sees, and with which share."""
    return [(G, c.share2.unsqueeze(2))] * len(s.factors)


def whitened_gram(s: State, G: Tensor, c: Coefficients, o: Options) -> list[tuple[Tensor, Tensor]]:
    """KL-Shampoo: L averages G R⁻¹ Gᵀ/n, with the R before this gradient, at first R = s·I.

    s [N, 1] with s^k = E G²: of all D = s·I ⊗ … ⊗ s·I, the nearest to the first gradient. Any other
    start gives the first factors the wrong scale: from the identity, for k = 2, each factor has the
    scale of G², and so D has that of G⁴.
    """
    size = math.prod(G.shape[1:])
    newest = c.share2 / bias(o.betas[1], c.age.clamp_min(1.0))
    rms: Tensor = torch.linalg.vector_norm(G.flatten(1), dim=1, keepdim=True)
    start = (rms * (newest / size).sqrt()) ** (2 / len(s.factors))
    inverse_roots = {}
    for i, values in s.diagonals.items():
        eigenvalues = damped_spectrum(values, c.age - c.live, o)
        seen_before = eigenvalues.amax(1, keepdim=True) > 0
        inverse_roots[i] = torch.where(seen_before, eigenvalues, start).rsqrt()
    seen = []
    for i in s.factors:
        X = G
        for j in inverse_roots.keys() - {i}:
            X = X * along(inverse_roots[j], j, G.dim() - 1)
        X = X / math.sqrt(size / G.shape[i + 1])
        # R⁻¹ is as large as gradients were small, so squares can overflow; L then stands still.
        finite = torch.isfinite(torch.linalg.vector_norm(X.flatten(1), dim=1)).view(-1, 1)
        X = X.flatten(1).masked_fill(~finite, 0.0).view_as(G)
        seen.append((X, (c.share2 * finite).unsqueeze(2)))
    return seen


def observe_moment_(D: Tensor | None, G: Tensor, beta: float, newest: Tensor) -> None:
    """D ← βD + (1−β) G^{⊙2}, where D may have one number for many entries; `newest` is 1 − β."""
    if D is not None:
        average_(D, means(G.square(), D), beta, newest.view(-1, *[1] * (D.dim() - 1)))


def restart_statistics_(s: State, live: Tensor) -> None:
    """At a block's first observation, forget the statistics that it has from its steps."""
    assert s.observations is not None
    lasts = 1.0 - live * (s.observations == 1).unsqueeze(1)
    for X in (s.exp_avg_sq, s.full, *s.factors.values()):
        if X is not None:
            X.view(len(X), -1).mul_(lasts)


# -------------------------------------------------------------------- how the scale divides


# A cell: D^{-p} ⊙ M̃, once momentum and scale have seen G̃; it may be written into G̃.
Divide = Callable[[State, Tensor, Coefficients, Options, float], Tensor]


def direction_(s: State, G: Tensor, c: Coefficients, o: Options, row: "Method") -> Tensor:
    """U = Q_L ( D^{-p} ⊙ M̃ ) Q_Rᵀ (Lemma 1), once momentum and scale have seen G̃."""
    U = row.divide_(s, G, c, o, row.exponent or o.exponent)
    return rotate_(U, *s.to_parameters)


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
    least = c.root * (least_share(s, o) * s.has_basis.unsqueeze(1))
    if o.moment != "entry":  # D has one number for many entries
        observe_moment_(s.exp_avg_sq, G, o.beta_scale, c.share3)
        D, averaged = D.expand_as(G), False
    if p != 0.5:
        least = least ** (2 * p)
    return divide_by_moment_(s, D, G, c, o, p, averaged, least)


def divide_by_moment_(
    s: State,
    D: Tensor,
    G: Tensor,
    c: Coefficients,
    o: Options,
    p: float,
    averaged: bool = True,
    least: Tensor | None = None,  # [N, 1]: the least that D^p counts as
) -> Tensor:
    """Adam's lines, in place of G̃:

    M̃ ← β1 M̃ + (1−β1) G̃,   D ← β3 D + (1−β3) G̃^{⊙2},   G̃ ← M̃/(1−β1^t) ⊘ ((D/(1−β3^t))^p + ε)

    With ε beside the uncorrected √D it is  M̃/(1−β1^t) · √(1−β3^t) ⊘ (√D + ε).
    """
    beta3, start = o.beta_scale, 0
    for M_c, D_c, G_c in chunks(s.exp_avg, D, G):
        M_c = average_momentum_(M_c, G_c, c.share1, s.step, start)
        start += G_c.shape[1]
        root = G_c.square()
        if averaged:
            D_c.lerp_(root, c.share3) if beta3 < 1 else D_c.addcmul_(root, c.share3)
        torch.sqrt(D_c, out=root) if p == 0.5 else torch.pow(D_c, p, out=root)
        if least is not None:
            torch.maximum(root, least, out=root)
        torch.addcmul(c.shift, c.gain, root, out=root)
        torch.div(look_ahead(M_c, G_c, o), root, out=G_c)
    return G


def chunks(*stacks: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same entries of several stacks, a few at a time, as views [N, c]."""
    flat = [stack.flatten(1) for stack in stacks]
    N, size = flat[0].shape
    width = max(1, CHUNK * torch.get_num_threads() // N)
    if flat[0].device.type != "cpu" or size <= width:
        return iter([tuple(flat)])
    return zip(*(torch.split(X, width, 1) for X in flat), strict=True)


def momentum_(s: State, G: Tensor, c: Coefficients, o: Options, p: float) -> Tensor:
    """M/(1−β1^t): D^{-p} with D = λ_L ⊗ λ_R is in the cached roots."""
    M = average_momentum_(s.exp_avg.flatten(1), G.flatten(1), c.share1, s.step)
    return (look_ahead(M, G.flatten(1), o) / c.bias1).view_as(G)


def by_eigenvalues_(s: State, G: Tensor, c: Coefficients, o: Options, p: float) -> Tensor:
    """M̃ ⊘ (D^p + ε) with D = λ_L ⊗ λ_R, the eigenvalues of this step."""
    M = momentum_(s, G, c, o, p)
    roots = {i: to_power(damped_spectrum(x, c.age, o), p) for i, x in s.diagonals.items()}
    sides = [along(root, i, M.dim() - 1) for i, root in roots.items()]
    return M / (math.prod(sides) + o.least_eps)


def by_sum_of_sides_(s: State, G: Tensor, c: Coefficients, o: Options, p: float) -> Tensor:
    """CASPR: D^{-p} ⊙ M̃ with D^{-p} = (Σ_i λ_i^{-p/k} / k)^k, and λ of this step.

    For a matrix this is (L^{-1/2}M + 2 L^{-1/4}MR^{-1/4} + MR^{-1/2})/4 in the basis. In a sum, no
    side compensates for another, so √λ counts as at least 64 u √Tr L once a basis has changed:
    anything smaller is rounding, as in `least_share`.
    """
    M, k = momentum_(s, G, c, o, p), len(s.factors)
    rounding = (ROUNDING * torch.finfo(M.dtype).eps) ** 2 * s.has_basis.unsqueeze(1)
    inverse = {}
    for i, values in s.diagonals.items():
        eigenvalues = spectrum(values, c.age, k, o, product_rounding(s, o))
        least = (eigenvalues * rounding).sum(1, keepdim=True)
        inverse[i] = inverse_power(torch.maximum(eigenvalues, least), p / k)
    total = sum(along(side, i, M.dim() - 1) for i, side in inverse.items())
    return M * (total / k) ** k


def polar_(s: State, G: Tensor, c: Coefficients, o: Options, p: float) -> Tensor:
    """0.2 √max(m, n) · polar(M), M ← μM + (1−μ)G, in place of G; M looks ahead with nesterov."""
    newest = share(o.momentum, c.moves)
    M = average_momentum_(s.exp_avg.flatten(1), G.flatten(1), newest, s.step).view_as(G)
    M = torch.lerp(G, M, o.momentum) if o.nesterov else M
    size = ADAMW_RMS * math.sqrt(max(G.shape[1:]))
    return torch.mul(polar_factor(M, o.ns_steps), size, out=G)


def average_momentum_(M: Tensor, G: Tensor, share1: Tensor, t: Tensor, start: int = 0) -> Tensor:
    """M ← β1 M + (1−β1) G, for the entries from `start` on; returned as it is before rounding."""
    return M.lerp_(G, share1) if M.dtype == G.dtype else average_rounded_(M, G, share1, t, start)


def look_ahead(M: Tensor, G: Tensor, o: Options) -> Tensor:
    """M̃, or with nesterov β1 M̃ + (1−β1) G̃."""
    return torch.lerp(G, M, o.betas[0]) if o.looks_ahead else M


def least_share(s: State, o: Options) -> float:
    """The least √D that counts as signal once a basis has changed, as a share of √E‖G‖².

    Rotations leave an error of about u‖G‖ in every entry. Where there was nothing else (in the null
    space of a factor), Adam would divide the error by itself and take a full-size step. Values over
    64 u √E‖G‖² are not rounding; operands of fewer bits leave a larger error. With `rms`, √D is at
    least a thousandth of its root mean square: so one ulp in a gradient stays one ulp in an update
    that is scaled up.
    """
    rounding = max(ROUNDING * torch.finfo(s.step.dtype).eps, product_rounding(s, o))
    signal = 0.0 if o.rms is None else SIGNAL / math.sqrt(math.prod(s.exp_avg.shape[1:]))
    return max(rounding, signal)


def product_rounding(s: State, o: Options) -> float:
    """The most of ‖G‖ that shows in an empty direction, because a basis or operands are rounded.

    A sum of d products that are each off by u is off by about u‖g‖/√d.
    """
    if o.precision != "high" or s.step.dtype != torch.float32 or not s.bases:
        return s.basis_rounding
    u = 2.0**-7 if s.step.device.type == "cpu" else 2.0**-10
    return max(s.basis_rounding, u / math.sqrt(min(Q.shape[1] for Q in s.bases.values())))


# -------------------------------------------------------------------- eigenvalues of the factors


def spectrum(
    values: Tensor,  # [N, d]: diag Λ̂
    age: Tensor,  # [N, 1]
    k: int,  # number of factors
    o: Options,
    rounding: float,  # of a lean basis or of operands
) -> Tensor:
    """λ of Shampoo: diag Λ̂/(1−β2^t), with or without S⁻¹, shifted to be at least 0, plus ε."""
    eigenvalues = values / bias(o.betas[1], age.clamp_min(1.0))
    if rounding > 0:  # as for √D of EShampoo: rounding is not divided by its own size
        eigenvalues = eigenvalues.maximum(rounding**2 * eigenvalues.sum(1, keepdim=True))
    if o.trace_scaling and k > 1:
        # S⁻¹ is shared out: Tr^{-(k-1)/k} for each of the k factors.
        trace = eigenvalues.sum(1, keepdim=True).clamp_min(torch.finfo(values.dtype).tiny)
        eigenvalues = eigenvalues * trace ** (-(k - 1) / k)
    return eigenvalues - eigenvalues.amin(1, keepdim=True).clamp_max(0.0) + o.eps


def damped_spectrum(values: Tensor, age: Tensor, o: Options) -> Tensor:
    """λ of KL-Shampoo: diag Λ̂/(1−β2^t), negative rounding set to 0, plus a share of their mean."""
    eigenvalues = values.clamp_min(0.0) / bias(o.betas[1], age.clamp_min(1.0))
    return eigenvalues + DAMPING * eigenvalues.mean(1, keepdim=True)


def inverse_power(eigenvalues: Tensor, q: float) -> Tensor:
    """λ^{-q}, and 0 where λ vanishes, as it can if ε = 0: a pseudo-inverse."""
    vanishes = eigenvalues < torch.finfo(eigenvalues.dtype).tiny
    return (eigenvalues**-q).masked_fill_(vanishes, 0.0)


def inverse_root(Q: Tensor, eigenvalues: Tensor, k: int, o: Options, p: float) -> Tensor:
    """L^{-p/k} for "shampoo", L^{-p} for "shampoo2" (Eq. shampoo)."""
    powers = inverse_power(eigenvalues, p if o.variant == "shampoo2" else p / k)
    return torch.bmm(Q * powers.unsqueeze(1), Q.transpose(1, 2))


# -------------------------------------------------------------------- the size of an update


def set_size_(s: State, U: Tensor, c: Coefficients, o: Options) -> None:
    """U ← U r/RMS(U) per block with a basis, r = `rms`, or c·ρ with ρ = ‖M̂‖/√ê for "auto".

    ρ is the share of recent gradients that agree: 1 if they are equal, √((1−β1)/(1+β1)) if they
    are independent. It fades when gradients stop, and so does the update.
    """
    U = U.view(len(U), -1)
    # ‖U‖ counts as 0 while Q = I, and U then keeps its size.
    norm = torch.linalg.vector_norm(U, dim=1, keepdim=True).mul_(s.has_basis.unsqueeze(1))
    size = c.size * math.sqrt(U.shape[1])
    if o.rms == "auto":
        M = s.exp_avg.flatten(1)
        size.mul_(torch.linalg.vector_norm(M, dim=1, keepdim=True, dtype=U.dtype))
    U.mul_(torch.where(norm > 0, size / norm, 1.0))


def update_graft_moment_(s: State, G: Tensor, c: Coefficients, o: Options) -> None:
    """The second moment of the grafting method sees G, before G is rotated."""
    beta = 1.0 if o.graft == "adagrad" else o.betas[1]
    observe_moment_(s.graft_moment, G, beta, share(beta, c.moves))


def compare(
    s: State, G: Tensor, U: Tensor, c: Coefficients, o: Options, checked: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """The update, and the squared norms [2, N] of the grafting method's update and of this one.

    Before the first inverse roots, when a block has not been `checked` yet, the grafting method
    takes the step alone.
    """
    graft = graft_direction(s, G, c, o).flatten(1)
    U = U.flatten(1)
    if not any(checked):
        U = graft
    elif not all(checked):
        U = torch.where(torch.tensor(checked, device=U.device).unsqueeze(1), U, graft)
    return U.view_as(G), torch.stack([graft.square().sum(1), U.square().sum(1)])


def graft_direction(s: State, G: Tensor, c: Coefficients, o: Options) -> Tensor:
    """The update of the grafting method, from the same momentum as the method's own."""
    M = look_ahead(s.exp_avg, G, o).flatten(1)
    if s.graft_moment is None:
        return M / c.bias1
    root = s.graft_moment.sqrt().expand_as(G).flatten(1)
    if o.graft == "adam":
        root = root / bias(o.betas[1], s.step.clamp_min(1.0)).sqrt().unsqueeze(1)
    return M / (c.bias1 * (root + o.least_eps))


def rescale_(U: Tensor, norms: Tensor) -> None:
    """U ← U ‖U_graft‖ / ‖U‖ with the given squared norms [2, N]."""
    ratio = torch.where(norms[1] > 0, norms[0] / norms[1], torch.zeros_like(norms[0]))
    ratio = ratio.clamp_max(torch.finfo(ratio.dtype).max).sqrt()  # if ‖U‖² nearly vanishes
    U.view(len(U), -1).mul_(ratio.unsqueeze(1))
