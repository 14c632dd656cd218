"""Two kinds of targets, and the way to them.

AdamW's final loss, for the studies: steps and CPU seconds to it, as shares of AdamW's own. And a
validation metric as AlgoPerf sets it: hits, steps and time. There time is counted in gradients: CPU
seconds over those that a gradient takes in the same steps of the same run. So it does not depend on
how fast the machine was at that hour.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from eshampoo.lab.report.compare import Group, first_reached
from eshampoo.lab.report.significance import standard_error
from eshampoo.lab.run.runlog import CPU_TIMES, Log


@dataclass(frozen=True)
class Share:
    """Steps or CPU seconds to the target, as shares of those of AdamW's whole run."""

    mean: float  # infinite if a seed did not reach the target
    error: float

    def __str__(self) -> str:
        return f"{self.mean:.2f} ± {self.error:.2f}" if math.isfinite(self.mean) else "–"


def shares(group: Group, adamw: Group) -> tuple[Share, Share]:
    """Return steps and CPU seconds to AdamW's mean final loss, as shares of AdamW's whole runs."""
    target = adamw.mean("final_loss")
    ways = [first_reached(log, target, np.cumsum(log.cpu_times["cpu"])) for log in group.logs]
    wholes = (adamw.run.steps, adamw.mean("cpu_seconds"))
    columns = [[way[i] / whole for way in ways] for i, whole in enumerate(wholes)]
    if not all(math.isfinite(value) for value in columns[0]):
        return Share(math.inf, math.nan), Share(math.inf, math.nan)
    steps, seconds = (Share(fmean(column), standard_error(column)) for column in columns)
    return steps, seconds


def sign(log: Log) -> float:
    """Return the sign that makes a higher metric of a run the better one."""
    return 1.0 if log.header["higher_is_better"] else -1.0


def best_metric(log: Log) -> float:
    """Return the best validation metric of a run, or the worst value if none is finite."""
    values = [sign(log) * metric for _, metric in log.evaluations if math.isfinite(metric)]
    return sign(log) * max(values, default=-math.inf)


def target_of(groups: Sequence[Group]) -> float | None:
    """Return the median over the seeds of AdamW's best metric, at its best learning rate."""
    tuned = [group for group in groups if group.run.optimizer == "adamw"]
    if not tuned:
        return None
    medians = [median(best_metric(log) for log in group.logs) for group in tuned]
    return max(medians, key=lambda value: sign(tuned[0].logs[0]) * value)


def way_to(log: Log, target: float) -> tuple[float, float]:
    """Return steps and time at the first evaluation at the target, infinite if none is."""
    for step, metric in log.evaluations:
        if sign(log) * metric >= sign(log) * target:
            whole, update = (log.cpu_times[name][log.step <= step].sum() for name in CPU_TIMES)
            return float(step), float(step * whole / (whole - update))
    return math.inf, math.inf


def target_cells(group: Group, target: float) -> list[str]:
    """Return hits, and steps and time of those that hit, with the standard error of the mean."""
    ways = [way for log in group.logs if math.isfinite((way := way_to(log, target))[0])]
    hits = f"{len(ways)}/{len(group.logs)}"
    if not ways:
        return [hits, "–", "–"]
    steps, times = zip(*ways, strict=True)
    return [hits, with_error(steps), with_error(times)]


def with_error(values: Sequence[float]) -> str:
    """Write a mean with its standard error, which a single value does not have."""
    error = standard_error(values)
    spread = "" if math.isnan(error) else f" ± {error:.0f}"
    return f"{fmean(values):.0f}{spread}"
