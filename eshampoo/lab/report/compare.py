"""From logs to a comparison: groups of seeds, a table, and a plain statement of who won."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np

from eshampoo.lab.report.significance import difference
from eshampoo.lab.run.runlog import Array, Log
from eshampoo.lab.run.runs import Run, label

SMOOTHING = 0.05  # average losses over this share of the run, like the final loss


@dataclass(frozen=True)
class Group:
    """The finished runs that differ only in their seed."""

    label: str
    logs: tuple[Log, ...]

    @property
    def run(self) -> Run:
        """Return the first of the runs."""
        return self.logs[0].run

    def values(self, key: str) -> list[float]:
        """Return a field of the end records, one per seed; a diverged run counts as infinite."""
        ends = [log.end for log in self.logs if log.end is not None]
        return [math.inf if end[key] is None else float(end[key]) for end in ends]

    def mean(self, key: str) -> float:
        """Return the mean of a field over the seeds."""
        return fmean(self.values(key))

    def spread(self, key: str) -> float:
        """Return the standard deviation of a field over the seeds, 0 for one seed."""
        values = [value for value in self.values(key) if math.isfinite(value)]
        return stdev(values) if len(values) > 1 else 0.0

    def metrics(self) -> list[float]:
        """Return the validation metric at the end of each run."""
        return [log.evaluations[-1][1] for log in self.logs if log.evaluations]


def group_logs(logs: Sequence[Log]) -> list[Group]:
    """Group finished runs by everything but the seed; a label names what differs."""
    groups: dict[str, list[Log]] = {}
    for log in logs:
        if log.finished:
            key = log.run.name.rpartition(",seed=")[0]
            groups.setdefault(f"{log.run.workload}/{log.run.scale}/{key}", []).append(log)
    runs = [members[0].run for members in groups.values()]
    return [Group(label(members[0].run, runs), tuple(members)) for members in groups.values()]


def smooth(log: Log) -> Array:
    """Average the loss over the last 5 % of the run's steps, at every step record."""
    spacing = log.step[0] if len(log.step) else 1
    window = max(1, round(SMOOTHING * log.run.steps / spacing))
    total = np.concatenate([[0.0], np.cumsum(log.loss)])
    last = np.arange(1, len(log.loss) + 1)
    first = np.maximum(0, last - window)
    return np.asarray((total[last] - total[first]) / (last - first))


def first_reached(log: Log, target: float, seconds: Array | None = None) -> tuple[float, float]:
    """Return steps and seconds until the averaged loss is at most ``target``, infinite if never.

    By default, seconds are the training time at every step record.
    """
    reached = np.flatnonzero(smooth(log) <= target)
    if not len(reached):
        return math.inf, math.inf
    spent = log.seconds if seconds is None else seconds
    return float(log.step[reached[0]]), float(spent[reached[0]])


def baseline(groups: Sequence[Group]) -> Group | None:
    """Return the best AdamW among the groups, the reference for the others."""
    candidates = [group for group in groups if group.run.optimizer == "adamw"]
    return min(candidates, key=lambda group: group.mean("final_loss"), default=None)


def to_baseline(group: Group, reference: Group | None) -> tuple[int, float, float]:
    """Count the seeds that reach the reference's final loss, with their mean steps and seconds."""
    if reference is None:
        return 0, math.inf, math.inf
    target = reference.mean("final_loss")
    pairs = [pair for log in group.logs if math.isfinite((pair := first_reached(log, target))[0])]
    if not pairs:
        return 0, math.inf, math.inf
    return len(pairs), fmean(pair[0] for pair in pairs), fmean(pair[1] for pair in pairs)


def reached_text(group: Group, reference: Group | None) -> str:
    """Write ``to_baseline`` as a cell of a table."""
    hits, steps, seconds = to_baseline(group, reference)
    if not hits:
        return "–"
    some = f" ({hits} of {len(group.logs)} seeds)" if hits < len(group.logs) else ""
    return f"{steps:,.0f} steps, {seconds:.1f} s{some}"


def verdict(groups: Sequence[Group]) -> str:
    """Say in a sentence or two who has the lowest final loss, and whether the seeds agree."""
    if not groups:
        return "No run has finished yet."
    if len({(group.run.workload, group.run.scale) for group in groups}) > 1:
        return "These runs are of different workloads, so there is no single winner."
    ranked = sorted(groups, key=lambda group: group.mean("final_loss"))
    best = ranked[0]
    if math.isinf(best.mean("final_loss")):
        return "Nobody won: every optimizer diverged in at least one run."
    if len(ranked) == 1:
        return (
            f"{best.label} ended at a training loss of {value_text(best)}; nothing to compare with."
        )
    second = ranked[1]
    result = difference(best.values("final_loss"), second.values("final_loss"))
    numbers = f"{value_text(best)}, next is {second.label} with {value_text(second)}"
    if result.word == "level":
        chance = f"that may be chance ({result.numbers})"
        sentence = f"No clear winner: {best.label} has the lowest mean training loss, {numbers}"
    else:
        single = "with a single seed that may be chance"
        chance = single if result.word == "–" else f"that is more than chance ({result.numbers})"
        sentence = f"By final training loss {best.label} won: {numbers}"
    return f"{sentence}; {chance}.{versus_adamw(best, groups)}"


def versus_adamw(best: Group, groups: Sequence[Group]) -> str:
    """Say when the best reached AdamW's final loss, beside AdamW's own way there."""
    reference = baseline(groups)
    if reference is None or best is reference:
        return ""
    hits, steps, seconds = to_baseline(best, reference)
    _, own_steps, own_seconds = to_baseline(reference, reference)
    if hits < len(best.logs):
        return ""
    return (
        f" It reached {reference.label}'s final loss after {steps:,.0f} steps and {seconds:.1f} s;"
        f" {reference.label} itself took {own_steps:,.0f} steps and {own_seconds:.1f} s:"
        f" {steps / own_steps:.0%} of the steps and {seconds / own_seconds:.0%} of the time."
    )


def time_text(groups: Sequence[Group]) -> str:
    """Say where the time of each optimizer's runs went."""
    shares = [
        f"{group.label} {share:.0%} in the optimizer, {1 - share:.0%} in gradients and data"
        for group in sorted(groups, key=lambda group: group.mean("final_loss"))
        if math.isfinite(share := group.mean("optimizer_share"))
    ]
    return f"Where the time went: {'; '.join(shares)}. Larger batches lower the optimizer's share."


def value_text(group: Group) -> str:
    """Write mean and spread of the final loss."""
    mean, spread = group.mean("final_loss"), group.spread("final_loss")
    if math.isinf(mean):
        return "∞ (diverged)"
    return f"{mean:.3g} ± {spread:.1g}" if len(group.logs) > 1 else f"{mean:.3g}"


def comparison_table(groups: Sequence[Group]) -> tuple[list[str], list[list[str]]]:
    """Return column names and rows of text, for the console and for the report."""
    reference = baseline(groups)
    metric = groups[0].logs[0].header["metric"] if groups else "metric"
    cpu = has_cpu(groups)
    columns = ["optimizer", *measure_names(metric, "in optimizer", cpu)]
    columns += ["to AdamW's loss"] if reference else []
    rows = []
    for group in sorted(groups, key=lambda group: group.mean("final_loss")):
        row = [group.label, *measures(group, cpu)]
        rows.append([*row, reached_text(group, reference)] if reference else row)
    return columns, rows


def has_cpu(groups: Sequence[Group]) -> bool:
    """Return whether every run has its CPU seconds, which older logs lack."""
    ends = [log.end for group in groups for log in group.logs]
    return bool(ends) and all("cpu_seconds" in (end or {}) for end in ends)


def measure_names(metric: str, share: str, cpu: bool) -> list[str]:
    """Name the columns of ``measures``."""
    return ["final loss", metric, "time", share, *(["CPU time"] if cpu else []), "bases"]


def measures(group: Group, cpu: bool) -> list[str]:
    """Return the results of a group as cells: losses, metric, times, basis computations."""
    metrics = group.metrics()
    return [
        value_text(group),
        f"{fmean(metrics):.3g}" if metrics else "–",
        f"{group.mean('seconds'):.1f} s",
        f"{group.mean('optimizer_share'):.0%}",
        *([f"{group.mean('cpu_seconds'):.1f} s"] if cpu else []),
        f"{group.mean('computations'):,.0f}",
    ]
