"""The way to a target: steps and CPU seconds to AdamW's loss, as shares of AdamW's own."""

import math
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from eshampoo.lab.report.compare import Group, first_reached
from eshampoo.lab.report.significance import standard_error
from eshampoo.lab.run.runlog import Log


@dataclass(frozen=True)
class Share:
    """Steps or CPU seconds to the target, as shares of those of AdamW's whole run."""

    mean: float  # infinite if a seed did not reach the target
    error: float

    def __str__(self) -> str:
        return f"{self.mean:.2f} ± {self.error:.2f}" if math.isfinite(self.mean) else "–"


def way(log: Log, target: float) -> tuple[float, float]:
    """Return steps and CPU seconds until the averaged loss is at most ``target``."""
    return first_reached(log, target, np.cumsum(log.cpu_times["cpu"]))


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
