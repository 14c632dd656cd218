"""The state of stacked blocks, as tensors, and what the host counts for their factors.

Legend: N blocks of shape (d_1, …, d_k); dictionaries are keyed by mode; M̃ momentum, D scale, L_i
factors, Q_i bases, Λ̂_i = Q_iᵀ L_i Q_i.

A lean state keeps one triangle of each factor and root, and bases and M̃ in half the bits. M, in
parameter space, keeps all bits: roots would amplify its error in directions without signal.
"""

import re
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from math import prod, sqrt
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

from ..math.linalg import Matrices, off_diagonal, rotate_
from ..math.triangle import diagonal_of, pack, triangle_size, unpack
from ..options import Moment, Statistics

T = TypeVar("T")

# Where a state lives: M̃ and the factors already rotated, or as they are, with cached roots.
Home = Literal["eigenbasis", "parameters"]

# The dtypes in which a lean state keeps the momentum and the bases. The entries of a basis lie in
# [−1, 1], where float16 has an eighth of the error of bfloat16.
LEAN = {
    torch.float32: (torch.bfloat16, torch.float16),
    torch.float64: (torch.float32, torch.float32),
}

# How many checks of a factor are remembered with record=True.
HISTORY = 1000

# The names of our entries in `state[p]`; users may add others, which are left alone.
OWN_NAME = re.compile(
    r"(step|skipped|observations|exp_avg|exp_avg_sq|graft_avg_sq|full_matrix|(factor|basis|root)_\d+"
    r"|criterion|basis_(checks|computations|failures|waited|work|spent))(\.\d+)?"
)


@cache
def is_own(name: object) -> bool:
    """Whether an entry of `state[p]` is the library's."""
    return isinstance(name, str) and OWN_NAME.fullmatch(name) is not None


@cache
def own_among(names: tuple[Any, ...]) -> list[str]:
    """The names that are the library's; cached, because the same few sets of names recur."""
    return list(filter(is_own, names))


def moment_shape(shape: tuple[int, ...], moment: Moment) -> tuple[int, ...]:
    """The shape of a second moment, with a number for every entry, every row, or the block.

    >>> [moment_shape((4, 3, 2), asked) for asked in ("entry", "row", "block")]
    [(4, 3, 2), (4, 1, 1), (1, 1, 1)]
    """
    kept = {"entry": len(shape), "row": 1, "block": 0}[moment]
    return tuple(size if mode < kept else 1 for mode, size in enumerate(shape))


class unless_lean(Generic[T]):  # noqa: N801 - used like a function
    """A property that is found once, since views last; a lean state makes copies at each use."""

    def __init__(self, find: "Callable[[State], T]") -> None:
        self.find = find

    def __get__(self, state: "State", owner: object = None) -> T:
        found = self.find(state)
        if not state.lean:  # an attribute from now on
            vars(state)[self.find.__name__] = found
        return found


@dataclass
class State:
    """One tensor per kind of state. What depends on its home is here and nowhere else."""

    home: Home
    step: Tensor  # [N]: t
    skipped: Tensor  # [N]: gradients that were not finite
    exp_avg: Tensor  # [N, d_1, …, d_k]: M̃, in fewer bits if lean, or M
    exp_avg_sq: Tensor | None  # [N, *moment_shape]: D, or the second moment of the graft
    factors: dict[int, Tensor]  # [N, d_i, d_i]: Λ̂_i, or L_i; triangles if lean
    bases: dict[int, Tensor]  # [N, d_i, d_i]: Q_i; in fewer bits if lean
    roots: dict[int, Tensor]  # in the form of the factors: L_i^{-p}, where M is not rotated
    full: Tensor | None  # [N, ∏d, ∏d]: QᵀAQ, for correction="optimal"
    graft_sq: Tensor | None  # [N, *moment_shape]: the second moment of the graft, beside D
    turned: Tensor  # [N]: 1 for blocks with a basis that has changed, 0 while Q = I
    observations: Tensor | None  # [N]: gradients seen in observe(), with statistics="observe"

    @classmethod
    def zeros(
        cls,
        home: Home,
        keeps: tuple[str, ...],  # names of what the scale keeps
        start: int,  # t before the first gradient
        count: int,
        shape: tuple[int, ...],
        moment: tuple[int, ...],  # shape of D and of the moment of the grafting method
        modes: tuple[int, ...],
        like: Tensor,
        lean: bool,
    ) -> "State":
        """The state before the first gradient: everything zero, Q = I."""
        full = "full_matrix" in keeps and len(shape) > 1  # with one mode, A is the factor itself
        of_momentum, of_bases = LEAN[like.dtype] if lean else (like.dtype, like.dtype)
        of_momentum = of_momentum if home == "eigenbasis" else like.dtype
        eyes = {
            i: torch.eye(shape[i], dtype=of_bases, device=like.device).repeat(count, 1, 1)
            for i in modes
        }
        factors = {
            i: like.new_zeros(count, *((triangle_size(d),) if lean else (d, d)))
            for i, d in ((i, shape[i]) for i in modes)
        }
        roots = {}
        if home == "parameters":
            roots = {i: pack(Q.to(like.dtype)) if lean else Q.clone() for i, Q in eyes.items()}
        return cls(
            home,
            step=like.new_full((count,), float(start)),
            skipped=like.new_zeros(count),
            exp_avg=like.new_zeros(count, *shape, dtype=of_momentum),
            exp_avg_sq=like.new_zeros(count, *moment) if "exp_avg_sq" in keeps else None,
            factors=factors,
            bases=eyes,
            roots=roots,
            full=like.new_zeros(count, prod(shape), prod(shape)) if full else None,
            graft_sq=like.new_zeros(count, *moment) if "graft_sq" in keeps else None,
            turned=like.new_zeros(count),
            observations=like.new_zeros(count) if "observations" in keeps else None,
        )

    # ---------------------------------------------------------------- statistics

    @property
    def age(self) -> Tensor:
        """How many gradients the statistics have seen [N]; before any observation, all steps."""
        n = self.observations
        return self.step if n is None else torch.where(n > 0, n, self.step)

    def count(self, call: Statistics) -> Tensor:
        """How many calls of step() or observe() each block has seen [N]."""
        return self.step if self.observations is None or call == "step" else self.observations

    # ---------------------------------------------------------------- home

    @unless_lean
    def inward(self) -> tuple[Matrices, Matrices]:
        """The matrices that take a gradient to where the state lives, and their transposes."""
        return self.frames if self.home == "eigenbasis" else ({}, {})

    @unless_lean
    def outward(self) -> tuple[Matrices, Matrices]:
        """The matrices that take an update back to parameter space, or the (symmetric) roots."""
        if self.home == "eigenbasis":
            bases, transposed = self.frames
            return transposed, bases
        roots = {mode: unpack(root) for mode, root in self.roots.items()}
        return roots, roots

    def in_basis(self, start: int, stop: int) -> tuple["State", "State"]:
        """This state with Λ̂ as its factors, and its blocks from `start` to `stop`.

        In the eigenbasis, all Λ̂ are at hand. In parameter space, only these blocks get theirs.
        """
        some = self if stop - start == len(self.step) else self.narrow(start, stop)
        if self.home == "eigenbasis":
            return self, some
        bases, transposed = some.frames
        turned = {
            i: torch.bmm(transposed[i], torch.bmm(unpack(some.factors[i]), Q))
            for i, Q in bases.items()
        }
        if some is self:
            found = replace(self, factors=turned)
            return found, found
        room = {i: A.new_empty(len(self.step), *A.shape[1:]) for i, A in turned.items()}
        for i, A in turned.items():
            room[i][start:stop] = A
        return replace(self, factors=room), replace(some, factors=turned)

    @property
    def turning(self) -> list[Tensor]:
        """The stacks of blocks that turn with a basis."""
        return [self.exp_avg] if self.home == "eigenbasis" else []

    @property
    def own_moment(self) -> Tensor | None:
        """D, if it is an average of its own."""
        return self.exp_avg_sq if self.home == "eigenbasis" else None

    @property
    def lent(self) -> Tensor | None:
        """The second moment of the grafting method, in parameter space."""
        return self.graft_sq if self.home == "eigenbasis" else self.exp_avg_sq

    def momentum(self, look_ahead: Callable[[Tensor], Tensor]) -> Tensor:
        """M in parameter space; it can look ahead only where the gradient is in that space, too."""
        if self.home == "parameters":
            return look_ahead(self.exp_avg)
        return rotate_(self.exp_avg.to(self.step.dtype, copy=True), *self.outward)

    # ---------------------------------------------------------------- form

    @cached_property
    def lean(self) -> bool:
        """Whether bases are kept in fewer bits than they are computed in."""
        return any(Q.dtype != self.step.dtype for Q in self.bases.values())

    @cached_property
    def leak(self) -> float:
        """The most of ‖G‖ that shows in an empty slot, because a lean basis is rounded."""
        if not self.lean:
            return 0.0
        least = min(Q.shape[1] for Q in self.bases.values())
        return torch.finfo(LEAN[self.step.dtype][1]).eps / sqrt(least)

    @unless_lean
    def frames(self) -> tuple[Matrices, Matrices]:
        """Q_i and Q_iᵀ, in the precision of a step."""
        bases = {mode: Q.to(self.step.dtype) for mode, Q in self.bases.items()}
        return bases, {mode: Q.transpose(1, 2) for mode, Q in bases.items()}

    @unless_lean
    def diagonals(self) -> dict[int, Tensor]:
        """diag Λ̂_i [N, d_i], only for reading."""
        return {mode: diagonal_of(A) for mode, A in self.factors.items()}

    @cached_property
    def off_diagonals(self) -> dict[int, Tensor]:
        """Views of the rest of Λ̂_i [N, d_i − 1, d_i], where Λ̂_i is kept whole."""
        return {mode: off_diagonal(A) for mode, A in self.factors.items() if A.dim() == 3}

    def named(self) -> dict[str, Tensor]:
        """Every stack under the name that it has in `state[p]`."""
        named = {"step": self.step, "skipped": self.skipped, "exp_avg": self.exp_avg}
        if self.observations is not None:
            named["observations"] = self.observations
        if self.exp_avg_sq is not None:
            named["exp_avg_sq"] = self.exp_avg_sq
        by_mode = {"factor": self.factors, "basis": self.bases, "root": self.roots}
        for name, stacks in by_mode.items():
            named |= {f"{name}_{mode}": stack for mode, stack in stacks.items()}
        if self.full is not None:
            named["full_matrix"] = self.full
        if self.graft_sq is not None:
            named["graft_avg_sq"] = self.graft_sq
        return named

    def narrow(self, start: int, stop: int) -> "State":
        """Views of the blocks from `start` to `stop`."""
        run = slice(start, stop)

        def view(value: Any) -> Any:  # noqa: ANN401 - of a field: a tensor, some by mode, or neither
            if isinstance(value, dict):
                return {mode: stack[run] for mode, stack in value.items()}
            return value[run] if isinstance(value, Tensor) else value

        return State(*(view(getattr(self, f.name)) for f in fields(self)))


class Counters:
    """What the host knows about each factor of N blocks.

    Plain arrays, quick to read and write one entry at a time at [block * modes + k]; `named` shows
    the same memory as tensors [N, modes].
    """

    def __init__(self, count: int, modes: int) -> None:
        self.shape = (count, modes)
        empty = bytes(8 * count * modes + 8)  # one entry too many: no tensor shares an empty array
        self.checks, self.computations, self.failures, self.waited = (
            array("q", empty) for _ in range(4)
        )
        self.criterion, self.work, self.spent = (array("d", empty) for _ in range(3))
        self.history: dict[int, deque[tuple[int, float, bool]]] = {}

    def named(self) -> dict[str, Tensor]:
        """The counters under the names that they have in `state[p]`; none without factors."""
        arrays: dict[str, array[int] | array[float]] = {
            "basis_checks": self.checks,
            "basis_computations": self.computations,
            "basis_failures": self.failures,
            "basis_waited": self.waited,
            "criterion": self.criterion,
            "basis_work": self.work,
            "basis_spent": self.spent,
        }
        dtypes = {"q": torch.int64, "d": torch.float64}
        return {
            name: torch.frombuffer(values, dtype=dtypes[values.typecode])[:-1].view(self.shape)
            for name, values in arrays.items()
            if self.shape[1] > 0
        }

    def checked(self, position: int) -> bool:
        """Whether the block has a basis: before its first check, Shampoo's graft works alone."""
        return self.checks[position * self.shape[1]] > 0

    def remember(self, entry: int, check: tuple[int, float, bool]) -> None:
        """Add (step, criterion, computed?) to the bounded history of a factor."""
        self.history.setdefault(entry, deque(maxlen=HISTORY)).append(check)
