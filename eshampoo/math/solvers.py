"""The solvers Λ̂ → V: changes of basis Q ← QV after which a factor is diagonal, or nearly.

Legend: A [K, d, d] holds the factors Λ̂ that are due; V [K, s, s] the changes of their bases; u is
the rounding of Λ̂, which a matrix that is solved in float64 keeps. A solver raises an error if it
fails for any member of A; `solve` then tries again.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial as bound
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.linalg import LinAlgError, diagonal  # type: ignore[attr-defined]  # not in __all__

from .linalg import criterion, mode_product, put_, take
from .null_space import align_null_space, isolate_

Solver = Literal["eigh", "qr", "power", "partial"]


# How many products d³ take as long as one `eigh` on other devices than a CPU: the only published
# timing, of cuSOLVER at d = 100. Set it, on all ranks alike, to what benchmarks/gpu.py measures.
EIGH_PRODUCTS = {"cuda": 170.0}


def eigh_cost(d: int, device: str = "cpu") -> float:
    """Multiply-adds that take as long as `eigh` of one factor of size d on a type of device.

    Measured on one core of a CPU in float32, in batches, on nearly diagonal factors: 48, 27, 16, 9,
    8 and 6 products d³ for d = 32, 64, …, 1024. The formula is the same on every machine, so that
    the budget is charged the same everywhere.
    """
    if device in EIGH_PRODUCTS:
        return EIGH_PRODUCTS[device] * d**3
    return (5.0 * d + 1300.0) * d**2


def qr_cost(d: int) -> float:
    """Multiply-adds that take as long as one QR decomposition of size d.

    Measured as for `eigh_cost`: 17, 12, 10, 5, 4 and 3 products d³.
    """
    return (3.0 * d + 600.0) * d**2


def least_cost(solver: Solver, d: int, device: str) -> float:
    """The least that a basis of size d costs; the rest is known once it has been computed."""
    if solver == "partial":
        return 0.0
    return eigh_cost(d, device) if solver == "eigh" else qr_cost(d)


# On a CPU, matrices from this size on are worth a thread of their own.
ALONE = 256

# LAPACK is slow if the columns of a matrix are a multiple of 512 numbers apart, because the
# entries of a row then evict each other from the cache: with 16 rows and columns more it takes 20 %
# less time at size 1024, and 25 % less at 2048.
STRIDE, MORE = 512, 16

# A solver returns eigenvalues of zero as values below 4 u λ_max for d ≤ 512, in either precision.
LEVEL = 8.0

# Where a factor is solved: as it is, then in float64, then in float64 on the host.
PLACES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda A: A,
    lambda A: A.double(),
    lambda A: A.double().cpu(),
)

# What the first line of an error says if a library below torch failed, or memory ran out. Errors of
# the device itself ("CUDA error: an illegal memory access") and our own name no library.
FAILURES = (
    "cusolver", "hipsolver", "rocsolver", "magma", "lapack", "backend library",
    "out of memory", "not enough memory", "allocate memory", "alloc_failed",
)  # fmt: skip

# How many vectors x test a matrix V, and how large an entry of (VᵀV − I)x is not just rounding.
PROBES, NOT_ORTHOGONAL = 4, 1e-3

# "partial" brings the criterion down to this share of τ.
REFRESH_TO = 0.5


class Change(NamedTuple):
    """A change of basis Q ← QV of some members of a solver's stack."""

    members: list[int]  # K of them, by number
    V: Tensor  # [K, s, s]
    factor: Tensor  # [K, d, d]: VᵀΛ̂V
    costs: list[float]  # K: multiply-adds of each
    subset: Tensor | None = None  # [K, s]: the coordinates that V acts on; None: all
    permutation: Tensor | None = None  # [K, d]: which entry of D each column takes; None: its own


def solve(
    A: Tensor,  # [K, d, d]
    solver: Solver,
    thresholds: Sequence[float],  # τ of each
    qr_iterations: int,
    descending: bool = False,  # the order of the columns of "eigh"
) -> tuple[list[Change], list[int]]:
    """Λ̂ → V: bases in which the factors are diagonal, or nearly; and the members that have none.

    If anything fails below, or if memory runs out, the stack is halved, down to a single matrix,
    which is then solved in float64 and at last on the host.
    """
    u, half = torch.finfo(A.dtype).eps, len(A) // 2
    for place in PLACES if half == 0 else PLACES[:1]:
        try:
            B = place(A)
            if solver == "partial":
                changes = partial(B, u, [REFRESH_TO * tau for tau in thresholds])
            elif solver == "qr":
                changes = [qr(B, u, thresholds, qr_iterations)]
            else:
                changes = [power(B, u) if solver == "power" else eigh(B, u, descending)]
            return [_like(change, A) for change in changes], []
        except RuntimeError as error:
            if not is_failure(error):
                raise
    if half == 0:
        return [], [0]
    changes, failed = solve(A[:half], solver, thresholds[:half], qr_iterations, descending)
    others, more = solve(A[half:], solver, thresholds[half:], qr_iterations, descending)
    changes += [x._replace(members=[half + k for k in x.members]) for x in others]
    return changes, failed + [half + k for k in more]


def is_failure(error: RuntimeError) -> bool:
    """Whether an error says that a decomposition failed, or that memory ran out."""
    if isinstance(error, (LinAlgError, torch.OutOfMemoryError)):
        return True
    first = str(error).partition("\n")[0].lower()
    return any(words in first for words in FAILURES)


def _like(change: Change, A: Tensor) -> Change:
    """A change on the device of A and in its precision."""
    V, factor = change.V.to(A), change.factor.to(A)
    subset, P = (None if X is None else X.to(A.device) for X in (change.subset, change.permutation))
    return Change(change.members, V, factor, change.costs, subset, P)


def eigh(A: Tensor, u: float, descending: bool = False) -> Change:
    """V = eigvec(Λ̂), by ascending eigenvalues as LAPACK returns them, or descending."""
    cost = eigh_cost(A.shape[1], A.device.type)
    eigenvalues, V = eigenvectors(A, u, descending=descending)
    return Change(list(range(len(A))), V, torch.diag_embed(eigenvalues), [cost] * len(A))


def eigenvectors(
    A: Tensor, u: float, largest: Tensor | None = None, descending: bool = False
) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors, in the null space near to the old columns."""
    eigenvalues, V = eigh_of_stack(A)
    if descending:
        eigenvalues, V = eigenvalues.flip(1), V.flip(2)
    null = vanishing(eigenvalues, u, largest)
    # One copy to the host.
    sound, nullity = torch.stack([_are_sound(V, eigenvalues), null.sum(1)]).tolist()
    require_sound(sound)
    return eigenvalues, aligned(V, null, nullity)


def are_orthogonal(V: Tensor) -> Tensor:
    """Whether VᵀV = I for each V of a stack [K], tested on a few vectors x: VᵀVx = x, in d² work.

    LAPACK can return matrices that are not orthogonal without an error, as MKL's float32 SVD does.
    """
    K, d, _ = V.shape
    x = torch.arange(d * PROBES, dtype=V.dtype, device=V.device).square_().cos_().view(d, PROBES)
    # As xᵀVᵀV: a few rows times a matrix are up to ten times as fast as a matrix times few columns.
    x = x.t().contiguous().expand(K, PROBES, d)
    found = torch.bmm(torch.bmm(x, V.transpose(1, 2)), V)
    return ((found - x).abs() <= NOT_ORTHOGONAL).flatten(1).all(1)


def require_sound(sound: Iterable[float]) -> None:
    """Raise an error as LAPACK would, unless everything that was found is sound."""
    if not all(sound):
        raise LinAlgError("a decomposition is not finite or not orthogonal")


def aligned(V: Tensor, null: Tensor, nullity: Sequence[int], old: Tensor | None = None) -> Tensor:
    """V with null spaces nearest to the old columns, as `align_null_space` finds them."""
    if not any(nullity):
        return V
    V = align_null_space(V, null, nullity, old)
    require_sound(are_orthogonal(V).tolist())
    return V


def _are_sound(V: Tensor, values: Tensor) -> Tensor:
    """Whether each V of a stack [K] is orthogonal, and its eigenvalues [K, d] finite; 1 or 0."""
    return (are_orthogonal(V) & values.isfinite().all(1)).long()


def eigh_of_stack(A: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, ascending, and eigenvectors of a stack [K, d, d]."""
    d = A.shape[-1]
    if A.device.type != "cpu" or d % STRIDE != 0:
        return _on_threads(A)
    # −λ for the largest entry λ of a diagonal is below all eigenvalues of Λ̂ ⪰ 0, so what is added
    # comes first; and no entry is larger than before, so LAPACK scales the matrix as before.
    largest = diagonal(A).amax(1, keepdim=True)
    B = A.new_zeros(len(A), d + MORE, d + MORE)
    B[:, :d, :d] = A
    diagonal(B)[:, d:] = -torch.where(largest > 0, largest, 1.0)
    eigenvalues, V = _on_threads(B)
    return eigenvalues[:, MORE:], V[:, :d, MORE:]


def _on_threads(A: Tensor) -> tuple[Tensor, Tensor]:
    """`eigh`, on a CPU with each large matrix on a thread of its own.

    LAPACK itself works on one matrix at a time, and its threads spend much time waiting.
    """
    threads = torch.get_num_threads()
    # Without OpenMP, torch has one number of threads for the whole process.
    own = torch.backends.openmp.is_available()  # type: ignore[no-untyped-call]
    few = not own or threads == 1 or len(A) == 1 or A.shape[-1] < ALONE
    if A.device.type != "cpu" or few:
        eigenvalues, V = torch.linalg.eigh(A)
        return eigenvalues, V
    single = bound(torch.set_num_threads, 1)
    try:
        with ThreadPoolExecutor(min(threads, len(A)), initializer=single) as pool:
            pairs = list(pool.map(torch.linalg.eigh, A))
    finally:  # `single` holds for the threads of the pool, but also for threads that begin later
        torch.set_num_threads(threads)
    # Stacked by columns, in the order in which `eigh` leaves the entries of V.
    return torch.stack([w for w, _ in pairs]), torch.stack([V.mT for _, V in pairs]).mT


def vanishing(values: Tensor, u: float, largest: Tensor | None = None) -> Tensor:
    """Which eigenvalues [K, d] are zero to rounding: λ ≤ 8 u λ_max, with λ_max ≥ `largest` [K]."""
    top = values.abs().amax(1)
    if largest is not None:
        top = torch.maximum(top, largest)
    return values <= LEVEL * u * top.unsqueeze(1)


def qr(A: Tensor, u: float, thresholds: Sequence[float], iterations: int) -> Change:
    """Algorithm 4: Λ̂ = QR, Λ̂ ← RQ, until the criterion holds or I iterations are done.

    (The paper prints the loop's condition the wrong way round.)
    """
    A, V = A.clone(), torch.eye(A.shape[1], dtype=A.dtype, device=A.device).repeat(len(A), 1, 1)
    tau = torch.tensor(thresholds, dtype=A.dtype, device=A.device)
    going = torch.arange(len(A), device=A.device)
    rounds = torch.zeros(len(A), dtype=torch.float64, device=A.device)
    null, nullity = vanishing(diagonal(A), u), [0] * len(A)
    for iteration in range(iterations):
        rounds[going] += 1
        if iteration == 0:  # the iterations that follow leave the isolated columns as they are
            # Rounding has made columns of zeros arbitrary, so they come last.
            last = null.byte().argsort(dim=1, stable=True)
            Q, B, null, nullity = _decompose(A, u, last)
            place = last.argsort(dim=1)
            Q, null = take(Q, place, 1), null.gather(1, place)
            B = take(take(B, place, 1).transpose(1, 2), place, 1)
        else:
            Q, R = torch.linalg.qr(A[going])
            B = _symmetric(torch.bmm(R, Q))
        A[going] = B
        V[going] = torch.bmm(V[going], Q)
        going = going[criterion(B) > tau[going]]
        if len(going) == 0:
            break
    V = align_null_space(V, null, nullity)
    sound = _are_sound(V, diagonal(A)).to(rounds.dtype)
    sound, costs = torch.stack([sound, rounds * qr_cost(A.shape[1])]).tolist()
    require_sound(sound)
    return Change(list(range(len(A))), V, A, costs)


def power(A: Tensor, u: float) -> Change:
    """SOAP's step V = qr(Λ̂P), where P sorts diag Λ̂ in descending order; D is permuted by P.

    Λ̂P = VR, so VᵀΛ̂V = RPᵀV: one product.
    """
    costs = [qr_cost(A.shape[1])] * len(A)
    P = diagonal(A).argsort(dim=1, descending=True)
    V, B, null, nullity = _decompose(A, u, P)
    V = aligned(V, null, nullity, old=P)
    return Change(list(range(len(A))), V, B, costs, permutation=P)


def _decompose(A: Tensor, u: float, P: Tensor) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Λ̂P = QR: Q, QᵀΛ̂Q, which columns of Q are in the null space, and how many.

    Where a column depends on earlier ones, Q gets an arbitrary column, which takes its part of the
    later ones. Dependent columns therefore come last; then the arbitrary ones span the null space.
    """
    X = take(A, P, 1)
    Q, R = torch.linalg.qr(X)
    B = _symmetric(torch.bmm(R, take(Q, P, 0)))
    null = vanishing(diagonal(B), u)
    residuals = diagonal(R).abs()
    # R loses more to rounding than QᵀΛ̂Q does: a thousand times more if early columns are similar.
    limit = u**0.75 * residuals.amax(1, keepdim=True)
    dependent = residuals <= limit
    early = (dependent[:, :-1] & ~dependent[:, 1:]).any(1)
    early &= (null | vanishing(residuals, u)).any(1)
    # One copy to the host.
    sound = _are_sound(Q, diagonal(B))
    sound, again, nullity = torch.stack([sound, early.long(), null.sum(1)]).tolist()
    members = [k for k, is_early in enumerate(again) if is_early]
    if members:
        order = dependent[members].byte().argsort(dim=1, stable=True)
        Q_k = torch.linalg.qr(take(X[members], order, 1)).Q
        Q_k = put_(torch.empty_like(Q_k), Q_k, order, 1)
        Q[members] = Q_k
        B[members] = _symmetric(torch.bmm(Q_k.transpose(1, 2), torch.bmm(A[members], Q_k)))
        null = vanishing(diagonal(B), u)
        sound, nullity = torch.stack([_are_sound(Q, diagonal(B)), null.sum(1)]).tolist()
    require_sound(sound)
    if any(nullity):
        isolate_(B, null)
    return Q, B, null, nullity


def _symmetric(A: Tensor) -> Tensor:
    return (A + A.mT).div_(2)


def partial(A: Tensor, u: float, targets: Sequence[float]) -> list[Change]:
    """Diagonalise Λ̂[S, S] only, with the shortest S that brings the criterion to its target.

    The energy inside S×S vanishes, the energy outside is unchanged because V_S is orthogonal, so
    the criterion afterwards is √(off² − off²(S×S)) / ‖Λ̂‖, known before anything is computed.
    """
    by_energy, after = prefixes(A)
    sizes = (after > after.new_tensor(targets).unsqueeze(1)).sum(1).tolist()
    changes = []
    for size, members in _same_size(sizes, A.shape[1]):
        B = torch.stack([A[k] for k in members])
        S = by_energy[members, :size]
        # S is sorted by the diagonal: the k-th smallest eigenvalue goes to its k-th smallest entry.
        S = S.gather(1, diagonal(B).gather(1, S).argsort(dim=1))
        rows = take(B, S, 0)
        largest = diagonal(B).amax(1)
        eigenvalues, V = eigenvectors(take(rows, S, 1), u, largest)
        # VᵀΛ̂V: the rows of S turn, a diagonal stands in S×S, and the columns mirror the rows.
        rows = put_(mode_product(rows, V, 0), torch.diag_embed(eigenvalues), S, 1)
        put_(put_(B, rows, S, 0), rows.transpose(1, 2), S, 1)
        cost = eigh_cost(size, A.device.type) + 2.0 * A.shape[1] * size**2
        changes.append(Change(members, V, B, [cost] * len(members), subset=S))
    return changes


def prefixes(A: Tensor) -> tuple[Tensor, Tensor]:
    """Coordinates sorted by the off-diagonal energy of their rows; the criterion after each prefix.

    Returns the coordinates [K, d], largest energy first, and [K, d] whose entry s is the criterion
    once the first s of them are diagonalised. What is left then is Σ E_ij over max(i, j) ≥ s, a
    cumulative sum from the end: nothing is subtracted, so nothing cancels.
    """
    tiny = torch.finfo(A.dtype).tiny
    # Entries are divided by the largest, so that squares do not overflow; Λ̂ ⪰ 0 has the largest on
    # its diagonal.
    largest = diagonal(A).amax(1).clamp_min(tiny)
    energy = (A / largest.view(-1, 1, 1)).square_()
    on_diagonal = diagonal(energy)
    inside = on_diagonal.sum(1, keepdim=True)
    on_diagonal.zero_()
    rows = energy.sum(2)
    by_energy = rows.argsort(dim=1, descending=True)
    # The energy that a coordinate shares with earlier coordinates; ranks are whole numbers.
    rank = by_energy.argsort(dim=1).to(A.dtype)
    before = (rank.unsqueeze(2) - rank.unsqueeze(1)).clamp_(0.0, 1.0)
    common = energy.mul_(before).sum(2).gather(1, by_energy)
    left = 2 * common.flip(1).cumsum(1).flip(1)
    total = inside + rows.sum(1, keepdim=True)
    return by_energy, (left / total.clamp_min(tiny)).sqrt_()


def _same_size(sizes: Sequence[int], d: int) -> Iterator[tuple[int, list[int]]]:
    """Members with a common size of S: sizes are rounded up, which only diagonalises more."""
    grain = max(8, d // 32)
    rounded = [min(d, -(-max(size, 1) // grain) * grain) for size in sizes]
    for size in sorted(set(rounded)):
        yield size, [k for k, s in enumerate(rounded) if s == size]
