"""Batched linear algebra: mode products, averages of Gram matrices, and the criterion.

Legend: X is a stack [N, d_1, …, d_k] of N blocks of order k; Q, V [N, d, d] are stacks of
orthogonal matrices; Λ̂ = QᵀLQ [N, d, d] is a factor seen in its current basis. Modes count from 0,
so mode i is dimension i + 1 of a stack. Functions that end in _ write into an argument; the others
are pure.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.linalg import diagonal

# For an X of at least this size, only the lower block triangle of XXᵀ is computed: 30 % faster.
GRAM_ROWS, GRAM_COLUMNS = 384, 256

# How many entries of a matrix with one basis are rotated at a time on a CPU, to stay in its cache:
# the other side, such as a vocabulary, is long.
STRIP = 1 << 19

# a, b, c of the quintic Newton–Schulz iteration, chosen for a steep slope at zero (Jordan, 2024).
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)

# Integers as wide as the floats of the state: 0 times the bits of NaN is 0, while 0 · NaN is NaN.
# masked_fill_ takes five times as long.
BITS = {torch.float32: torch.int32, torch.float64: torch.int64}

# A stack of matrices [N, d_i, d_i] for some modes i.
ByMode = Mapping[int, Tensor]


def along(vector: Tensor, mode: int, order: int) -> Tensor:
    """Vectors [N, d] as [N, 1, …, d, …, 1], to scale mode i of a stack of blocks of this order."""
    return vector.view(vector.shape[0], *([1] * mode), -1, *([1] * (order - mode - 1)))


# -------------------------------------------------------------------- products


def unfold(X: Tensor, mode: int) -> Tensor:
    """The mode-i unfolding [N, d_i, ∏ other d_j]; a view for the first and the last mode."""
    if X.dim() == 3:  # matrices: nothing to fold
        return X if mode == 0 else X.transpose(1, 2)
    return X.movedim(mode + 1, 1).flatten(2) if X.dim() > 2 else X.unsqueeze(2)


def mode_product(X: Tensor, A: Tensor, mode: int) -> Tensor:
    """X ×_i Aᵀ: multiply mode i of every block by the transpose of A [N, d_i, e]."""
    N, *dims = X.shape
    if len(dims) == 2:  # matrices: nothing to fold
        return torch.bmm(X, A) if mode == 1 else torch.bmm(A.transpose(1, 2), X)
    if mode == len(dims) - 1:  # rows times A: no copy
        Y = torch.bmm(X.reshape(N, -1, dims[-1]), A)
        return Y.view(N, *dims[:-1], A.shape[2])
    Y = torch.bmm(A.transpose(1, 2), unfold(X, mode))
    rest = dims[:mode] + dims[mode + 1 :]
    return Y.view(N, A.shape[2], *rest).movedim(1, mode + 1)


def rotate_(X: Tensor, matrices: ByMode, transposed: ByMode) -> Tensor:
    """X ← A_Lᵀ X A_R for blocks of any order (Lemma 1); A = Q leads into the eigenbasis."""
    if X.dim() == 3 and len(matrices) == 2:  # matrices: the last product goes where X was
        return torch.bmm(torch.bmm(transposed[0], X), matrices[1], out=X)
    if X.dim() == 3 and len(matrices) == 1 and X.device.type == "cpu":
        ((mode, A),) = matrices.items()
        for strip in torch.split(X, max(1, STRIP // A.shape[1]), 2 - mode):
            strip.copy_(mode_product(strip, A, mode))
        return X
    Y = X
    for mode, A in matrices.items():
        Y = mode_product(Y, A, mode)
    return X if Y is X else X.copy_(Y)


def rotate_mode(X: Tensor, mode: int, V: Tensor, subset: Tensor | None) -> Tensor:
    """X ×_i Vᵀ; with a `subset` [N, s], V acts on these coordinates only."""
    Y = mode_product(take(X, subset, mode), V, mode)
    return Y if subset is None else put_(X.clone(), Y, subset, mode)


def orthonormalize(Q: Tensor) -> Tensor:
    """One Newton–Schulz step Q(3I − QᵀQ)/2: squares a small departure from orthogonality."""
    QtQ = torch.bmm(Q.transpose(1, 2), Q)
    return torch.baddbmm(Q, Q, QtQ, beta=1.5, alpha=-0.5)


def polar_factor(X: Tensor, iterations: int) -> Tensor:
    """Approximate UVᵀ of X = UΣVᵀ by Newton–Schulz: X ← aX + (bA + cA²)X, A = XXᵀ, from X/‖X‖_F.

    The iteration is quick rather than exact: singular values end between 0.7 and 1.2. An X whose
    squares vanish counts as zero.
    """
    a, b, c = NEWTON_SCHULZ
    tall = X.shape[1] > X.shape[2]
    Y = X.transpose(1, 2) if tall else X
    norm = torch.linalg.vector_norm(Y, dim=(1, 2), keepdim=True)
    Y = Y / norm.masked_fill(norm <= math.sqrt(torch.finfo(X.dtype).tiny), math.inf)
    for _ in range(iterations):
        A = torch.bmm(Y, Y.transpose(1, 2))
        Y = torch.baddbmm(Y, torch.baddbmm(A, A, A, beta=b, alpha=c), Y, beta=a)
    return Y.transpose(1, 2) if tall else Y


# -------------------------------------------------------------------- averages


def means(X: Tensor, like: Tensor) -> Tensor:
    """X averaged over the modes in which `like` has a single entry."""
    single = [dim for dim in range(1, X.dim()) if like.shape[dim] == 1]
    return X.mean(single, keepdim=True) if single else X


def average_(average: Tensor, value: Tensor, beta: float, share: Tensor) -> None:
    """X ← βX + (1−β)·value, or X + value for β = 1 (AdaGrad's sum).

    `share` is 1 − β, or 1 in a sum, and 0 for the blocks whose average must keep every bit.
    """
    if beta < 1:
        average.lerp_(value, share)
    else:
        average.addcmul_(value, share)


def average_gram_(factor: Tensor, X: Tensor, mode: int, beta: float, share: Tensor) -> None:
    """L ← βL + (1−β) XXᵀ with the mode-i unfolding of X; if large, in block rows and mirrored."""
    X = unfold(X, mode)
    N, d, r = X.shape
    if d < GRAM_ROWS or r < GRAM_COLUMNS:
        average_(factor, torch.bmm(X, X.transpose(1, 2)), beta, share)
        return
    height = -(-d // 4)
    for start in range(0, d, height):
        rows = slice(start, min(start + height, d))
        product = torch.bmm(X[:, rows], X[:, : rows.stop].transpose(1, 2))
        average_(factor[:, rows, : rows.stop], product, beta, share)
        if start == 0:  # nothing to the left of the diagonal block
            continue
        # The strip is mirrored through a buffer whose rows are not a power of two apart, because
        # entries of a column at such distances would evict each other from the cache.
        strip = product.new_empty(N, product.shape[1], start + 16)[:, :, :start]
        strip.copy_(factor[:, rows, :start])
        factor[:, :start, rows] = strip.transpose(1, 2)


# -------------------------------------------------------------------- the criterion


def off_diagonal(A: Tensor) -> Tensor:
    """All entries of A [..., d, d] but the diagonal, [..., d-1, d]; a view if A is contiguous."""
    d = A.shape[-1]
    return A.flatten(-2)[..., 1:].reshape(*A.shape[:-2], d - 1, d + 1)[..., :-1]


def criterion(A: Tensor) -> Tensor:
    """‖Λ̂ − diag Λ̂‖_F / ‖Λ̂‖_F ∈ [0, 1], per matrix (Eq. criterion); 0 for a zero matrix."""
    inside = torch.linalg.vector_norm(diagonal(A), dim=-1)
    return off_share(off_norm(off_diagonal(A)), inside)


def off_norm(off: Tensor) -> Tensor:
    """‖Λ̂ − diag Λ̂‖_F from a view of the off-diagonal entries.

    Subtracting the squares of the diagonal from ‖Λ̂‖² would lose all digits in float32.
    """
    rows = torch.linalg.vector_norm(off, dim=-1)  # row by row: much faster on a CPU
    norms: Tensor = torch.linalg.vector_norm(rows, dim=-1)
    return norms


def off_share(off: Tensor, inside: Tensor) -> Tensor:
    """The criterion, from the norms of the off-diagonal entries of Λ̂ and of its diagonal."""
    total = torch.hypot(off, inside)
    share = torch.where(total > 0, off / total, torch.zeros_like(off)).clamp_(max=1.0)
    return share.masked_fill_(total.isinf(), 1.0)  # squares overflowed: be safe, compute a basis


# -------------------------------------------------------------------- coordinates of a mode


def take(X: Tensor, index: Tensor | None, mode: int) -> Tensor:
    """The coordinates `index` [N, s] of mode i; all of them for None."""
    return X if index is None else X.gather(mode + 1, _expand(index, X, mode))


def put_(X: Tensor, value: Tensor, index: Tensor | None, mode: int) -> Tensor:
    """Write `value` into the coordinates `index` of mode i; into all of them for None."""
    return X.copy_(value) if index is None else X.scatter_(mode + 1, _expand(index, X, mode), value)


def _expand(index: Tensor, X: Tensor, mode: int) -> Tensor:
    shape = list(X.shape)
    shape[mode + 1] = index.shape[1]
    return along(index, mode, X.dim() - 1).expand(shape)
