"""Is a difference of means more than chance? Welch's t-test says how likely chance is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import stdev
from typing import Any

LEVEL = 0.05  # two methods are level if chance alone gives such a difference more often


@dataclass(frozen=True)
class Difference:
    """Welch's t (positive where the first mean is lower), its degrees of freedom, and p.

    All are NaN where there is nothing to test.
    """

    t: float
    df: float
    p: float

    @property
    def word(self) -> str:
        """Say how the first mean stands to the second: lower, higher, level, or – for unknown."""
        if math.isnan(self.p):
            return "–"
        return "level" if self.p > LEVEL else ("lower" if self.t > 0 else "higher")

    @property
    def numbers(self) -> str:
        """Write t with its degrees of freedom, and p."""
        if math.isinf(self.t):
            return "a run diverged"
        p = "p < 0.001" if self.p < 0.001 else f"p = {self.p:.2g}"
        return f"t({self.df:.1f}) = {self.t:.1f}, {p}"

    def __str__(self) -> str:
        return self.word if math.isnan(self.p) else f"{self.word} ({self.numbers})"


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of a mean; one value has none."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return math.nan
    return stdev(values) / math.sqrt(len(values))


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Difference:
    """Test whether two means differ, by Welch's t-test; a lower loss is better.

    A run that diverged has an infinite loss, and is worse than any other.
    """
    diverged = [any(map(math.isinf, values)) for values in (ours, theirs)]
    if diverged[0] != diverged[1]:
        return Difference(-math.inf if diverged[0] else math.inf, math.nan, 0.0)
    # NaN without a second value, and 0 for equal values, which no test can judge
    if not all(standard_error(values) > 0 for values in (ours, theirs)):
        return Difference(math.nan, math.nan, math.nan)
    # imported here, because it takes a second, which a run need not wait
    from scipy import stats  # type: ignore[import-untyped]

    result: Any = stats.ttest_ind(theirs, ours, equal_var=False)
    return Difference(float(result.statistic), float(result.df), float(result.pvalue))
