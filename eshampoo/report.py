"""What `basis_report()` returns."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from .state.bucket import Bucket


class FactorReport(NamedTuple):
    """How one factor of one block of one parameter fared.

    A parameter without a basis has no factor. If gradients of it were skipped, it has one row with
    mode -1 and size 0, which says how many.

    Attributes:
        name: the parameter's name, if the optimizer was given `model.named_parameters()`.
        shape: the parameter's shape.
        block: which block of the parameter.
        mode: which factor: 0 is L, 1 is R for a matrix; the only one, A, for a vector.
        size: the factor is size × size.
        checks: how often the criterion was evaluated.
        computations: how often the basis was computed.
        waited: at how many checks a basis was due that the budget did not allow.
        criterion: the value at the last check.
        work: sum of |S|³ over the computations: |S| is the size of what was diagonalised.
        failures: how many of the last computations failed in a row.
        skipped: how many gradients of this block were not finite and left out.
        history: (step, criterion, computed?) of the last checks, with record=True.
    """

    name: str | None
    shape: tuple[int, ...]
    block: int
    mode: int
    size: int
    checks: int
    computations: int
    waited: int
    criterion: float
    work: float
    failures: int
    skipped: int
    history: tuple[tuple[int, float, bool], ...]


def factor_reports(
    bucket: Bucket, names: Mapping[Tensor, str]
) -> Iterator[tuple[Tensor, FactorReport]]:
    """Parameter and report of every factor in a bucket."""
    skipped, counters = bucket.state.skipped.tolist(), bucket.counters
    for position, block in enumerate(bucket.blocks):
        p = block.parameter
        if not bucket.modes and skipped[position] > 0:
            count, shape = int(skipped[position]), tuple(p.shape)
            yield p, FactorReport(names.get(p), shape, 0, -1, 0, 0, 0, 0, 0.0, 0.0, 0, count, ())
        for k, mode in enumerate(bucket.modes):
            entry = position * len(bucket.modes) + k
            yield (
                p,
                FactorReport(
                    names.get(p),
                    tuple(p.shape),
                    block.number,
                    mode,
                    bucket.shape[mode],
                    counters.checks[entry],
                    counters.computations[entry],
                    counters.waited[entry],
                    counters.criterion[entry],
                    counters.work[entry],
                    counters.failures[entry],
                    int(skipped[position]),
                    tuple(counters.history.get(entry, ())),
                ),
            )


def reports(
    buckets: Sequence[Bucket], params: Sequence[Tensor], names: Mapping[Tensor, str]
) -> list[FactorReport]:
    """The factors of all buckets, in the order of their parameters."""
    number = {p: n for n, p in enumerate(params)}
    found = [pair for bucket in buckets for pair in factor_reports(bucket, names)]
    found.sort(key=lambda pair: (number[pair[0]], pair[1].block, pair[1].mode))
    return [report for _, report in found]
