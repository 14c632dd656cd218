"""Two kinds of targets, and the way to them.

AdamW's final loss, for the study: steps and CPU seconds to it, as shares of AdamW's own. And a
validation metric as AlgoPerf sets it: hits, steps and time. There time is counted in gradients: CPU
seconds over those that a gradient takes in the same steps of the same run. So it does not depend on
how fast the machine was at that hour.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from eshampoo.lab.report.compare import Group, smooth
from eshampoo.lab.report.significance import standard_error
from eshampoo.lab.run.runlog import CPU_TIMES, Log


@dataclass(frozen=True)
class Way:
    """Steps and CPU seconds to AdamW's loss, as shares of those of AdamW's whole run.

    CPU seconds are as if the gradients of every run took as long as AdamW's.
    """

    steps: float  # infinite if the target is not reached
    seconds: float  # infinite likewise; NaN if no run had the processor


def way_to_adamw(group: Group, adamw: Group, processor: str) -> Way:
    """Return when the mean loss over the seeds first reaches AdamW's mean final loss.

    AdamW's own mean loss ends there, so its way is 1 at the most. CPU seconds are taken from the
    runs on one kind of processor.
    """
    lost = any(map(math.isinf, group.values("final_loss")))  # such runs are shorter, too
    losses = np.mean([smooth(log) for log in group.logs], axis=0) if not lost else np.zeros(0)
    reached = np.flatnonzero(losses <= adamw.mean("final_loss"))
    if not len(reached):
        return Way(1.0, 1.0) if group is adamw else Way(math.inf, math.inf)
    steps = float(group.logs[0].step[reached[0]]) / adamw.run.steps
    ours, whole = (spent(g, processor, i) for g, i in ((group, int(reached[0])), (adamw, -1)))
    return Way(steps, ours / whole)


def spent(group: Group, processor: str, record: int = -1) -> float:
    """Return the mean CPU time up to a step record, in gradients; NaN without such a processor."""
    logs = on_processor(group, processor).logs
    return fmean(float(log.gradients[record]) for log in logs) if logs else math.nan


def on_processor(group: Group, processor: str) -> Group:
    """Return the runs of a group that had one kind of processor."""
    return Group(group.label, tuple(log for log in group.logs if log.processor == processor))


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
