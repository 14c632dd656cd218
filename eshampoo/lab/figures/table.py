"""The table beside a figure, in Markdown."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from eshampoo.lab.figures.figure import Curve, Figure
from eshampoo.lab.figures.targets import target_cells, target_of
from eshampoo.lab.report.compare import (
    Group,
    baseline,
    has_cpu,
    measure_names,
    measures,
    reached_text,
)
from eshampoo.lab.run.runlog import Log
from eshampoo.lab.run.runs import Run, typed

Points = Sequence[tuple[int, Curve, Group]]  # the panel's number, a curve, its runs


def figure_table(figure: Figure, points: Points, command: str, missing: Sequence[Run] = ()) -> str:
    """Write the note, the command, one row per curve and learning rate, and what is missing."""
    lines = [f"# {figure.title}", "", figure.note, "", f"    {command}", ""]
    lines += [missing_sentence(missing), ""] if missing else []
    shown: set[str] = set()
    for index, panel in enumerate(figure.panels):
        groups = [group for number, _, group in points if number == index]
        if not groups:
            continue
        first = groups[0].logs[0]
        names = {f"{panel.workload} {group.label} {group.run.name}" for group in groups}
        if names <= shown:  # another panel has a row for each of these runs
            continue
        shown |= names
        machine = first.header["environment"]
        cpu = has_cpu(groups)
        columns = ["method", "options", "F / steps"]
        columns += measure_names(first.header["metric"], "in the optimizer", cpu)
        columns += ["Σ \\|S\\|³", "to AdamW's best"]
        target = None if panel.evaluations is None else target_of(groups)
        if target is not None:
            columns += [f"hits {target:.4g}", "steps to it", "gradients to it"]
        lines += [
            f"## {panel.title}",
            "",
            f"`{panel.workload}`, {first.run.scale}: {first.header['parameters']:,} parameters,"
            f" {first.run.steps} steps, batch {first.header['setting']['batch']},"
            f" {len(groups[0].logs)} seeds; torch {machine['torch']}, {machine['processor']},"
            f" {machine['threads']} threads.",
            "",
            row_text(columns),
            "|---" * len(columns) + "|",
            *(row_text(table_row(group, baseline(groups), cpu, target)) for group in groups),
            "",
        ]
    return "\n".join(lines)


def missing_sentence(missing: Sequence[Run]) -> str:
    """Say how many runs of a page were not made, by workload and optimizer."""
    named = []
    for workload in dict.fromkeys(run.workload for run in missing):
        counts = Counter(run.optimizer for run in missing if run.workload == workload)
        named.append(f"{workload} ({', '.join(f'{name} {n}' for name, n in counts.items())})")
    return f"**{len(missing)} runs are missing** on this page: {', '.join(named)}."


def row_text(cells: Sequence[str]) -> str:
    """Join cells to a row of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def table_row(group: Group, reference: Group | None, cpu: bool, target: float | None) -> list[str]:
    """Return the cells of one group of runs."""
    run = group.run
    options = ", ".join(f"{key} {typed(value)}" for key, value in run.options.items())
    frequency = run.options.get("frequency")
    share = f"{frequency / run.steps:.2%}" if isinstance(frequency, int) else "–"
    work = fmean(decomposition_work(log) for log in group.logs)
    reached = reached_text(group, reference)
    way = [] if target is None else target_cells(group, target)
    return [group.label, options, share, *measures(group, cpu), f"{work:.2g}", reached, *way]


def decomposition_work(log: Log) -> float:
    """Return Σ|S|³ over all decompositions of a run."""
    return float(log.basis_work[-1]) if len(log.basis_work) else 0.0
