"""A stable null space: where a factor is zero to rounding, new columns stay near the old ones.

A solver returns an arbitrary basis V_0 of the null space of Λ̂: one ulp in a gradient gives another
V_0. D has an entry per column, so the next gradient that falls into the null space would turn that
ulp into a step of full size. The V_0 nearest to the old columns, however, is determined by the null
space itself (the orthogonal Procrustes problem).

Legend: V [K, d, d] are changes of basis in the coordinates of the old bases, so the old columns are
unit vectors; `null` [K, d] marks the columns of V that are in the null space.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.linalg import diagonal

from .linalg import put_, take

# A direction whose overlap σ with all slots is below this is near none of them.
APART = 1e-4


def align_null_space(
    V: Tensor,
    null: Tensor,
    nullity: Sequence[int],  # how many columns of each V are in the null space
    old: Tensor | None = None,  # [K, d]: the old column whose slot each column takes; None: its own
) -> Tensor:
    """V with null spaces nearest to the old columns; matrices without a null space do not change.

    The work depends on the dimension of the null space or of its complement, whichever is smaller.
    """
    d = V.shape[1]
    small = [k for k, n in enumerate(nullity) if 0 < n <= d // 2]
    large = [k for k, n in enumerate(nullity) if n > d // 2]
    for members, nearest_basis in ((small, nearest), (large, nearest_beside)):
        if members:
            slots, sizes = None if old is None else old[members], [nullity[k] for k in members]
            if len(members) == len(V):
                return nearest_basis(V, null, slots, sizes)
            turned = nearest_basis(V[members], null[members], slots, sizes)
            V = V.index_copy(0, torch.tensor(members, device=V.device), turned)
    return V


def isolate_(A: Tensor, null: Tensor) -> None:
    """Zero the rows and columns of the null space, which are rounding, except on the diagonal."""
    values = diagonal(A).clone()
    A.masked_fill_(null.unsqueeze(1) | null.unsqueeze(2), 0.0)
    diagonal(A).copy_(values)


def nearest(V: Tensor, null: Tensor, old: Tensor | None, nullity: Sequence[int]) -> Tensor:
    """V_0 ← V_0 polar(V_0[slots, :]ᵀ): the basis of the null space nearest to the old columns.

    A matrix with fewer null columns than another one is padded with other columns, for which the
    polar factor is the identity.
    """
    columns, inside, slots = _first(null, max(nullity), old)
    V_0 = take(V, columns, 1)
    W = _square(V_0, slots, inside)
    P = _polar(W, lambda U_0, X_0: _pairing(U_0, torch.bmm(V_0, X_0)))
    turned = torch.bmm(V_0, P.transpose(1, 2))
    return put_(V.clone(), torch.where(inside.unsqueeze(1), turned, V_0), columns, 1)


def nearest_beside(V: Tensor, null: Tensor, old: Tensor | None, nullity: Sequence[int]) -> Tensor:
    """The same basis, from the other columns V_1 alone, of which there are fewer.

    V_0V_0ᵀ = I − V_1V_1ᵀ, so with C = V_1[rest, :], B = V_1[slots, :] and P = polar(C)

        V_0[slots, :] = I − B (I + PᵀC)⁻¹ Bᵀ,   V_0[rest, :] = −P Bᵀ
    """
    rank = max(1, V.shape[1] - min(nullity))
    columns, inside, rest = _first(~null, rank, old)
    V_1 = take(V, columns, 1) * inside.unsqueeze(1)
    C = _square(V_1, rest, inside)
    E = torch.zeros_like(V_1).scatter_(1, rest.unsqueeze(1), inside.unsqueeze(1).to(V.dtype))
    is_rest = E.sum(2)  # [K, d]
    B = V_1 * (1 - is_rest).unsqueeze(2)
    # A direction E Y_0 of the null space that is near no slot goes to a free slot, B X_0.
    P = _polar(C, lambda Y_0, X_0: -_pairing(B @ X_0, E @ Y_0).transpose(1, 2))
    # By QR: for two or more matrices, MKL's LU on several threads returns pivots of 0.
    Q, R = torch.linalg.qr(torch.eye(rank, dtype=V.dtype, device=V.device) + P.transpose(1, 2) @ C)
    H = torch.linalg.solve_triangular(R, Q.transpose(1, 2), upper=True)
    turned = torch.diag_embed(1 - is_rest) - (B @ H + E @ P) @ B.transpose(1, 2)
    if old is not None:
        turned = take(turned, old, 1)
    return torch.where(null.unsqueeze(1), turned, V)


def _first(marked: Tensor, count: int, old: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The first `count` columns, marked ones first; which of them are marked; and their slots."""
    columns = marked.byte().argsort(dim=1, descending=True, stable=True)[:, :count]
    return columns, marked.gather(1, columns), columns if old is None else old.gather(1, columns)


def _square(X: Tensor, rows: Tensor, inside: Tensor) -> Tensor:
    """These rows of X [K, d, n], with the identity for columns that are not inside."""
    W = take(X, rows, 0).masked_fill(~(inside.unsqueeze(1) & inside.unsqueeze(2)), 0.0)
    diagonal(W).masked_fill_(~inside, 1.0)
    return W


def _polar(W: Tensor, pair: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """UXᵀ, the orthogonal matrix nearest to W = UΣXᵀ.

    A direction of the null space at right angles to all slots (σ = 0) is as near to one free slot
    as to another: U_0 and X_0 would be arbitrary again. This is common, because gradients have rows
    of zeros and because columns change places. `pair` says which direction goes to which slot.
    """
    U, sigma, Xt = torch.linalg.svd(W)
    lost = sigma < APART
    if bool(lost.any()):
        U_0, X_0 = U * lost.unsqueeze(1), (Xt * lost.unsqueeze(2)).transpose(1, 2)
        kept = torch.bmm(U * ~lost.unsqueeze(1), Xt)
        target = torch.bmm(U_0, torch.bmm(pair(U_0, X_0), X_0.transpose(1, 2)))
        U, _, Xt = torch.linalg.svd(kept + target)
    return torch.bmm(U, Xt)


def _pairing(slots: Tensor, directions: Tensor) -> Tensor:
    """Send directions that are near no slot to the free slots, in order as far as they have one.

    (1 − |k − l|)₊ is the weight with which the k-th coordinate of the directions goes to slot l.
    """
    places = _places(directions).unsqueeze(1) - _places(slots).unsqueeze(2)
    target = torch.bmm((1 - places.abs()).clamp_min_(0.0), _weighted(directions))
    return torch.bmm(slots.transpose(1, 2), _weighted(target))


def _weighted(X: Tensor) -> Tensor:
    """Rows times distinct weights from 1 to 2: x_i − x_j then overlaps x_i + x_j, and is kept."""
    d = X.shape[1]
    return X * (1 + torch.arange(d, dtype=X.dtype, device=X.device) / d).unsqueeze(1)


def _places(X: Tensor) -> Tensor:
    """Where each coordinate stands in the span of the orthonormal (or zero) columns of X.

    For the span of some unit vectors these are ½, 3/2, …; in general a running sum of ‖x_i‖².
    """
    shares = X.square().sum(2)
    return shares.cumsum(1) - shares / 2
