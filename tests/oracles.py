"""Slow and obvious float64 transcriptions of the algorithms; the library is checked against them.

Written from the paper ("Purifying Shampoo") and the design alone: one Python loop over parameters
and blocks, everything in the original coordinates. Nothing here imports eshampoo.

    W   parameter            L   factors, one per mode: L[0] = L, L[1] = R for a matrix
    G   gradient             Q   eigenbases of the factors, identity before the first one
    M   momentum             D   second moment of the rotated gradient
    t   gradients seen       Λ̂   Qᵀ L Q

A mode without a factor (elementwise parameters, `oversize="identity"`) has L[i] = Q[i] = None.
An oracle is used like an optimizer that is handed its gradients:

    oracle = EShampoo([W, b], lr=1e-2, tau=0.0, frequency=4)
    oracle.step([grad_W, None])     # b keeps everything, its own t included
    oracle.observe([grad_W, None])  # with statistics="observe": for the statistics alone
    oracle.params[0]                # W after the step, float64

Every hyperparameter is an attribute and may be changed between steps.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction

import torch
from torch import Tensor

# c of rms="auto" (design, section 2).
AGREED_RMS = 2.0

# Tensors as matrices ------------------------------------------------------------------------------


def unfold(X: Tensor, i: int) -> Tensor:
    """X_(i): mode i as rows, all other modes as columns."""
    return X.movedim(i, 0).reshape(X.shape[i], -1)


def mode_product(A: Tensor, X: Tensor, i: int) -> Tensor:
    """A applied to mode i of X: A X for i = 0 and X Aᵀ for i = 1 of a matrix."""
    return torch.tensordot(A, X, dims=([1], [i])).movedim(0, i)


def apply(matrices: list[Tensor | None], X: Tensor) -> Tensor:
    """One matrix on every mode of X; None is the identity."""
    for i, A in enumerate(matrices):
        if A is not None:
            X = mode_product(A, X, i)
    return X


def transposed(matrices: list[Tensor | None]) -> list[Tensor | None]:
    return [None if A is None else A.T for A in matrices]


# Blocks (design, section 5) -----------------------------------------------------------------------


def merged_shape(shape: tuple[int, ...], max_dim: int, merge_dims: bool | str) -> tuple[int, ...]:
    """Drop dimensions of size 1, then merge from the last backwards while the product ≤ max_dim.

    With "kernel", the third and later dimensions join the second.
    """
    if merge_dims == "kernel":
        large = tuple(d for d in shape if d != 1)
        fits = len(large) > 2 and math.prod(large[2:]) <= max_dim
        return (large[0], math.prod(large[1:])) if fits else large
    modes: list[int] = []
    for d in reversed([d for d in shape if d != 1]):
        if merge_dims and modes and modes[0] * d <= max_dim:
            modes[0] *= d
        else:
            modes.insert(0, d)
    return tuple(modes)


def cuts(d: int, max_dim: int) -> list[slice]:
    """A dimension cut at multiples of max_dim, the last piece ragged: 40 → 16, 16, 8."""
    return [slice(start, min(start + max_dim, d)) for start in range(0, d, max_dim)]


class Block:
    """What the paper keeps for one matrix, and where that matrix lies in its parameter."""

    def __init__(self, modes: tuple[int, ...], slices: tuple[slice, ...], has_factor: list[bool]):
        self.modes, self.slices = modes, slices
        sizes = [s.stop - s.start for s in slices]
        factors = list(zip(sizes, has_factor, strict=True))
        self.t, self.n = 0, 0  # gradients of steps, and of observations
        self.M = torch.zeros(sizes, dtype=torch.float64)
        self.D = torch.zeros(sizes, dtype=torch.float64)
        self.L = [torch.zeros(d, d, dtype=torch.float64) if f else None for d, f in factors]
        self.Q = [torch.eye(d, dtype=torch.float64) if f else None for d, f in factors]
        self.root: list[Tensor | None] = [None for _ in sizes]  # Shampoo only
        self.A: Tensor | float = 0.0  # full-matrix Adam's statistic, correction="optimal" only
        self.e, self.weight = 0.0, 0.0  # the average of ‖G‖² with β1, and of 1
        self.observed = False  # SOAP only: the first gradient has been seen
        self.checked = False  # Shampoo only: the first refresh has been reached
        self.offset = 0.0  # the share of the gap by which checks with frequency="auto" come earlier
        self.computed, self.waited = [0] * len(sizes), [0] * len(sizes)  # bases, per mode
        self.spent = [0.0] * len(sizes)  # multiply-adds on bases, per mode
        # One (t, criterion, recomputed?) per check and mode.
        self.history: list[list[tuple[int, float, bool]]] = [[] for _ in sizes]

    @property
    def age(self) -> int:
        """Gradients that the statistics have seen: of steps, until the first observation."""
        return self.n if self.n > 0 else self.t

    @property
    def elementwise(self) -> bool:
        return all(L is None for L in self.L)

    def of(self, X: Tensor) -> Tensor:
        """This block of a tensor that has the parameter's shape (a view of it)."""
        return X.view(self.modes)[self.slices]


# Eigenbases ---------------------------------------------------------------------------------------


def eigh_cost(d: int) -> float:
    """What the eigenvectors of a matrix cost, in multiply-adds."""
    return 5 * d**3 + 1300 * d**2


def qr_cost(d: int) -> float:
    """What a QR decomposition costs, in multiply-adds."""
    return 3 * d**3 + 600 * d**2


@functools.cache
def is_check(t: int, beta: float, novelty: float) -> bool:
    """Whether ρ(s, t) ≥ ν, s the last check before t (design, section 2), in exact arithmetic."""
    if t <= 1:
        return True
    s = next(s for s in range(t - 1, 0, -1) if is_check(s, beta, novelty))
    b = Fraction(str(beta))
    old = Fraction(s, t) if b == 1 else b ** (t - s) * (1 - b**s) / (1 - b**t)
    return 1 - old >= Fraction(str(novelty))


def is_spread_check(t: int, beta: float, novelty: float, offset: float) -> bool:
    """The same for a block that is checked ⌊φn⌋ steps earlier, n the gap, if it begins at 20."""
    if offset == 0 or t <= 20:
        return is_check(t, beta, novelty)
    if novelty == 1 and beta > 0:
        return False
    check = next(c for c in itertools.count(t) if is_check(c, beta, novelty))
    last = next(c for c in range(check - 1, 0, -1) if is_check(c, beta, novelty))
    return t == check - (int(offset * (check - last)) if last >= 20 else 0)


def criterion(Λ: Tensor) -> float:
    """‖Λ̂ − diag Λ̂‖_F / ‖Λ̂‖_F with 0/0 = 0, Eq. (criterion)."""
    norm = torch.linalg.norm(Λ).item()
    return torch.linalg.norm(Λ - torch.diag(Λ.diag())).item() / norm if norm > 0 else 0.0


def criterion_after_partial(Λ: Tensor, S: list[int]) -> float:
    """The criterion once Λ̂[S, S] = V_S Λ V_Sᵀ is diagonalised, V the identity outside S."""
    return criterion(inside(Λ, S).T @ Λ @ inside(Λ, S))


def inside(Λ: Tensor, S: list[int]) -> Tensor:
    """V with V_S = eigvec(Λ̂[S, S]), ascending, and the identity elsewhere."""
    V = torch.eye(len(Λ), dtype=Λ.dtype)
    rows, columns = torch.meshgrid(torch.tensor(S), torch.tensor(S), indexing="ij")
    if S:
        λ, V_S = torch.linalg.eigh(Λ[rows, columns])
        V[rows, columns] = stay(V_S, zeros(λ, Λ.diag().max().item()))
    return V


def zeros(λ: Tensor, largest: float = 0.0) -> list[int]:
    """Which eigenvalues are zero to rounding: λ ≤ 8 u λ_max."""
    limit = 8 * torch.finfo(λ.dtype).eps * max(λ.abs().max().item(), largest)
    return [j for j in range(len(λ)) if λ[j].item() <= limit]


def stay(V: Tensor, null: list[int], slots: list[int] | None = None) -> Tensor:
    """The null columns of V turned within their span to be nearest to the unit vectors of `slots`.

    Orthogonal Procrustes: with V_0[slots, :] = U Σ Xᵀ the answer is V_0 X Uᵀ. Directions with
    σ = 0 are as near to every free slot; the k-th coordinate they reach goes to the k-th free slot
    (with weights from 1 to 2, so that symmetric directions do not meet at right angles again).
    """
    if not null:
        return V
    V_0 = V[:, null]
    U, σ, Xt = torch.linalg.svd(V_0[null if slots is None else slots, :])
    turn = torch.zeros_like(Xt)
    lost = []
    for k in range(len(null)):
        if σ[k] < 1e-4:
            lost.append(k)
        else:
            turn += torch.outer(Xt[k], U[:, k])
    if lost:
        reached, free = V_0 @ Xt[lost].T, U[:, lost]
        near = torch.zeros(len(V), len(null), dtype=V.dtype)
        before_c = 0.0
        for c in range(len(V)):
            here_c = (reached[c] ** 2).sum().item()
            before_s = 0.0
            for s in range(len(null)):
                here_s = (free[s] ** 2).sum().item()
                apart = abs((before_c + here_c / 2) - (before_s + here_s / 2))
                near[c, s] = max(0.0, 1 - apart) * (1 + c / len(V)) * (1 + s / len(null))
                before_s += here_s
            before_c += here_c
        A, _, Bt = torch.linalg.svd(reached.T @ near @ free)
        turn += Xt[lost].T @ A @ Bt @ free.T
    V = V.clone()
    V[:, null] = V_0 @ turn
    return V


def eigenbasis(L: Tensor, Q: Tensor, descending: bool = False) -> Tensor:
    """The eigenvectors of L, those of the null space near to the columns of Q."""
    λ, Q_new = torch.linalg.eigh(L)
    if descending:
        λ, Q_new = λ.flip(0), Q_new.flip(1)
    # Orthogonal to the last digit: otherwise the errors of Q would double with every new basis.
    U, _, Vt = torch.linalg.svd(Q.T @ Q_new)
    return Q @ stay(U @ Vt, zeros(λ))


def independent_first(Λ: Tensor, P: list[int]) -> Tensor:
    """Q of Λ̂P = QR; if Λ̂ has a null space, columns that depend on earlier ones come last."""
    X = Λ[:, P]
    Q, R = torch.linalg.qr(X)
    size = R.diag().abs()
    if zeros((Q.T @ Λ @ Q).diag()) or zeros(size):
        limit = torch.finfo(Λ.dtype).eps ** 0.75 * size.max()
        waiting = [j for j in range(len(Λ)) if size[j] <= limit]
        order = [j for j in range(len(Λ)) if j not in waiting] + waiting
        Q[:, order] = torch.linalg.qr(X[:, order]).Q
    return Q


def qr_algorithm(L: Tensor, Q: Tensor, tau: float, iterations: int) -> Tensor:
    """QR iterations from Q until the criterion holds, Algorithm 4 (its test printed inverted)."""
    return counted_qr_algorithm(L, Q, tau, iterations)[0]


def counted_qr_algorithm(L: Tensor, Q: Tensor, tau: float, iterations: int) -> tuple[Tensor, int]:
    """The same, and how many iterations it took."""
    Λ = Q.T @ L @ Q
    V = torch.eye(len(Λ), dtype=Λ.dtype)
    null: list[int] = []
    i = 0
    while criterion(Λ) > tau and i < iterations:
        step = torch.linalg.qr(Λ).Q
        if i == 0:
            empty = zeros(Λ.diag())
            P = [j for j in range(len(Λ)) if j not in empty] + empty
            step[:, P] = independent_first(Λ, P)
        Λ = step.T @ Λ @ step
        if i == 0:
            null = zeros(Λ.diag())
        for j in null:  # what is left there is rounding, and would turn the null space again
            rest = Λ[j, j].item()
            Λ[j, :], Λ[:, j] = 0.0, 0.0
            Λ[j, j] = rest
        V = V @ step
        i += 1
    return Q @ stay(V, null), i


def power_step(L: Tensor, Q: Tensor) -> tuple[Tensor, Tensor]:
    """SOAP's step qr(L Q P), P sorting diag(Qᵀ L Q) descending; also P as an index."""
    Λ = Q.T @ L @ Q
    order = torch.argsort(Λ.diag(), descending=True, stable=True)
    V = independent_first(Λ, order.tolist())
    null = zeros((V.T @ Λ @ V).diag())
    return Q @ stay(V, null, order[null].tolist()), order


def partial_change(Λ: Tensor, target: float, grain: int = 8) -> tuple[Tensor, int]:
    """V that diagonalises Λ̂[S, S] alone, with an S that brings the criterion to the target; |S|.

    S takes coordinates by the off-diagonal energy of their rows until the target is met (design,
    section 2), and then up to a multiple of `grain`, the library's batch size; the k-th smallest
    eigenvalue of Λ̂[S, S] goes to the coordinate with the k-th smallest diagonal entry.
    """
    d = len(Λ)
    off = Λ - torch.diag(Λ.diag())
    by_energy = torch.argsort((off**2).sum(1), descending=True).tolist()
    size = 0
    while size < d and criterion_after_partial(Λ, by_energy[:size]) > target:
        size += 1
    size = min(d, max(1, math.ceil(size / grain)) * grain)
    S = sorted(by_energy[:size], key=lambda i: Λ[i, i].item())
    return inside(Λ, S), size


# The common step ----------------------------------------------------------------------------------


def average(old: Tensor | float, new: Tensor, beta: float) -> Tensor:
    """β old + (1−β) new; β = 1 is AdaGrad's sum."""
    return old + new if beta == 1.0 else beta * old + (1 - beta) * new


def bias(beta: float, t: int) -> float:
    """1 − β^t; a sum has no bias."""
    return 1.0 if beta == 1.0 else 1 - beta**t


@dataclass
class Oracle:
    """One loop over parameters and blocks: W ← W − lr (U + λ W), U given by the subclass."""

    params: list[Tensor]
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    _: KW_ONLY
    tau: float | Callable[[int], float] = 0.03
    frequency: int | str = "auto"
    novelty: float = 0.1
    budget: float | None = 0.25
    solver: str = "eigh"
    qr_iterations: int = 10
    vectors: str = "adam"
    matrices: str = "kronecker"
    max_dim: int = 1024
    oversize: str = "split"
    merge_dims: bool | str = False
    sides: str = "both"
    moment: str = "entry"
    exponent: float = 0.5
    statistics: str = "step"
    factors: str = "gram"
    rms: float | str | None = "auto"
    batch_dims: int = 0
    pieces: int = 1
    nesterov: bool = False
    maximize: bool = False

    correction = "naive"  # EShampoo alone makes it an option
    scale_moves = True  # D lives in the eigenbasis; Shampoo's, the graft's, in parameter space

    def __post_init__(self):
        self.params = [W.detach().clone().double().contiguous() for W in self.params]
        self.members = [[(W, self.cut(W)) for W in self.matrices_of(X)] for X in self.params]
        self.blocks = [[b for _, blocks in members for b in blocks] for members in self.members]

    def modes(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """The merged shape of a parameter; None for an elementwise one."""
        large = [d for d in shape if d != 1]
        kind = self.matrices if len(large) >= 2 else self.vectors
        return None if kind == "adam" else merged_shape(shape, self.max_dim, self.merge_dims)

    def matrices_of(self, X: Tensor) -> list[Tensor]:
        """Views of the separate matrices, or equal pieces of them, in a tensor."""
        shape = tuple(X.shape[self.batch_dims :])
        members = X.reshape(-1, *shape).unbind(0)
        if not shape:
            return list(members)
        # What does not divide is element-wise, so that it does not matter how it is cut.
        height = shape[0] // self.pieces if shape[0] % self.pieces == 0 else shape[0]
        starts = range(0, shape[0], max(1, height))
        return [X_i[k : k + height] for X_i in members for k in starts]

    def cut(self, W: Tensor) -> list[Block]:
        modes = self.modes(tuple(W.shape))
        if modes is None:
            whole = tuple(slice(0, d) for d in W.shape)
            return [Block(tuple(W.shape), whole, [False] * W.ndim)]
        based = [self.oversize == "split" or d <= self.max_dim for d in modes]
        if len(modes) > 1:  # a side whose factor has 8 times the entries of the block: none
            rest = [math.prod(modes) // d for d in modes]
            based = [b and d < 8 * r for b, d, r in zip(based, modes, rest, strict=True)]
            if self.sides != "both":  # only one of them, of equally small ones the last
                small = max(i for i, d in enumerate(modes) if d == min(modes))
                only = {"left": 0, "right": len(modes) - 1, "smaller": small}[self.sides]
                based = [b and i == only for i, b in enumerate(based)]
        if not any(based):
            whole = tuple(slice(0, d) for d in W.shape)
            return [Block(tuple(W.shape), whole, [False] * W.ndim)]
        kernel = self.merge_dims == "kernel" and len([d for d in W.shape if d != 1]) > len(modes)
        width = math.prod([d for d in W.shape if d != 1][2:]) if kernel else 1
        # The joined side is cut between inputs, never inside a kernel.
        grains = [width if i == 1 else 1 for i in range(len(modes))]
        pieces = itertools.product(
            *(
                cuts(d, self.max_dim // grain * grain if b else d)
                for d, b, grain in zip(modes, based, grains, strict=True)
            )
        )
        return [Block(modes, slices, based) for slices in pieces]

    @torch.no_grad()
    def step(self, grads: list[Tensor | None]) -> None:
        """One step with the given gradients; a parameter whose gradient is None is left alone."""
        for W, blocks, G in self.each(grads):
            self.update_(W, blocks, [block.of(G) for block in blocks])

    def each(self, grads: list[Tensor | None]) -> Iterator[tuple[Tensor, list[Block], Tensor]]:
        """The matrices that have a gradient, with their blocks."""
        for members, G in zip(self.members, grads, strict=True):
            if G is not None:
                G = (-G if self.maximize else G).detach().double().contiguous()
                for (W, blocks), G_i in zip(members, self.matrices_of(G), strict=True):
                    yield W, blocks, G_i

    @torch.no_grad()
    def observe(self, grads: list[Tensor | None]) -> None:
        """The statistics see the given gradients, those of steps are forgotten, nothing moves."""
        for _, blocks, G in self.each(grads):
            for block in blocks if not blocks[0].elementwise else []:
                if block.n == 0:
                    block.L = [None if L is None else torch.zeros_like(L) for L in block.L]
                    block.D, block.A = block.D * (not self.scale_moves), 0.0
                block.n += 1
                self.learn_(block, block.of(G))

    def learns(self, block: Block) -> bool:
        """Whether the statistics of a block see the gradients of its steps."""
        return self.statistics == "step" or block.n == 0

    def learn_(self, block: Block, G: Tensor) -> None:
        """The statistics see a gradient, and the bases are checked."""
        self.observe_(block, G)
        if self.checks(block):
            self.refresh_(block)

    def update_(self, W: Tensor, blocks: list[Block], Gs: list[Tensor]) -> None:
        for block, U in zip(blocks, self.sized(blocks, Gs), strict=True):
            w = block.of(W)
            w -= self.lr * (U + self.weight_decay * w)

    def sized(self, blocks: list[Block], Gs: list[Tensor]) -> list[Tensor]:
        """The directions, with the root mean square that `rms` says."""
        Us = self.directions(blocks, Gs)
        if blocks[0].elementwise or self.rms is None:
            return Us
        return [self.with_rms(block, U) for block, U in zip(blocks, Us, strict=True)]

    def with_rms(self, block: Block, U: Tensor) -> Tensor:
        """U at a root mean square of `rms`, or of c·ρ, ρ = ‖M̂‖/√ê, once the block has a basis."""
        if not any(block.computed) or not U.any():
            return U
        r, beta1 = self.rms, self.betas[0]
        if r == "auto":
            M = block.M / (1 - beta1 ** (block.t + 1 if self.nesterov else block.t))
            r = AGREED_RMS * torch.linalg.norm(M).item() / math.sqrt(block.e / block.weight)
        return U * (r * math.sqrt(U.numel()) / torch.linalg.norm(U).item())

    def grafted(self, Us: list[Tensor], grafts: list[Tensor]) -> list[Tensor]:
        """U ‖U_graft‖ / ‖U‖, norms over all the given blocks, Eq. (grafting)."""
        norm = math.sqrt(sum((U**2).sum().item() for U in Us))
        target = math.sqrt(sum((U**2).sum().item() for U in grafts))
        return [U * (target / norm if norm > 0 else 0.0) for U in Us]

    def directions(self, blocks: list[Block], Gs: list[Tensor]) -> list[Tensor]:
        return [self.direction(block, G) for block, G in zip(blocks, Gs, strict=True)]

    def direction(self, block: Block, G: Tensor) -> Tensor:
        raise NotImplementedError

    def momentum_(self, block: Block, G: Tensor) -> Tensor:
        """M ← β1 M + (1−β1) G, bias-corrected; `nesterov` averages G in once more (NAdam)."""
        beta1 = self.betas[0]
        block.M = beta1 * block.M + (1 - beta1) * G
        block.e = beta1 * block.e + (1 - beta1) * (G**2).sum().item()
        block.weight = beta1 * block.weight + (1 - beta1)
        if self.nesterov:
            return (beta1 * block.M + (1 - beta1) * G) / (1 - beta1 ** (block.t + 1))
        return block.M / (1 - beta1**block.t)

    def adam_(self, block: Block, G: Tensor, beta: float) -> Tensor:
        """Adam's direction in the coordinates it is given: M̃ ⊘ (√D̃ + ε)."""
        M = self.momentum_(block, G)
        block.D = average(block.D, G**2, beta)
        return M / ((block.D / bias(beta, block.t)).sqrt() + self.eps)

    def floored(self, block: Block, D: Tensor, beta: float) -> Tensor:
        """√D; with `rms`, in a basis of its own, at least a thousandth of √(E‖G‖²/∏d)."""
        if self.rms is None or not any(block.computed):
            return D.sqrt()
        n, beta1 = self.seen(block), self.betas[0]
        energy = block.e / (1 - beta1**block.t) * (n if beta == 1 else 1 - beta**n)
        return D.sqrt().clamp(min=1e-3 * math.sqrt(energy / D.numel()))

    def shared(self, X: Tensor) -> Tensor:
        """X, or in place of every entry the mean of its row (its first mode) or of the block."""
        if self.moment == "row":
            return torch.stack([row.mean().expand_as(row) for row in X])
        return X if self.moment == "entry" else X.mean().expand_as(X)

    def observe_(self, block: Block, G: Tensor) -> None:
        """L_i ← β2 L_i + (1−β2) G_(i) G_(i)ᵀ, Eq. (ema-shampoo)."""
        if self.factors == "kl" and not block.elementwise:
            self.observe_whitened_(block, G)
            return
        for i, L in enumerate(block.L):
            if L is not None:
                block.L[i] = average(L, unfold(G, i) @ unfold(G, i).T, self.betas[1])

    def observe_whitened_(self, block: Block, G: Tensor) -> None:
        """KL-Shampoo: L_i ← β2 L_i + (1−β2)/∏_{j≠i} d_j · G_(i) (⊗_{j≠i} S_j⁻¹) G_(i)ᵀ, S before
        this step."""
        if not G.any():
            block.L = [None if L is None else average(L, 0.0 * L, self.betas[1]) for L in block.L]
            return
        inverses: list[Tensor | None] = []
        for λ, Q in zip(self.spectra(block, self.seen(block) - 1), block.Q, strict=True):
            if λ is None:
                inverses.append(None)
            elif λ.sum() > 0:
                inverses.append(Q @ torch.diag(1 / λ) @ Q.T)
            else:
                inverses.append(torch.eye(len(Q), dtype=Q.dtype) / self.first(block, G))
        for i, L in enumerate(block.L):
            if L is not None:
                others = [None if j == i else S for j, S in enumerate(inverses)]
                columns = G.numel() / G.shape[i]
                new = unfold(G, i) @ unfold(apply(others, G), i).T / columns
                block.L[i] = average(L, new, self.betas[1])

    def seen(self, block: Block) -> int:
        """How many gradients the factors have seen with this one."""
        return block.age

    def first(self, block: Block, G: Tensor) -> float:
        """s: all gradients before this one were zero, so its square alone is in the average."""
        beta2, k = self.betas[1], sum(L is not None for L in block.L)
        energy = average(0.0, (G**2).mean(), beta2) / bias(beta2, self.seen(block))
        return energy.item() ** (1 / k)

    def spectra(self, block: Block, t: int) -> list[Tensor | None]:
        """The eigenvalues of every S_i; zero before any signal, None without a factor."""
        result: list[Tensor | None] = []
        for L, Q in zip(block.L, block.Q, strict=True):
            if L is None:
                result.append(None)
                continue
            λ = (Q.T @ L @ Q).diag().clamp(min=0.0) / bias(self.betas[1], max(t, 1))
            result.append(λ + 0.01 * λ.mean())
        return result

    def checks(self, block: Block) -> bool:
        """Whether the criterion is evaluated at this step of the block."""
        t = block.t if self.statistics == "step" else block.n
        if self.statistics == "observe" and t == 0:
            return False
        if self.frequency == "auto":
            return is_spread_check(t, self.betas[1], self.novelty, block.offset)
        return t % self.frequency == 0

    def may_compute(self, block: Block, i: int) -> bool:
        """Whether the credit of a factor allows what is known of the cost of its next basis."""
        t, ν = block.age, self.novelty
        allowance = (1 + math.log(max(1.0, ν * t))) / ν  # all while νt < 1
        if self.budget is None or block.computed[i] + 1 <= allowance:
            return True
        d = len(block.L[i])
        known = {"eigh": eigh_cost(d), "power": qr_cost(d), "qr": qr_cost(d), "partial": 0}
        earned = self.budget * block.age * (3 * block.M.numel() * d)
        return block.spent[i] + known[self.solver] <= earned

    def count_(self, block: Block, i: int, cost: float) -> None:
        block.spent[i] += cost
        block.computed[i] += 1

    def refresh_(self, block: Block) -> list[bool]:
        """New bases where the criterion does not hold; says which modes have one (Alg. 2)."""
        return [L is not None and self.refresh_mode_(block, i) for i, L in enumerate(block.L)]

    def refresh_mode_(self, block: Block, i: int) -> bool:
        L, Q = block.L[i], block.Q[i]
        tau = self.tau(block.age) if callable(self.tau) else self.tau
        error = criterion(Q.T @ L @ Q)
        keep = tau > 0 and error <= tau  # τ = 0 recomputes always; the criterion never exceeds 1
        if not keep and not self.may_compute(block, i):
            keep = True
            block.waited[i] += 1
        block.history[i].append((block.age, error, not keep))
        if keep:
            return False
        order, d = None, len(L)
        if self.solver == "eigh":
            Q_new, cost = eigenbasis(L, Q), eigh_cost(d)
        elif self.solver == "qr":  # the library makes its first iteration without a test
            Q_new, iterations = counted_qr_algorithm(L, Q, tau, self.qr_iterations)
            cost = max(1, iterations) * qr_cost(d)
        elif self.solver == "power":
            (Q_new, order), cost = power_step(L, Q), qr_cost(d)
        else:
            V, size = partial_change(Q.T @ L @ Q, 0.5 * tau)
            Q_new, cost = Q @ V, eigh_cost(size) + 2 * d * size**2
        if self.correction == "basis_aware":  # D ← (Q_newᵀ Q)^{⊙2} D on this mode
            block.D = mode_product((Q_new.T @ Q) ** 2, block.D, i)
        elif order is not None and self.scale_moves:
            block.D = block.D.index_select(i, order)
        block.Q[i] = Q_new
        self.count_(block, i, cost)
        return True


# The methods --------------------------------------------------------------------------------------


@dataclass
class AdamW(Oracle):
    """AdamW on every parameter, the first row of the design's table."""

    _: KW_ONLY
    matrices: str = "adam"

    def direction(self, block: Block, G: Tensor) -> Tensor:
        block.t += 1
        return self.adam_(block, G, self.betas[1])


@dataclass
class EShampoo(Oracle):
    """Eigenvalue-corrected Shampoo, Algorithm 2; Algorithm 1's D* with correction="optimal"."""

    betas: tuple[float, float] = (0.9, 0.95)
    _: KW_ONLY
    beta3: float | None = None
    correction: str = "naive"

    def direction(self, block: Block, G: Tensor) -> Tensor:
        block.t += 1
        beta2 = self.betas[1]
        beta3 = beta2 if self.beta3 is None else self.beta3
        if block.elementwise:
            return self.adam_(block, G, beta3)
        M = self.momentum_(block, G)
        if self.learns(block):
            self.learn_(block, G)
        beta3 = beta2 if self.correction == "optimal" else beta3
        D = self.optimal(block) if self.correction == "optimal" else block.D
        root = self.floored(block, D, beta3) / math.sqrt(bias(beta3, block.age))
        U = apply(transposed(block.Q), M) / (root ** (2 * self.exponent) + self.eps)
        return apply(block.Q, U)

    def learn_(self, block: Block, G: Tensor) -> None:
        super().learn_(block, G)
        beta2 = self.betas[1]
        if self.correction == "optimal":
            block.A = average(block.A, torch.outer(G.flatten(), G.flatten()), beta2)
        else:
            seen = self.shared(apply(transposed(block.Q), G) ** 2)
            block.D = average(block.D, seen, beta2 if self.beta3 is None else self.beta3)

    def optimal(self, block: Block) -> Tensor:
        """D* = diag(Qᵀ A Q) with Q = Q_1 ⊗ Q_2 ⊗ … (row-major vec), Proposition 2."""
        Q = torch.ones(1, 1, dtype=torch.float64)
        for Q_i, d in zip(block.Q, block.M.shape, strict=True):
            Q = torch.kron(Q, torch.eye(d).double() if Q_i is None else Q_i.contiguous())
        return (Q.T @ block.A @ Q).diag().clamp(min=0).view(block.M.shape)


@dataclass
class FullMatrixAdam(EShampoo):
    """Full-matrix Adam: EShampoo with every parameter as one mode."""

    betas: tuple[float, float] = (0.9, 0.999)
    _: KW_ONLY
    vectors: str = "full"

    def modes(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        size = math.prod(shape)  # one element alone is Adam, as everywhere
        return None if super().modes(shape) is None else (size,) if size > 1 else ()


def positive(λ: Tensor, eps: float) -> Tensor:
    """λ − min(λ_min, 0) + ε: negative rounding shifted away, then the damping."""
    return λ - min(λ.min().item(), 0.0) + eps


@dataclass
class Shampoo(Oracle):
    """Shampoo and Shampoo² with stale or fresh eigenvalues and grafting, Algorithm 3."""

    _: KW_ONLY
    tau: float | Callable[[int], float] = 0.0
    frequency: int | str = 100
    budget: float | None = None
    rms: float | str | None = None
    variant: str = "shampoo"
    trace_scaling: bool = False
    graft: str | None = "adam"
    graft_scope: str = "parameter"
    eigenvalues: str = "stale"

    scale_moves = False

    def directions(self, blocks: list[Block], Gs: list[Tensor]) -> list[Tensor]:
        for block in blocks:
            block.t += 1
        if blocks[0].elementwise:
            return [self.adam_(blocks[0], Gs[0], self.betas[1])]
        Ms = [self.momentum_(block, G) for block, G in zip(blocks, Gs, strict=True)]
        grafts = [self.graft_(*each) for each in zip(blocks, Gs, Ms, strict=True)]
        for block, G in zip(blocks, Gs, strict=True):
            if self.learns(block):
                self.learn_(block, G)
        if self.graft is not None and not blocks[0].checked:
            return grafts
        Us = [apply(block.root, M) for block, M in zip(blocks, Ms, strict=True)]
        if self.graft is None:
            return Us
        if self.graft_scope == "block":
            return [self.grafted([U], [V])[0] for U, V in zip(Us, grafts, strict=True)]
        return self.grafted(Us, grafts)

    def refresh_(self, block: Block) -> None:
        # A basis that holds at the first check is the first basis, with its eigenvalues.
        first, block.checked = not block.checked, True
        for i, new in enumerate(super().refresh_(block)):
            if block.L[i] is not None and (new or first or self.eigenvalues == "fresh"):
                block.root[i] = self.root(block, i)

    def root(self, block: Block, i: int) -> Tensor:
        """Q (Λ + ε)^e Qᵀ with Λ = diag(Qᵀ L Q)/(1−β2^t), e = −p/k or (Shampoo²) −p."""
        k = sum(L is not None for L in block.L)
        L = block.L[i] / bias(self.betas[1], block.age)
        Q = block.Q[i]
        λ = (Q.T @ L @ Q).diag()
        if self.trace_scaling and L.trace() > 0:
            λ = λ * L.trace() ** (-(k - 1) / k)
        exponent = -self.exponent / k if self.variant == "shampoo" else -self.exponent
        return Q @ torch.diag(positive(λ, self.eps) ** exponent) @ Q.T

    def graft_(self, block: Block, G: Tensor, M: Tensor) -> Tensor:
        """The grafting method's own direction; all share the bias-corrected momentum."""
        beta2 = self.betas[1]
        if self.graft in (None, "sgd"):
            return M
        seen = self.shared(G**2)
        block.D = average(block.D, seen, 1.0 if self.graft == "adagrad" else beta2)
        D = block.D / bias(beta2, block.t) if self.graft == "adam" else block.D
        return M / (D.sqrt() + self.eps)


@dataclass
class CASPR(Oracle):
    """CASPR with the eigenvalues of every step in the current basis.

    The published update of a matrix, (L^{-1/2}M + 2 L^{-1/4}MR^{-1/4} + MR^{-1/2})/4, is the mean
    over both sides of a sum over both sides; for k modes the product of k such sums.
    """

    _: KW_ONLY
    tau: float | Callable[[int], float] = 0.0
    frequency: int | str = 100
    budget: float | None = None
    rms: float | str | None = None

    def direction(self, block: Block, G: Tensor) -> Tensor:
        block.t += 1
        if block.elementwise:
            return self.adam_(block, G, self.betas[1])
        U = self.momentum_(block, G)
        if self.learns(block):
            self.learn_(block, G)
        roots = {}
        k = sum(L is not None for L in block.L)
        for i, (L, Q) in enumerate(zip(block.L, block.Q, strict=True)):
            if L is not None:
                λ = positive((Q.T @ L @ Q).diag() / bias(self.betas[1], block.age), self.eps)
                roots[i] = Q @ torch.diag(λ ** (-self.exponent / k)) @ Q.T
        for _ in range(k):
            U = sum(mode_product(A, U, i) for i, A in roots.items()) / k
        return U


@dataclass
class Muon(Oracle):
    """Muon: the polynomial of Newton–Schulz on the singular values of the momentum.

    Vectors are under AdamW, without a look ahead.
    """

    _: KW_ONLY
    weight_decay: float = 0.1
    momentum: float = 0.95
    ns_steps: int = 5
    nesterov: bool = True
    rms: float | str | None = None

    def cut(self, W: Tensor) -> list[Block]:
        large = [d for d in W.shape if d != 1]
        whole = len(large) > 1 and self.matrices == "kronecker"
        modes = (large[0], math.prod(large[1:])) if whole else tuple(W.shape)
        return [Block(modes, tuple(slice(0, d) for d in modes), [False] * len(modes))]

    def direction(self, block: Block, G: Tensor) -> Tensor:
        block.t += 1
        if len(block.modes) != 2 or 1 in block.modes or self.matrices == "adam":
            ahead, self.nesterov = self.nesterov, False
            U = self.adam_(block, G, self.betas[1])
            self.nesterov = ahead
            return U
        block.M = self.momentum * block.M + (1 - self.momentum) * G
        M = self.momentum * block.M + (1 - self.momentum) * G if self.nesterov else block.M
        U, σ, Vt = torch.linalg.svd(M, full_matrices=False)
        σ = σ / torch.linalg.norm(σ)
        for _ in range(self.ns_steps):
            σ = 3.4445 * σ - 4.7750 * σ**3 + 2.0315 * σ**5
        return 0.2 * math.sqrt(max(M.shape)) * U @ torch.diag(σ) @ Vt


@dataclass
class SOAP(Oracle):
    """SOAP as its authors' code does it (design, section 5)."""

    lr: float = 3e-3
    betas: tuple[float, float] = (0.95, 0.95)
    _: KW_ONLY
    tau: float | Callable[[int], float] = 0.0
    frequency: int | str = 10
    budget: float | None = None
    rms: float | str | None = None
    solver: str = "power"
    max_dim: int = 10000
    oversize: str = "identity"

    def update_(self, W: Tensor, blocks: list[Block], Gs: list[Tensor]) -> None:
        if not blocks[0].observed:  # the first gradient builds the basis: no update, no decay, no t
            for block, G in zip(blocks, Gs, strict=True):
                self.first_basis_(block, G)
            return
        for block, U in zip(blocks, self.sized(blocks, Gs), strict=True):
            w = block.of(W)
            w -= self.lr * U
            w -= self.lr * self.weight_decay * w

    def first_basis_(self, block: Block, G: Tensor) -> None:
        self.observe_(block, G)
        for i, L in enumerate(block.L):
            if L is not None:
                block.Q[i] = eigenbasis(L, block.Q[i], descending=True)
                self.count_(block, i, eigh_cost(len(L)))
        block.observed = True

    def seen(self, block: Block) -> int:
        return block.t + 1  # t does not count the first one

    def direction(self, block: Block, G: Tensor) -> Tensor:
        block.t += 1
        beta2 = self.betas[1]
        M = self.momentum_(block, G)
        squares = apply(transposed(block.Q), G) ** 2
        seen = squares if block.elementwise else self.shared(squares)
        block.D = average(block.D, seen, beta2)
        p = 0.5 if block.elementwise else self.exponent
        self.observe_(block, G)
        root = self.floored(block, block.D, beta2) ** (2 * p)
        scaled = apply(transposed(block.Q), M) / (root + self.eps) * bias(beta2, block.t) ** p
        U = apply(block.Q, scaled)
        if self.checks(block):
            self.refresh_(block)
        return U


@dataclass
class KLShampoo(Oracle):
    """KL-Shampoo: each factor whitened by the others, eigenvalues of every step.

    S_i = Q (λ + 0.01 mean λ) Qᵀ with λ = diag(Qᵀ L_i Q)/(1−β2^t). Before any signal S_i = s I,
    where s^k = E G² is the bias-corrected average of the mean square of G.
    """

    _: KW_ONLY
    tau: float | Callable[[int], float] = 0.0
    frequency: int | str = 10
    budget: float | None = None
    rms: float | str | None = None
    factors: str = "kl"

    def direction(self, block: Block, G: Tensor) -> Tensor:
        block.t += 1
        if block.elementwise:
            return self.adam_(block, G, self.betas[1])
        M = self.momentum_(block, G)
        if self.learns(block):
            self.learn_(block, G)
        root = torch.ones_like(M)
        for i, λ in enumerate(self.spectra(block, block.age)):
            if λ is not None:
                root = mode_product(torch.diag(λ**self.exponent), root, i)
        return apply(block.Q, apply(transposed(block.Q), M) / (root + self.eps))
