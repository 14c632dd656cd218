"""What a lean state is made of: triangles of symmetric matrices, and numbers in fewer bits.

Legend: A [N, d, d] is symmetric, P [N, d(d+1)/2] its triangle. With A cut into

    A_11  A_21ᵀ        A_11 [m, m], m = ⌈d/2⌉
    A_21  A_22         A_22 [n, n], n = ⌊d/2⌋

P holds T [m, n+1] and then A_21. The lower triangle of T is that of A_11, and the rest of T is the
upper triangle of A_22: T_ij = (A_11)_ij for j ≤ i, (A_22)_{i,j−1} for j > i.

A momentum that is rounded to the nearest bfloat16 stalls where a step changes it by less than half
of its last bit. Here, the nearer it is to its upper neighbour, the more often it is rounded up: the
16 bits to be dropped are compared with a threshold that runs evenly through all values, over the
entries of a block and over the steps. The threshold depends on the position and t alone, so ranks
and resumed runs agree.
"""

from functools import lru_cache
from math import isqrt

import torch
from torch import Tensor

from .linalg import average_gram_

# Steps of an additive recurrence modulo 2³², along a block and over time: together they fill the
# unit square evenly (powers of the root of x³ = x + 1). As signed numbers, which wrap.
ALONG, ONWARD = 0xC13FA9A9 - (1 << 32), 0x91E10DA5 - (1 << 32)

# -------------------------------------------------------------------- triangles


@lru_cache(maxsize=64)
def places(d: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where each entry of A stands in P [d, d], and which entry of A each of P is [d(d+1)/2]."""
    m, n = d - d // 2, d // 2
    k = torch.arange(d, device=device)
    i, j = torch.maximum(k.unsqueeze(1), k), torch.minimum(k.unsqueeze(1), k)
    in_T = torch.where(j < m, i * (n + 1) + j, (j - m) * (n + 1) + i - m + 1)
    place = torch.where((i >= m) & (j < m), m * (n + 1) + (i - m) * m + j, in_T)
    lower = torch.ones_like(place, dtype=torch.bool).tril().flatten()
    return place, lower.nonzero().squeeze(1)[place.flatten()[lower].argsort()]


def pack(A: Tensor) -> Tensor:
    """Symmetric matrices as triangles."""
    return A.flatten(1).index_select(1, places(A.shape[1], A.device)[1])


def unpack(A: Tensor) -> Tensor:
    """Whole matrices from triangles; matrices that are whole stay as they are."""
    if A.dim() == 3:
        return A
    place = _place(A)
    return A.index_select(1, place.flatten()).view(-1, *place.shape)


def diagonal_of(P: Tensor) -> Tensor:
    """The diagonals [N, d] of triangles."""
    return P.index_select(1, _place(P).diagonal())


def average_triangle_(P: Tensor, X: Tensor, mode: int, beta: float, share: Tensor) -> None:
    """The triangle of L ← βL + (1−β) XXᵀ with the mode-i unfolding of X."""
    A = unpack(P)
    average_gram_(A, X, mode, beta, share)
    P.copy_(pack(A))


def _place(P: Tensor) -> Tensor:
    return places((isqrt(8 * P.shape[1] + 1) - 1) // 2, P.device)[0]


# -------------------------------------------------------------------- fewer bits


def average_rounded_(M: Tensor, value: Tensor, share: Tensor, t: Tensor, start: int = 0) -> Tensor:
    """M ← M + share · (value − M), rounded: M has fewer bits than `value`; returns it unrounded.

    M [N, c] holds the entries from `start` on of N blocks. A share of 0 keeps every bit of M.
    """
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
