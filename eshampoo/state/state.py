"""The state of stacked blocks, as tensors: already rotated, or as it is with cached roots.

Legend: N blocks of shape (d_1, …, d_k); dictionaries are keyed by mode; M̃ momentum, D scale, L_i
factors, Q_i bases, Λ̂_i = Q_iᵀ L_i Q_i.

A lean state keeps one triangle of each factor and root, and bases and M̃ in half the bits. M, in
parameter space, keeps all bits: roots would amplify its error in directions without signal.
"""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import prod, sqrt
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from ..math.lean import diagonal_of, pack, unpack
from ..math.linalg import ByMode, off_diagonal
from ..options import Moment, Options
from ..sides import no_side
from .blocks import Kind

T = TypeVar("T")

# Matrices by mode, and their transposes.
Frames = tuple[ByMode, ByMode]

# The dtypes in which a lean state keeps the momentum and the bases. The entries of a basis lie in
# [−1, 1], where float16 has an eighth of the error of bfloat16.
LEAN = {
    torch.float32: (torch.bfloat16, torch.float16),
    torch.float64: (torch.float32, torch.float32),
}


def moment_shape(shape: tuple[int, ...], moment: Moment) -> tuple[int, ...]:
    """The shape of a second moment, with a number for every entry, every row, or the block.

    >>> [moment_shape((4, 3, 2), asked) for asked in ("entry", "row", "block")]
    [(4, 3, 2), (4, 1, 1), (1, 1, 1)]
    """
    kept = {"entry": len(shape), "row": 1, "block": 0}[moment]
    return tuple(size if mode < kept else 1 for mode, size in enumerate(shape))


class cached_if_views(cached_property[T]):  # noqa: N801 - used like a function
    """A property that is found once, since views last; a lean state makes copies at each use."""

    def __get__(self, state: Any, owner: Any = None) -> T:  # type: ignore[override]  # noqa: ANN401
        return self.func(state) if state.lean else super().__get__(state, owner)


@final
@dataclass
class State:
    """One tensor per kind of state.

    Between two changes of basis, M and the factors are stored already rotated, as M̃ and Λ̂. Shampoo
    stores them as they are, M and L, with the cached (symmetric) inverse roots of L.
    """

    step: Tensor  # [N]: t
    skipped: Tensor  # [N]: gradients that were not finite
    exp_avg: Tensor  # [N, d_1, …, d_k]: M̃, in fewer bits if lean, or M
    exp_avg_sq: Tensor | None  # [N, *moment_shape]: D, if it is an average of its own
    graft_moment: Tensor | None  # [N, *moment_shape]: the second moment of the grafting method
    factors: dict[int, Tensor]  # [N, d_i, d_i]: Λ̂_i, or L_i; triangles if lean
    bases: dict[int, Tensor]  # [N, d_i, d_i]: Q_i; in fewer bits if lean
    roots: dict[int, Tensor]  # stored like the factors: L_i^{-p}, where M is not rotated
    full: Tensor | None  # [N, ∏d, ∏d]: QᵀAQ, for correction="optimal"
    has_basis: Tensor  # [N]: 1 for blocks with a basis that has changed, 0 while Q = I
    observations: Tensor | None  # [N]: gradients seen in observe(), with statistics="observe"
    norm_sq: Tensor  # [N, 2]: the average of ‖G‖² with β1, and its weight

    @classmethod
    def zeros(cls, kind: Kind, o: Options, count: int) -> "State":
        """The state before the first gradient: everything zero, Q = I."""
        row, shape, modes, dtype, device, _ = kind
        like = torch.empty(0, dtype=dtype, device=device)
        elementwise, lean = row.sides is no_side, o.state == "lean" and len(modes) > 0
        of_momentum, of_bases = LEAN[dtype] if lean else (dtype, dtype)
        squares = {i: (shape[i], shape[i]) for i in modes}
        sizes = {i: (d * (d + 1) // 2,) if lean else (d, d) for i, (d, _) in squares.items()}
        of_momentum = of_momentum if row.rotated else dtype
        moment = like.new_zeros(count, *(shape if elementwise else moment_shape(shape, o.moment)))
        optimal = row.averages and o.correction == "optimal" and not elementwise
        full = optimal and len(shape) > 1  # with one mode, A is the factor itself
        state = cls(
            step=like.new_zeros(count),
            skipped=like.new_zeros(count),
            exp_avg=like.new_zeros(count, *shape, dtype=of_momentum),
            exp_avg_sq=moment if row.averages and not optimal else None,
            graft_moment=moment if o.has_graft_moment and not elementwise else None,
            factors={i: like.new_zeros(count, *s) for i, s in sizes.items()},
            bases={i: like.new_zeros(count, *s, dtype=of_bases) for i, s in squares.items()},
            roots={i: like.new_zeros(count, *s) for i, s in sizes.items() if not row.rotated},
            full=like.new_zeros(count, prod(shape), prod(shape)) if full else None,
            has_basis=like.new_zeros(count),
            observations=like.new_zeros(count) if o.statistics == "observe" and modes else None,
            norm_sq=like.new_zeros(count, 2),
        )
        state.start_at_(row.start)
        return state

    def start_at_(self, start: int) -> None:
        """Set t and Q to what they are before the first gradient."""
        self.step.fill_(start)
        for mode, stack in (*self.bases.items(), *self.roots.items()):
            eye = torch.eye(self.exp_avg.shape[mode + 1], dtype=stack.dtype, device=stack.device)
            stack.copy_(eye if stack.dim() == 3 else pack(eye.unsqueeze(0)))

    # ---------------------------------------------------------------- views

    @cached_property
    def lean(self) -> bool:
        """Whether bases are kept in fewer bits than they are computed in."""
        return any(Q.dtype != self.step.dtype for Q in self.bases.values())

    @cached_property
    def basis_rounding(self) -> float:
        """The most of ‖G‖ that shows in an empty direction, because a lean basis is rounded."""
        if not self.lean:
            return 0.0
        least = min(Q.shape[1] for Q in self.bases.values())
        return torch.finfo(LEAN[self.step.dtype][1]).eps / sqrt(least)

    @cached_if_views
    def frames(self) -> Frames:
        """Q_i and Q_iᵀ, in the precision of a step."""
        bases = {mode: Q.to(self.step.dtype) for mode, Q in self.bases.items()}
        return bases, {mode: Q.transpose(1, 2) for mode, Q in bases.items()}

    @cached_if_views
    def diagonals(self) -> dict[int, Tensor]:
        """diag Λ̂_i [N, d_i], only for reading."""
        return {
            mode: A.diagonal(dim1=1, dim2=2) if A.dim() == 3 else diagonal_of(A)
            for mode, A in self.factors.items()
        }

    @cached_if_views
    def off_diagonals(self) -> dict[int, Tensor]:
        """The rest of Λ̂_i [N, d_i − 1, d_i], only for reading."""
        return {mode: off_diagonal(A) for mode, A in self.whole(self.factors).items()}

    @cached_if_views
    def to_parameters(self) -> Frames:
        """What takes an update back to parameter space, and its transpose: Qᵀ, or the roots."""
        if self.roots:
            roots = self.whole(self.roots)
            return roots, roots
        bases, transposed = self.frames
        return transposed, bases

    def whole(self, matrices: ByMode) -> ByMode:
        """Matrices, if they may be stored as triangles."""
        return {i: unpack(A) for i, A in matrices.items()} if self.lean else matrices

    def in_basis(self) -> "State":
        """This state with Λ̂ for factors, which is QᵀLQ where they are not rotated."""
        if not self.roots:
            return self
        (bases, transposed), L = self.frames, self.whole(self.factors)
        rotated = {i: torch.bmm(transposed[i], torch.bmm(L[i], Q)) for i, Q in bases.items()}
        return replace(self, factors=rotated)

    def named(self) -> dict[str, Tensor]:
        """Every stack under the name that it has in `state[p]`."""
        stacks = {
            "step": self.step,
            "skipped": self.skipped,
            "exp_avg": self.exp_avg,
            "observations": self.observations,
            "exp_avg_sq": self.graft_moment if self.exp_avg_sq is None else self.exp_avg_sq,
            **{f"factor_{mode}": stack for mode, stack in self.factors.items()},
            **{f"basis_{mode}": stack for mode, stack in self.bases.items()},
            **{f"root_{mode}": stack for mode, stack in self.roots.items()},
            "full_matrix": self.full,
            "norm_sq": self.norm_sq if self.factors else None,
        }
        return {name: stack for name, stack in stacks.items() if stack is not None}

    def narrow(self, start: int, stop: int) -> "State":
        """Views of the blocks from `start` to `stop`."""
        run = slice(start, stop)
        if stop - start == len(self.step):
            return self

        def view(value: Any) -> Any:  # noqa: ANN401 - of a field: a tensor, some by mode, or None
            if isinstance(value, dict):
                return {mode: stack[run] for mode, stack in value.items()}
            return None if value is None else value[run]

        return type(self)(*(view(getattr(self, f.name)) for f in fields(self)))
