"""Batched linear algebra: mode products, the criterion, and the solvers Λ̂ → V.

Legend: X is a stack [N, d_1, …, d_k] of blocks; Q, V [N, d, d] are stacks of orthogonal matrices;
Λ̂ = QᵀLQ [N, d, d] is a factor seen in its current basis. Modes count from 0, so mode i is dimension
i + 1 of a stack. Functions that end in _ write into their first argument; the others are pure.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]  # not in its __all__

from .options import Slots, Solver


def unfold(X: Tensor, mode: int) -> Tensor:
    """The mode-i unfolding [N, d_i, ∏ of the others]; a view for the first and the last mode."""
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


def rotate_(X: Tensor, bases: Mapping[int, Tensor], transposed: Mapping[int, Tensor]) -> Tensor:
    """X ← Q_Lᵀ X Q_R, for any order (Lemma 1); back again with the arguments exchanged."""
    if X.dim() == 3 and len(bases) == 2:  # matrices: the last product goes where X was
        return torch.bmm(torch.bmm(transposed[0], X), bases[1], out=X)
    Y = X
    for mode, Q in bases.items():
        Y = mode_product(Y, Q, mode)
    return X if Y is X else X.copy_(Y)


def along(vector: Tensor, mode: int, order: int) -> Tensor:
    """Shape [N, d] as [N, 1, …, d, …, 1], to scale mode i of a stack of blocks of this order."""
    return vector.view(vector.shape[0], *([1] * mode), -1, *([1] * (order - mode - 1)))


def off_diagonal(A: Tensor) -> Tensor:
    """All entries of A [..., d, d] but the diagonal, [..., d-1, d]; a view if A is contiguous."""
    d = A.shape[-1]
    return A.flatten(-2)[..., 1:].reshape(*A.shape[:-2], d - 1, d + 1)[..., :-1]


def criterion(A: Tensor) -> Tensor:
    """‖Λ̂ − diag Λ̂‖_F / ‖Λ̂‖_F ∈ [0, 1], per matrix (Eq. criterion); 0 for a zero matrix."""
    diagonal = torch.linalg.vector_norm(A.diagonal(dim1=-2, dim2=-1), dim=-1)
    return off_share(norm(off_diagonal(A)), diagonal)


def norm(off: Tensor) -> Tensor:
    """‖Λ̂ − diag Λ̂‖_F from a view of what is off the diagonal.

    Subtracting the square of the diagonal from ‖Λ̂‖² would lose everything in float32.
    """
    rows = torch.linalg.vector_norm(off, dim=-1)  # row by row: much faster on a CPU
    norms: Tensor = torch.linalg.vector_norm(rows, dim=-1)
    return norms


def off_share(off: Tensor, diagonal: Tensor) -> Tensor:
    """The criterion from the norms of the two parts of Λ̂."""
    total = torch.hypot(off, diagonal)
    share = torch.where(total > 0, off / total, torch.zeros_like(off)).clamp_(max=1.0)
    return share.masked_fill_(total.isinf(), 1.0)  # squares overflowed: compute a basis, be safe


def orthonormalize(Q: Tensor) -> Tensor:
    """One Newton–Schulz step Q(3I − QᵀQ)/2: squares a small departure from orthogonality."""
    QtQ = torch.bmm(Q.transpose(1, 2), Q)
    return torch.baddbmm(Q, Q, QtQ, beta=1.5, alpha=-0.5)


class Change(NamedTuple):
    """A change of basis Q ← QV of some of the matrices that a solver was given."""

    which: list[int]  # positions in the solver's batch, K of them
    V: Tensor  # [K, s, s]
    factor: Tensor  # [K, d, d]: VᵀΛ̂V
    subset: Tensor | None = None  # [K, s]: the coordinates that V acts on; None: all
    order: Tensor | None = None  # [K, d]: how the entries of D move with the columns; None: kept

    def part(self, start: int, stop: int) -> "Change":
        """The change for the positions from `start` to `stop` only."""
        run = slice(start, stop)
        subset = None if self.subset is None else self.subset[run]
        order = None if self.order is None else self.order[run]
        return Change(self.which[run], self.V[run], self.factor[run], subset, order)


class Solution(NamedTuple):
    """What a solver found, and the positions for which it found nothing."""

    changes: list[Change]
    failed: list[int]


def solve(
    A: Tensor,  # [K, d, d]: the factors Λ̂ that are due
    solver: Solver,
    slots: Slots,
    thresholds: Sequence[float],  # τ of each
    refresh_to: float,
    qr_iterations: int,
) -> Solution:
    """Λ̂ → V: bases in which the factors are diagonal, or nearly."""
    if solver == "eigh":
        return eigh(A, slots)
    if solver == "power":
        return Solution([power(A)], [])
    if solver == "qr":
        return Solution([qr(A, slots, thresholds, qr_iterations)], [])
    return partial(A, slots, [refresh_to * tau for tau in thresholds])


def eigh(A: Tensor, slots: Slots = "rank", descending: bool = False) -> Solution:
    """V = eigvec(Λ̂), ascending as LAPACK gives them unless told otherwise."""
    eigenvalues, V, failed = eigenvectors(A)
    if descending:
        eigenvalues, V = eigenvalues.flip(1), V.flip(2)
    found = [k for k in range(A.shape[0]) if k not in failed]
    if failed:
        eigenvalues, V = eigenvalues[found], V[found]
    if slots == "match":
        order = match(V)
        V = _columns(V, order)
        eigenvalues = eigenvalues.gather(1, order)
    return Solution([Change(found, V, torch.diag_embed(eigenvalues))] if found else [], failed)


def eigenvectors(A: Tensor) -> tuple[Tensor, Tensor, list[int]]:
    """Eigenvalues and eigenvectors of each matrix, and which of them could not be had.

    A matrix that fails is tried again alone in float64, then with a little damping.
    """
    try:
        eigenvalues, V = torch.linalg.eigh(A)
        sound = V.flatten(1).sum(1).isfinite().tolist()  # NaN or Inf anywhere shows in the sum
    except LinAlgError:
        eigenvalues, V = A.new_zeros(A.shape[:2]), torch.zeros_like(A)
        sound = [False] * A.shape[0]
    failed = []
    for k in (k for k, is_sound in enumerate(sound) if not is_sound):
        for damping in (0.0, 1e-6):
            B = A[k].double()
            B = B + damping * B.diagonal().abs().mean() * torch.eye(len(B), device=B.device)
            try:
                w, V_k = torch.linalg.eigh(B)
            except LinAlgError:
                continue
            if bool(torch.isfinite(V_k).all()):
                eigenvalues[k], V[k] = w, V_k
                break
        else:
            failed.append(k)
    return eigenvalues, V, failed


def qr(A: Tensor, slots: Slots, thresholds: Sequence[float], iterations: int) -> Change:
    """Algorithm 4: Λ̂ = QR, Λ̂ ← RQ, until the criterion holds or I iterations are done.

    (The paper prints the loop's condition the wrong way round.)
    """
    A, V = A.clone(), torch.eye(A.shape[1], dtype=A.dtype, device=A.device).repeat(len(A), 1, 1)
    tau = torch.tensor(thresholds, dtype=A.dtype, device=A.device)
    going = torch.arange(len(A), device=A.device)
    for _ in range(iterations):
        Q, R = torch.linalg.qr(A[going])
        B = torch.bmm(R, Q)
        A[going] = B = (B + B.transpose(1, 2)) / 2
        V[going] = torch.bmm(V[going], Q)
        going = going[criterion(B) > tau[going]]
        if len(going) == 0:
            break
    if slots == "match":
        order = match(V)
        V, A = _columns(V, order), _columns(_columns(A, order).transpose(1, 2), order)
    return Change(list(range(len(A))), V, A)


def power(A: Tensor) -> Change:
    """SOAP's step V = qr(Λ̂P), with P sorting diag Λ̂ descending; D is permuted by P.

    Λ̂P = VR, so that VᵀΛ̂V = RPᵀV: one product.
    """
    order = A.diagonal(dim1=1, dim2=2).argsort(dim=1, descending=True)
    V, R = torch.linalg.qr(_columns(A, order))
    B = torch.bmm(R, take(V, order, 0))
    return Change(list(range(len(A))), V, (B + B.transpose(1, 2)) / 2, order=order)


def partial(A: Tensor, slots: Slots, targets: Sequence[float]) -> Solution:
    """Diagonalise Λ̂[S, S] only, with the shortest S that brings the criterion to its target.

    The energy inside S×S vanishes, the energy outside is unchanged because V_S is orthogonal, so
    the criterion afterwards is √(off² − off²(S×S)) / ‖Λ̂‖, known before anything is computed.
    """
    by_energy, after = prefixes(A)
    sizes = (after > after.new_tensor(targets).unsqueeze(1)).sum(1).tolist()
    changes, failed = [], []
    for size, which in _batches(sizes, A.shape[1]):
        B = torch.stack([A[k] for k in which])
        S = by_energy[which, :size]
        # Slots in the order of their diagonal: the k-th smallest eigenvalue goes to the k-th.
        S = S.gather(1, B.diagonal(dim1=1, dim2=2).gather(1, S).argsort(dim=1))
        rows = take(B, S, 0)
        eigenvalues, V, lost = eigenvectors(take(rows, S, 1))
        if lost:
            failed += [which[k] for k in lost]
            keep = [k for k in range(len(which)) if k not in lost]
            which = [which[k] for k in keep]
            B, S, V, rows, eigenvalues = B[keep], S[keep], V[keep], rows[keep], eigenvalues[keep]
        if which:
            if slots == "match":
                order = match(V)
                V, eigenvalues = _columns(V, order), eigenvalues.gather(1, order)
            # VᵀΛ̂V: the rows of S turn, a diagonal stands in S×S, and the columns mirror the rows.
            rows = put_(mode_product(rows, V, 0), torch.diag_embed(eigenvalues), S, 1)
            put_(put_(B, rows, S, 0), rows.transpose(1, 2), S, 1)
            changes.append(Change(which, V, B, subset=S))
    return Solution(changes, failed)


def prefixes(A: Tensor) -> tuple[Tensor, Tensor]:
    """Coordinates by the off-diagonal energy of their rows, and the criterion after each prefix.

    Returns the order [K, d], largest first, and [K, d] whose entry s is the criterion once the
    first s coordinates are diagonalised. What is left then is Σ E_ij over max(i, j) ≥ s in that
    order, a cumulative sum from the end: nothing is subtracted, so nothing cancels.
    """
    tiny = torch.finfo(A.dtype).tiny
    # Shares of the largest entry, whose square neither overflows nor underflows; Λ̂ ⪰ 0 has it on
    # its diagonal.
    largest = A.diagonal(dim1=1, dim2=2).amax(1).clamp_min(tiny)
    energy = (A / largest.view(-1, 1, 1)).square_()
    diagonal = energy.diagonal(dim1=1, dim2=2)
    inside = diagonal.sum(1, keepdim=True)
    diagonal.zero_()
    rows = energy.sum(2)
    order = rows.argsort(dim=1, descending=True)
    # What a coordinate shares with those that come before it in the order; ranks are whole numbers.
    rank = order.argsort(dim=1).to(A.dtype)
    before = (rank.unsqueeze(2) - rank.unsqueeze(1)).clamp_(0.0, 1.0)
    shared = energy.mul_(before).sum(2).gather(1, order)
    left = 2 * shared.flip(1).cumsum(1).flip(1)
    total = inside + rows.sum(1, keepdim=True)
    return order, (left / total.clamp_min(tiny)).sqrt_()


def _batches(sizes: Sequence[int], d: int) -> Iterator[tuple[int, list[int]]]:
    """Positions with a common size of S: sizes are rounded up, which only diagonalises more."""
    grain = max(8, d // 32)
    rounded = [min(d, -(-max(size, 1) // grain) * grain) for size in sizes]
    for size in sorted(set(rounded)):
        yield size, [k for k, s in enumerate(rounded) if s == size]


def match(V: Tensor) -> Tensor:
    """Columns of V handed to slots by largest overlap: order[j] is the new column of slot j.

    Greedy on |V_ij|²: in every round each pair that is the other's best choice is matched. It is
    the best assignment whenever every old direction has a clear successor, and at least half of
    the best overlap always.
    """
    K, d, _ = V.shape
    overlap = V.square()  # [K, slot, column]
    order = torch.zeros(K, d, dtype=torch.long, device=V.device)
    rows = torch.arange(d, device=V.device).expand(K, d)
    open_ = torch.ones(K, d, dtype=torch.bool, device=V.device)
    while bool(open_.any()):
        best = overlap.argmax(2)  # of each slot
        chosen = overlap.argmax(1).gather(1, best) == rows
        # A slot that has been served shows only -1 and would choose column 0 again.
        chosen &= open_
        order = torch.where(chosen, best, order)
        open_ &= ~chosen
        overlap.masked_fill_(chosen.unsqueeze(2), -1.0)
        taken = torch.zeros_like(best).scatter_add_(1, best, chosen.long()) > 0
        overlap.masked_fill_(taken.unsqueeze(1), -1.0)
    return order


def take(X: Tensor, index: Tensor | None, mode: int) -> Tensor:
    """The coordinates `index` [N, s] of mode i; all of them for None."""
    if index is None:
        return X
    if mode == 0:  # whole rows: much faster than gather on a CPU
        N, d, *rest = X.shape
        return X.reshape(N * d, -1).index_select(0, _flat(index, d)).view(N, -1, *rest)
    return X.gather(mode + 1, _expand(index, X, mode))


def put_(X: Tensor, value: Tensor, index: Tensor | None, mode: int) -> Tensor:
    """Write `value` into the coordinates `index` of mode i; into all of them for None."""
    if index is None:
        return X.copy_(value)
    if mode == 0:
        N, d, *_ = X.shape
        rows = value.reshape(index.numel(), -1)
        X.view(N * d, -1).index_copy_(0, _flat(index, d), rows)
        return X
    return X.scatter_(mode + 1, _expand(index, X, mode), value)


def _flat(index: Tensor, d: int) -> Tensor:
    """Where the rows `index` [N, s] of blocks with d rows are, counted over all blocks."""
    if len(index) == 1:
        return index.flatten()
    first = torch.arange(0, len(index) * d, d, device=index.device)
    return (index + first.unsqueeze(1)).flatten()


def _expand(index: Tensor, X: Tensor, mode: int) -> Tensor:
    shape = list(X.shape)
    shape[mode + 1] = index.shape[1]
    return along(index, mode, X.dim() - 1).expand(shape)


def _columns(A: Tensor, order: Tensor) -> Tensor:
    return take(A, order, 1)
