"""Entries of a state that no run can have written: found before anything has changed.

The rules are what holds after every step, with room for rounding: a state may have been stored in
bfloat16, which moves every number by a share of at most 2⁻⁹.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..math.triangle import diagonal_of
from .blocks import called, is_sharded, local, whole

if TYPE_CHECKING:
    from ..ranks.team import Team

# Entries that are whole numbers.
COUNTERS = ("basis_checks", "basis_computations", "basis_failures", "basis_waited")

# Entries of at most `SMALL` numbers are checked together, `TOGETHER` at a time, which is quicker.
SMALL, TOGETHER = 4096, 2048

# Where counting ends, because t + 1 = t: by dtype, and 2²⁴ for float32 and narrower ones.
MOST_COUNTED = {torch.float64: 2.0**53, torch.int64: 2.0**53}

# The rounding of a sum of d products, as a share of the largest entry, is about d·u: 2.4e-4 for
# d = 4096 in float32. No entry of a positive matrix exceeds its diagonal, up to bfloat16's 2⁻⁹.
ROUNDING, BEYOND_DIAGONAL = 1e-3, 1.01
# The largest entry of (QᵀQ − I)x for some random x is 5e-5 √d for a basis that has departed from
# orthogonality by 1e-5, and 1e-2 for one rounded to bfloat16. Testing x takes d² work, not d³.
NOT_ORTHOGONAL, PROBES = 0.1, 8


class Rule(NamedTuple):
    """A test of a stack of entries, and what is wrong with an entry that fails it."""

    holds: Callable[[Tensor], Tensor]
    fault: str


@dataclass(frozen=True, eq=False)
class Rules:
    """What a kind of entry must be."""

    all: tuple[Rule, ...]
    matrix: bool = False  # whether they are about whole matrices

    def and_(self, holds: Callable[[Tensor], Tensor], fault: str, matrix: bool = False) -> "Rules":
        """These rules, and one more."""
        return Rules((*self.all, Rule(holds, fault)), matrix)


@contextmanager
def refused_together(teams: "Collection[Team]") -> Iterator[None]:
    """What one rank refuses, all ranks of its teams refuse, in the same words."""
    mine: Exception | None = None
    try:
        yield
    except Exception as error:
        if not teams:
            raise
        mine = error
    words = "" if mine is None else str(mine) or type(mine).__name__
    for team in [*teams, *teams] if len(teams) > 1 else teams:  # twice, to reach all ranks
        words = team.any_words(words)
    if words:
        raise ValueError(words) from mine


def check_kinds(
    saved: Mapping[Tensor, Mapping[str, Any]], ours: bool, names: Mapping[Tensor, str]
) -> None:
    """Refuse entries that are not tensors of the right kind of number; a step may be a number."""
    for p, entries in saved.items():
        for name, value in entries.items():
            if isinstance(value, Tensor):
                if value.layout != torch.strided:
                    raise _damaged(p, name, f"has the layout {value.layout}", names)
                if value.is_meta and not p.is_meta:
                    raise _damaged(p, name, "is on the meta device, without values", names)
                if ours and value.is_floating_point() == name.startswith(COUNTERS):
                    raise _damaged(p, name, f"has the dtype {value.dtype}", names)
            elif name != "step" or not isinstance(value, int | float) or isinstance(value, bool):
                raise _damaged(p, name, f"is a {type(value).__name__}, not a tensor", names)
            elif not (0 <= value <= MOST_COUNTED[torch.float64] and value == int(value)):
                raise _damaged(p, name, f"is {value}, and no count", names)


def check_values(
    saved: Mapping[Tensor, Mapping[str, Any]],
    lenient: Collection[Tensor],  # parameters whose gradients may bring in NaN and Inf
    start: int,  # t before the first gradient
    names: Mapping[Tensor, str],
) -> None:
    """Refuse values that no run can have written.

    Matrices that are DTensors are gathered, so all ranks that have a part in them must call this.
    """
    small: dict[tuple[Any, ...], Numbered] = defaultdict(Numbered.none)
    faults: list[tuple[int, str]] = []
    for number, (p, name, rules) in enumerate(_ruled(saved, lenient, start)):
        X = saved[p][name]
        if is_sharded(X):
            X = whole(X) if rules.matrix else local(X)
        elif X.numel() <= SMALL:
            key = rules, X.shape, X.dtype, X.device
            alike = small[key]
            alike.numbers.append(number)
            alike.values.append(X)
            if len(alike.numbers) == TOGETHER:
                faults += _faults(small.pop(key), rules)
            continue
        faults += _faults(Numbered([number], [X]), rules)
    for key, alike in small.items():
        faults += _faults(alike, key[0])
    if faults:
        number, fault = min(faults)
        p, name, _ = next(islice(_ruled(saved, lenient, start), number, None))
        raise _damaged(p, name, fault, names)


class Numbered(NamedTuple):
    """Entries of one shape, and their numbers among all. Two lists are quicker than many pairs."""

    numbers: list[int]
    values: list[Tensor]

    @classmethod
    def none(cls) -> "Numbered":
        """No entries yet."""
        return cls([], [])


def _ruled(
    saved: Mapping[Tensor, Mapping[str, Any]], lenient: Collection[Tensor], start: int
) -> "Iterator[tuple[Tensor, str, Rules]]":
    """All entries with values that must follow rules, in the same order on all ranks."""
    for p, entries in saved.items():
        for name, rules in rules_of(tuple(entries), start, p in lenient):
            value = entries[name]
            if isinstance(value, Tensor) and not value.is_meta:
                yield p, name, rules


def _faults(entries: Numbered, rules: "Rules") -> list[tuple[int, str]]:
    """What is wrong with entries of the same shape, by their numbers."""
    numbers, values = entries
    X = torch.stack(values) if len(values) > 1 else values[0][None]
    if X.is_floating_point():
        X = X.to(torch.promote_types(X.dtype, torch.float32))
    wrong = next((rule.fault for rule in rules.all if X.numel() and not rule.holds(X).all()), None)
    if wrong is None:
        return []
    if len(numbers) == 1:
        return [(numbers[0], wrong)]
    pairs = zip(numbers, values, strict=True)
    return [fault for n, value in pairs for fault in _faults(Numbered([n], [value]), rules)]


def _damaged(p: Tensor, name: str, fault: str, names: Mapping[Tensor, str]) -> ValueError:
    return ValueError(
        f"{name!r} in the state of {called(p, names)} {fault}; nothing was changed. "
        "The file is damaged or not from this library: load an older one"
    )


# -------------------------------------------------------------------- tests


def _counted(X: Tensor, least: int = 0) -> Tensor:
    most = MOST_COUNTED.get(X.dtype, 2.0**24)
    return X.ge(least) & X.le(most) & X.eq(X.floor())


def _positive_diagonal(X: Tensor) -> Tensor:
    A = X.flatten(0, 1)  # whole, or as triangles
    inside, largest = diagonal_of(A), A.abs().flatten(1).amax(1)
    positive = inside.amin(1) >= -ROUNDING * largest
    within = largest <= BEYOND_DIAGONAL * inside.amax(1)
    return positive & within & inside.sum(1).isfinite()  # Tr L is a mean of squared norms


def _symmetric(X: Tensor) -> Tensor:
    if X.dim() == 3:  # triangles
        return torch.ones_like(X, dtype=torch.bool)
    return (X - X.mT).abs().amax((2, 3)) <= ROUNDING * X.abs().amax((2, 3))


def _orthogonal(X: Tensor) -> Tensor:
    Q = X.flatten(0, 1)
    always = torch.Generator().manual_seed(0)
    x = torch.randn(Q.shape[-1], PROBES, generator=always).to(Q)
    return (Q.mT @ (Q @ x) - x).abs() <= NOT_ORTHOGONAL


FINITE = Rules((Rule(torch.isfinite, "has NaN or Inf"),))
COUNT = FINITE.and_(_counted, "is no count")
# Before its first gradient, SOAP is at −1.
FROM_MINUS_ONE = FINITE.and_(lambda X: _counted(X, -1), "is no count")
WITHIN_1 = FINITE.and_(lambda X: (X >= 0) & (X <= 1), "lies outside of [0, 1]")
NOT_NEGATIVE = FINITE.and_(lambda X: X >= 0, "has negative numbers")
SYMMETRIC = FINITE.and_(_symmetric, "is not symmetric", matrix=True)
GRAM = SYMMETRIC.and_(_positive_diagonal, "has a diagonal that no sum of squares has", matrix=True)
ROTATION = FINITE.and_(_orthogonal, "is not orthogonal", matrix=True)

# By the names of entries without their numbers; all other entries only have to be finite.
RULES = {
    "step": COUNT,
    "skipped": COUNT,
    "observations": COUNT,
    **dict.fromkeys(COUNTERS, COUNT),
    "criterion": WITHIN_1,
    **dict.fromkeys(("basis_work", "basis_spent", "exp_avg_sq", "graft_avg_sq"), NOT_NEGATIVE),
    **dict.fromkeys(("factor", "full_matrix"), GRAM),
    "root": SYMMETRIC,
    "basis": ROTATION,
}


@cache
def rules_of(names: tuple[str, ...], start: int, lenient: bool) -> list[tuple[str, Rules]]:
    """What the entries of a parameter must be, in the order of their names.

    Where gradients may bring in NaN and Inf, only counts have rules.
    """
    found = []
    for name in sorted(names):
        base = re.sub(r"(_\d+)?(\.\d+)?$", "", name)
        rules = FROM_MINUS_ONE if base == "step" and start < 0 else RULES.get(base, FINITE)
        if not lenient or rules in (COUNT, FROM_MINUS_ONE):
            found.append((name, rules))
    return found
