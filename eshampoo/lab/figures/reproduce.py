"""``eshampoo reproduce``: run what is missing, then draw from the logs alone."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from eshampoo.lab.catalogue import workload
from eshampoo.lab.errors import UserError
from eshampoo.lab.figures.catalogue import FIGURES, Curve, Figure
from eshampoo.lab.figures.draw import draw
from eshampoo.lab.figures.jobs import run_all
from eshampoo.lab.figures.table import figure_table
from eshampoo.lab.files import make_directory, write_atomic
from eshampoo.lab.optimizers import check_options
from eshampoo.lab.report.compare import Group
from eshampoo.lab.run.runlog import FILE_NAME, compact, finished, read_log
from eshampoo.lab.run.runs import Run, Scale


@dataclass(frozen=True)
class Point:
    """The runs of one curve of a panel at one learning rate, one per seed."""

    panel: int
    curve: Curve
    runs: tuple[Run, ...]


def scaled_frequency(frequency: int, steps: int, paper_steps: int) -> int:
    """F for a run of another length: the same share of the run, at least 1."""
    return max(1, round(frequency * steps / paper_steps))


def plan(figure: Figure, scale: Scale, seeds: int | None, steps: int | None) -> list[Point]:
    """Every run of a figure."""
    points = []
    for index, panel in enumerate(figure.panels):
        row = workload(panel.workload)
        length = steps or figure.steps.get(scale) or row.settings[scale].steps
        for curve in panel.curves:
            options = dict(curve.options)
            if curve.frequency is not None:
                paper = row.settings["paper"].steps
                options["frequency"] = scaled_frequency(curve.frequency, length, paper)
            check_options(curve.optimizer, options)
            for rate in curve.rates.get(scale, (None,)):
                chosen = options if rate is None else {**options, "lr": rate}
                runs = tuple(
                    row.run(curve.optimizer, chosen, scale=scale, seed=seed, steps=length)
                    for seed in range(seeds or (1 if scale == "tiny" else figure.seeds))
                )
                points.append(Point(index, curve, runs))
    return points


def run_directory(out: Path, run: Run) -> Path:
    """Where a run of any figure lies; figures share the runs that they have in common."""
    return out / "logs" / f"{run.workload}-{run.scale}" / run.name


def reproduce(known: argparse.Namespace, console: Console) -> int:
    """Run what is missing, draw the figure, write the table."""
    if known.figure not in FIGURES:
        names = ", ".join(FIGURES)
        raise UserError(f"unknown figure {known.figure!r}; choose one of: {names}")
    figure = FIGURES[known.figure]
    out = make_directory(known.out or Path("runs") / "figures")
    points = plan(figure, known.scale, known.seeds, known.steps)
    runs = {run_directory(out, run): run for point in points for run in point.runs}
    missing = {place: run for place, run in runs.items() if not finished(place)}
    console.print(
        f"{figure.name}: {len(runs)} runs, {len(runs) - len(missing)} of them finished before"
    )
    if missing:
        for run in missing.values():
            workload(run.workload).locate(known.data)
        if not run_all(missing, known, console):
            console.print("interrupted and saved; the same command continues")
            return 130
    groups = [
        (
            point.panel,
            point.curve,
            Group(
                point.curve.label,
                tuple(read_log(run_directory(out, run) / FILE_NAME) for run in point.runs),
            ),
        )
        for point in points
    ]
    command = f"eshampoo reproduce {figure.name} --scale {known.scale}"
    stem = f"{figure.name}-{known.scale}"
    targets = [out] if known.export is None else [out, make_directory(known.export)]
    for target in targets:
        write_atomic(target / f"{stem}.png", draw(figure, groups))
        write_atomic(target / f"{stem}.md", figure_table(figure, groups, command).encode())
        console.print(f"figure: {target / stem}.png, table: {target / stem}.md")
    if known.export is not None:
        for place, run in runs.items():
            compact(place / FILE_NAME, run_directory(known.export, run))
    return 0
