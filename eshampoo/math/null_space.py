"""A null space that stays: where a factor is zero to rounding, its new columns keep to the old.

A solver returns an arbitrary basis V_0 of the null space of Λ̂: one ulp in a gradient gives another
one. D has an entry per column, so the next gradient that falls into the null space would turn the
ulp into a step of full size. The columns V_0 that are as near as any to the old ones are determined
by the null space itself (the orthogonal Procrustes problem).

Legend: V [K, d, d] are changes of bases in the coordinates of the old ones, so the old columns are
unit vectors; `null` [K, d] marks the columns of V that are in the null space.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]  # not in its __all__

from .linalg import diagonal, put_, take

# A direction whose overlap σ with all slots is below this has none that it is near to.
APART = 1e-4


def settle(
    V: Tensor,
    null: Tensor,
    nullity: Sequence[int],  # how many columns of each are in the null space
    old: Tensor | None = None,
) -> Tensor:
    """`nearest` for the matrices that have a null space; the others stay as they are."""
    members = [k for k, n in enumerate(nullity) if n > 0]
    if not members:
        return V
    if len(members) == len(V):
        return nearest(V, null, max(nullity), old)
    old = None if old is None else old[members]
    V = V.clone()
    V[members] = nearest(V[members], null[members], max(nullity), old)
    return V


def isolate_(A: Tensor, null: Tensor) -> None:
    """Zero the rows and columns of the null space but for their diagonal: they are rounding."""
    values = diagonal(A).clone()
    A.masked_fill_(null.unsqueeze(1) | null.unsqueeze(2), 0.0)
    diagonal(A).copy_(values)


def nearest(
    V: Tensor,  # [K, d, d]
    null: Tensor,  # [K, d]
    count: int,  # of null columns at most
    old: Tensor | None = None,  # [K, d]: the old column whose slot each column takes; None: its own
) -> Tensor:
    """V_0 ← V_0 polar(V_0[slots, :]ᵀ): the basis of the null space nearest to the old columns."""
    # The null columns in their order; a matrix that has fewer of them than `count` takes others
    # along, with the identity for their part of the polar factor.
    columns = null.byte().argsort(dim=1, descending=True, stable=True)[:, :count]
    inside = null.gather(1, columns)
    slots = columns if old is None else old.gather(1, columns)
    V_0 = take(V, columns, 1)
    W = take(V_0, slots, 0).masked_fill(~(inside.unsqueeze(1) & inside.unsqueeze(2)), 0.0)
    diagonal(W).masked_fill_(~inside, 1.0)
    turned = torch.bmm(V_0, _polar(W, V_0).transpose(1, 2))
    return put_(V.clone(), torch.where(inside.unsqueeze(1), turned, V_0), columns, 1)


def overlapping(V: Tensor, null: Tensor) -> Tensor:
    """The slots that the null space overlaps most with, in order: an `old` for `nearest`."""
    overlap = (V.square() * null.unsqueeze(1)).sum(2)
    most = overlap.argsort(dim=1, descending=True, stable=True)
    # As many slots are marked as there are null columns; then the k-th goes to the k-th.
    marked = torch.zeros_like(null).scatter_(1, most, null.sort(dim=1, descending=True).values)
    slots, columns = (x.byte().argsort(dim=1, descending=True, stable=True) for x in (marked, null))
    return torch.empty_like(columns).scatter_(1, columns, slots)


def _polar(W: Tensor, V_0: Tensor) -> Tensor:
    """UXᵀ, the orthogonal matrix nearest to W = V_0[slots, :] = UΣXᵀ.

    A direction of the null space at right angles to all slots (σ = 0) is as near to one free slot
    as to another: U_0 and X_0 would be arbitrary again. It often happens, because gradients have
    rows of zeros and because columns change their places. These directions go to the free slots
    in order, as far as they have one.
    """
    try:
        U, sigma, Xt = torch.linalg.svd(W)
        lost = sigma < APART
        if bool(lost.any()):
            U_0, X_0 = U * lost.unsqueeze(1), (Xt * lost.unsqueeze(2)).transpose(1, 2)
            directions = torch.bmm(V_0, X_0)
            # (1 − |k − l|)₊: the k-th coordinate of the lost directions is to go to the l-th slot.
            places = _places(directions).unsqueeze(1) - _places(U_0).unsqueeze(2)
            target = torch.bmm((1 - places.abs()).clamp_min_(0.0), _weighted(directions))
            target = _weighted(target)
            target = torch.bmm(U_0, torch.bmm(U_0.transpose(1, 2), target))
            kept = torch.bmm(U * ~lost.unsqueeze(1), Xt)
            U, _, Xt = torch.linalg.svd(kept + torch.bmm(target, X_0.transpose(1, 2)))
    except LinAlgError:  # any basis of the null space diagonalises Λ̂: keep the solver's
        return torch.eye(W.shape[1], dtype=W.dtype, device=W.device).expand_as(W)
    return torch.bmm(U, Xt)


def _weighted(X: Tensor) -> Tensor:
    """Rows times weights that differ, from 1 to 2: x_i − x_j meets x_i + x_j, and is not lost."""
    d = X.shape[1]
    return X * (1 + torch.arange(d, dtype=X.dtype, device=X.device) / d).unsqueeze(1)


def _places(X: Tensor) -> Tensor:
    """Where each coordinate stands in the span of the orthonormal (or zero) columns of X.

    For the span of some unit vectors these are ½, 3/2, …; in general a running sum of ‖x_i‖².
    """
    shares = X.square().sum(2)
    return shares.cumsum(1) - shares / 2
