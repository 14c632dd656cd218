"""What a lean state is made of: triangles of symmetric matrices, and numbers in fewer bits.

Legend: A [N, d, d] is symmetric, P [N, d(d+1)/2] its triangle. With A cut into

    A_11  A_21ᵀ        A_11 [m, m], m = ⌈d/2⌉
    A_21  A_22         A_22 [n, n], n = ⌊d/2⌋

P holds T [m, n+1] and then A_21. The lower triangle of T is that of A_11, and the rest of T is the
upper triangle of A_22: T_ij = (A_11)_ij for j ≤ i, (A_22)_{i,j−1} for j > i. So all are views of P.

A momentum that is rounded to the nearest bfloat16 stalls where a step changes it by less than half
of its last bit. Here, the nearer it is to its upper neighbour, the more often it is rounded up: the
16 bits to be dropped are compared with a threshold that runs evenly through all values, over the
entries of a block and over the steps. The threshold depends on the position and t alone, so ranks
and resumed runs agree.
"""

from math import isqrt, sqrt

import torch
from torch import Tensor

from .linalg import (
    GRAM_COLUMNS,
    GRAM_ROWS,
    average_,
    off_diagonal,
    off_norm,
    unfold,
)

# Steps of an additive recurrence modulo 2³², along a block and over time: together they fill the
# unit square evenly (powers of the root of x³ = x + 1). As signed numbers, which wrap.
ALONG, ONWARD = 0xC13FA9A9 - (1 << 32), 0x91E10DA5 - (1 << 32)

# -------------------------------------------------------------------- triangles


def triangle_size(d: int) -> int:
    """The number of entries of a triangle with its diagonal."""
    return d * (d + 1) // 2


def side(A: Tensor) -> int:
    """The size d of matrices, whole or as triangles."""
    return A.shape[1] if A.dim() == 3 else (isqrt(8 * A.shape[1] + 1) - 1) // 2


def pack(A: Tensor) -> Tensor:
    """Symmetric matrices as triangles."""
    N, d, _ = A.shape
    P = A.new_zeros(N, triangle_size(d))
    A_11, A_22, A_21 = _views(P)
    m = d - d // 2
    A_21.copy_(A[:, m:, :m])
    A_11.copy_(A[:, :m, :m].tril())
    A_22.add_(A[:, m:, m:].triu())
    return P


def unpack(A: Tensor) -> Tensor:
    """Whole matrices from triangles; matrices that are whole stay as they are."""
    if A.dim() == 3:
        return A
    A_11, A_22, A_21 = _views(A)
    d, m = side(A), A_11.shape[1]
    found = A.new_empty(len(A), d, d)
    found[:, m:, :m] = A_21
    found[:, :m, m:] = A_21.mT
    torch.add(A_11.tril(), A_11.tril(-1).mT, out=found[:, :m, :m])
    torch.add(A_22.triu(), A_22.triu(1).mT, out=found[:, m:, m:])
    return found


def like_storage(A: Tensor, like: Tensor) -> Tensor:
    """Symmetric matrices stored like `like`, whole or as triangles."""
    return A if A.dim() == like.dim() else pack(A) if like.dim() == 2 else unpack(A)


def diagonal_of(A: Tensor) -> Tensor:
    """The diagonals [N, d]; a view if the matrices are whole."""
    if A.dim() == 3:
        return A.diagonal(dim1=1, dim2=2)
    A_11, A_22, _ = _views(A)
    return torch.cat([A_11.diagonal(dim1=1, dim2=2), A_22.diagonal(dim1=1, dim2=2)], 1)


def off_norm_of(A: Tensor) -> Tensor:
    """‖Λ̂ − diag Λ̂‖_F, whole or from triangles; nothing is subtracted."""
    if A.dim() == 3:
        return off_norm(off_diagonal(A))
    T, A_21 = _rectangles(A)
    m, width = T.shape[1:]
    norm = off_norm(A_21)
    if m > 1:  # between two rows of T stand a diagonal entry of A_11 and one of A_22
        between = T.flatten(1)[:, 2:].unfold(1, width - 1, width + 1)
        norm = torch.hypot(norm, off_norm(between))
    return norm * sqrt(2.0)


def average_triangle_(factor: Tensor, X: Tensor, mode: int, beta: float, share: Tensor) -> None:
    """The triangle of L ← βL + (1−β) XXᵀ with the mode-i unfolding of X."""
    X = unfold(X, mode)
    _, d, r = X.shape
    A_11, A_22, A_21 = _views(factor)
    m = A_11.shape[1]
    # A share of 0 keeps every bit: `tril` and `triu` give it to entries of the other triangle.
    if d < GRAM_ROWS or r < GRAM_COLUMNS:
        product = torch.bmm(X, X.mT)
        average_(A_21, product[:, m:, :m], beta, share)
        average_(A_11, product[:, :m, :m], beta, share.expand_as(A_11).tril())
        average_(A_22, product[:, m:, m:], beta, share.expand_as(A_22).triu())
        return
    X_1, X_2 = X[:, :m], X[:, m:]
    average_(A_21, torch.bmm(X_2, X_1.mT), beta, share)  # the rest in strips of rows
    for start, stop in ((0, d // 4), (d // 4, m)):
        upper, lower = A_22[:, start:stop, start:], A_11[:, start:stop, :stop]
        product = torch.bmm(X_1[:, start:stop], X_1[:, :stop].mT)
        average_(lower, product, beta, share.expand_as(lower).tril(start))
        product = torch.bmm(X_2[:, start:stop], X_2[:, start:].mT)
        average_(upper, product, beta, share.expand_as(upper).triu())


def _rectangles(P: Tensor) -> tuple[Tensor, Tensor]:
    """The views T [N, m, n+1] and A_21 [N, n, m]."""
    N, d = len(P), side(P)
    m, n = d - d // 2, d // 2
    return P[:, : m * (n + 1)].view(N, m, n + 1), P[:, m * (n + 1) :].view(N, n, m)


def _views(P: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views of A_11, lower triangle only, of A_22, upper triangle only, and of A_21."""
    T, A_21 = _rectangles(P)
    m, width = T.shape[1:]
    return T[:, :, :m], T[:, : width - 1, 1:], A_21


# -------------------------------------------------------------------- fewer bits


def average_rounded_(M: Tensor, value: Tensor, share: Tensor, t: Tensor, start: int = 0) -> Tensor:
    """M ← M + share · (value − M), rounded if M has fewer bits than `value`; returns it unrounded.

    M [N, c] holds the entries from `start` on of N blocks. A share of 0 keeps every bit of M.
    """
    if M.dtype == value.dtype:
        return M.lerp_(value, share)
    average = M.to(value.dtype).lerp_(value, share)
    if M.dtype == torch.bfloat16:
        bits = thresholds(t, start, M.shape[1]).add_(average.view(torch.int32))
        M.view(torch.int16).copy_(bits.bitwise_right_shift_(16))
    else:
        M.copy_(average)
    return average


def thresholds(t: Tensor, start: int, size: int) -> Tensor:
    """Thresholds below 2¹⁶ [N, size] for the entries from `start` on of blocks at step t."""
    k = torch.arange(start, start + size, dtype=torch.int32, device=t.device)
    numbers = (t.to(torch.int32) * ONWARD).unsqueeze(1) + k.mul_(ALONG)
    return numbers.bitwise_right_shift_(16).bitwise_and_(0xFFFF)
