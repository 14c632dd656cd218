"""Is a difference of means more than chance?"""

import math
from collections.abc import Sequence
from statistics import fmean, stdev

LEVEL = 2.0  # two methods are level if |z| is smaller


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of a mean; one value has none."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return math.nan
    return stdev(values) / math.sqrt(len(values))


def significance(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return z: by how many of its standard errors the mean of ours is below that of theirs.

        z = (mean of theirs − mean of ours) / √(standard error² of ours + standard error² of theirs)

    A lower loss is better, so a positive z is better; |z| < 2 is level. A run that diverged is
    worse than any other.
    """
    if not all(map(math.isfinite, (*ours, *theirs))):
        return math.inf if fmean(theirs) > fmean(ours) else -math.inf
    spread = math.hypot(standard_error(ours), standard_error(theirs))
    return (fmean(theirs) - fmean(ours)) / spread if spread else math.nan


def word(z: float) -> str:
    """Say what z means."""
    if math.isnan(z):
        return "–"
    return "level" if abs(z) < LEVEL else ("lower" if z > 0 else "higher")
