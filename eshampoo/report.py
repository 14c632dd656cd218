"""What `basis_report()` returns."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from .state.bucket import Bucket


class FactorReport(NamedTuple):
    """How one factor of one block of one parameter fared."""

    name: str | None
    """The parameter's name, if the optimizer was given `model.named_parameters()`."""
    shape: tuple[int, ...]
    """The parameter's shape."""
    block: int
    """Which block of the parameter."""
    mode: int
    """Which factor: 0 is L, 1 is R for a matrix; the only one, A, for a vector.

    A parameter under plain Adam has no factor. If gradients of it were skipped, it has one row with
    mode -1 and size 0, which says how many.
    """
    size: int
    """The factor is size × size."""
    checks: int
    """How often the criterion was evaluated."""
    computations: int
    """How often the basis was computed."""
    waited: int
    """At how many checks a basis was due that the budget did not allow."""
    criterion: float
    """The value at the last check."""
    work: float
    """Sum of |S|³ over the computations: |S| is the size of what was diagonalised."""
    failures: int
    """How many of the last computations failed in a row."""
    skipped: int
    """How many gradients of this block were not finite and left out."""
    history: tuple[tuple[int, float, bool], ...]
    """(step, criterion, computed?) of the last checks, with record=True."""


def factor_reports(
    bucket: Bucket, names: Mapping[Tensor, str]
) -> Iterator[tuple[Tensor, FactorReport]]:
    """Parameter and report of every factor in a bucket."""
    skipped, counters = bucket.state.skipped.tolist(), bucket.counters
    for position, block in enumerate(bucket.blocks):
        p = block.parameter
        if bucket.elementwise and skipped[position] > 0:
            count, shape = int(skipped[position]), tuple(p.shape)
            yield p, FactorReport(names.get(p), shape, 0, -1, 0, 0, 0, 0, 0.0, 0.0, 0, count, ())
        for k, mode in enumerate(bucket.modes):
            entry = position * len(bucket.modes) + k
            yield (
                p,
                FactorReport(
                    name=names.get(p),
                    shape=tuple(p.shape),
                    block=block.number,
                    mode=mode,
                    size=bucket.shape[mode],
                    checks=counters.checks[entry],
                    computations=counters.computations[entry],
                    waited=counters.waited[entry],
                    criterion=counters.criterion[entry],
                    work=counters.work[entry],
                    failures=counters.failures[entry],
                    skipped=int(skipped[position]),
                    history=tuple(counters.history.get(entry, ())),
                ),
            )
