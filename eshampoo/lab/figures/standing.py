"""What fresh seeds say of the methods on one problem: losses, significance, the way to a target."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np

from eshampoo.lab.report.compare import Group, smooth
from eshampoo.lab.run.runlog import Log

LEVEL = 2.0  # two methods are level while |z| is smaller


@dataclass(frozen=True)
class Share:
    """Steps or CPU seconds to the target, as shares of those of AdamW's whole run."""

    mean: float  # infinite unless every seed reached the target
    error: float

    def __str__(self) -> str:
        return f"{self.mean:.2f} ± {self.error:.2f}" if math.isfinite(self.mean) else "–"


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of a mean."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def significance(group: Group, other: Group) -> float:
    """Return z: by how many of its standard errors the mean loss is below that of another.

        z = (mean of the other − mean) / √(standard error² + standard error of the other²)

    Positive is better, and |z| < 2 is level.
    """
    ours, theirs = group.values("final_loss"), other.values("final_loss")
    if not all(map(math.isfinite, (*ours, *theirs))):
        return math.inf if fmean(theirs) > fmean(ours) else -math.inf
    spread = math.hypot(standard_error(ours), standard_error(theirs))
    return (fmean(theirs) - fmean(ours)) / spread if spread else math.nan


def way(log: Log, target: float) -> tuple[float, float]:
    """Return steps and CPU seconds until the averaged loss is at most ``target``."""
    reached = np.flatnonzero(smooth(log) <= target)
    if not len(reached):
        return math.inf, math.inf
    return float(log.step[reached[0]]), float(np.cumsum(log.cpu_times["cpu"])[reached[0]])


def shares(group: Group, adamw: Group) -> tuple[Share, Share]:
    """Return steps and CPU seconds to AdamW's mean final loss, as shares of AdamW's whole runs."""
    target = adamw.mean("final_loss")
    ways = [way(log, target) for log in group.logs]
    wholes = (adamw.run.steps, adamw.mean("cpu_seconds"))
    columns = [[way[i] / whole for way in ways] for i, whole in enumerate(wholes)]
    if not all(math.isfinite(value) for value in columns[0]):
        return Share(math.inf, math.nan), Share(math.inf, math.nan)
    steps, seconds = (Share(fmean(column), standard_error(column)) for column in columns)
    return steps, seconds


def word(z: float) -> str:
    """Say what z means."""
    if math.isnan(z):
        return "–"
    return "level" if abs(z) < LEVEL else ("lower" if z > 0 else "higher")
