"""What `basis_report()` returns: rows that print as a table and go into a log as scalars."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from torch import Tensor

from .state.bucket import Bucket


class FactorReport(NamedTuple):
    """What happened to one factor of one block of one parameter.

    A parameter without a basis has no factor. If the optimizer skipped some of its gradients, it
    has one row with mode -1 and size 0, which says how many.

    Attributes:
        name: the parameter's name, if the optimizer was given `model.named_parameters()`.
        shape: the parameter's shape.
        block: which block of the parameter.
        mode: which factor: for a matrix, 0 is L and 1 is R; a vector has only one, A.
        size: the factor is size × size.
        checks: how often the criterion was evaluated.
        computations: how often the basis was computed.
        waited: at how many checks a basis was due but the budget did not allow it.
        criterion: the value at the last check.
        work: sum of |S|³ over the computations, with the size |S| of what was diagonalised.
        failures: how many of the last computations failed in a row.
        skipped: how many gradients of this block were not finite, and so were left out.
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

    @property
    def letter(self) -> str:
        """The paper's letter: A for a vector or a merged matrix, else L, R, then 3, 4, …"""
        vector = sum(size > 1 for size in self.shape) <= 1
        return "A" if vector or self.size == math.prod(self.shape) else "LR3456789"[self.mode]

    @property
    def layer(self) -> str:
        """The name without its numbers, which similar layers share, or the shape if unnamed.

        Examples:
            >>> row = FactorReport("h.3.attn.weight", (8, 4), 0, 0, 8, 0, 0, 0, 0.0, 0.0, 0, 0, ())
            >>> row.layer, row._replace(name=None).layer
            ('h.attn.weight', '8x4')
        """
        if self.name is None:
            return "x".join(map(str, self.shape))
        return ".".join(part for part in self.name.split(".") if not part.isdigit())


# The columns of the table: heading, cell of a row, and whether to omit a column of zeros.
COLUMNS: tuple[tuple[str, Callable[[FactorReport], str], bool], ...] = (
    ("parameter", lambda row: row.name or "?", False),
    ("shape", lambda row: "×".join(map(str, row.shape)), False),
    ("block", lambda row: str(row.block), True),
    ("factor", lambda row: row.letter if row.mode >= 0 else "-", False),
    ("size", lambda row: str(row.size), False),
    ("checks", lambda row: f"{row.checks:,}", False),
    ("computed", lambda row: f"{row.computations:,}", False),
    ("waited", lambda row: f"{row.waited:,}", False),
    ("criterion", lambda row: f"{row.criterion:.2g}", False),
    ("work", lambda row: f"{row.work:.1e}", False),
    ("failures", lambda row: str(row.failures), True),
    ("skipped", lambda row: str(row.skipped), True),
)

# The headings of columns of words, which are aligned to the left.
OF_WORDS = ("parameter", "shape", "factor", "group", "why")


def as_table(columns: Iterable[Sequence[str]]) -> str:
    """Columns as text, each under its heading, which comes first."""
    aligned = []
    for column in columns:
        side, width = "<" if column[0] in OF_WORDS else ">", max(map(len, column))
        aligned.append([f"{cell:{side}{width}}" for cell in column])
    return "\n".join("  ".join(line).rstrip() for line in zip(*aligned, strict=True))


class BasisReport(list[FactorReport]):
    """The rows of a report: a list that prints as a table, one line per factor."""

    def __str__(self) -> str:
        columns = [((heading, *map(cell, self)), optional) for heading, cell, optional in COLUMNS]
        return as_table(c for c, optional in columns if not optional or {*c[1:]} - {"0"})

    def layers(self) -> "dict[tuple[str, str], BasisReport]":
        """The rows of factors by layer and letter, in the order in which they first appear."""
        found: dict[tuple[str, str], BasisReport] = {}
        for row in self:
            if row.mode >= 0:
                found.setdefault((row.layer, row.letter), BasisReport()).append(row)
        return found

    def scalars(self, prefix: str = "basis") -> dict[str, float]:
        """Numbers for TensorBoard, W&B and other loggers, by the names under which to log them.

        Names such as "basis/computations" stand for sums over all factors. For each layer and
        letter, as in "basis/h.attn.weight/L/criterion", there are means per factor and the sum of
        the work.
        """
        numbers: dict[str, float] = {
            f"{prefix}/{name}": sum(getattr(row, name) for row in self)
            for name in ("checks", "computations", "waited", "work", "failures", "skipped")
        }
        for (layer, letter), rows in self.layers().items():
            place = f"{prefix}/{layer}/{letter}"
            for name in ("computations", "waited", "criterion"):
                numbers[f"{place}/{name}"] = fmean(getattr(row, name) for row in rows)
            numbers[f"{place}/work"] = sum(row.work for row in rows)
        return numbers


def reports(
    buckets: Sequence[Bucket], params: Sequence[Tensor], names: Mapping[Tensor, str]
) -> BasisReport:
    """The factors of all buckets, in the order of their parameters."""
    rows: dict[Tensor, list[FactorReport]] = {p: [] for p in params}
    for bucket in buckets:
        skips, c, k = bucket.state.skipped.tolist(), bucket.counters, len(bucket.modes)
        for position, block in enumerate(bucket.blocks):
            p, skipped = block.parameter, int(skips[position])
            about = names.get(p), tuple(p.shape), block.number
            if k == 0 and skipped > 0:
                rows[p].append(FactorReport(*about, -1, 0, 0, 0, 0, 0.0, 0.0, 0, skipped, ()))
            for entry, mode in enumerate(bucket.modes, position * k):
                counts = c.checks[entry], c.computations[entry], c.waited[entry]
                found = c.criterion[entry], c.work[entry], c.failures[entry], skipped
                factor, history = (mode, bucket.shape[mode]), tuple(c.history.get(entry, ()))
                rows[p].append(FactorReport._make((*about, *factor, *counts, *found, history)))
    in_order = [sorted(own, key=lambda row: (row.block, row.mode)) for own in rows.values()]
    return BasisReport(row for own in in_order for row in own)
