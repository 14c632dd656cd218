"""``eshampoo reproduce``: take the results that are there, run the rest, draw from the logs."""

import argparse
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from rich.console import Console

from eshampoo.lab.catalogue import workload
from eshampoo.lab.errors import INTERRUPTED, UserError
from eshampoo.lab.figures.draw import draw
from eshampoo.lab.figures.figure import Curve, Figure
from eshampoo.lab.figures.jobs import run_all
from eshampoo.lab.figures.ours import OUR_FIGURES
from eshampoo.lab.figures.paper import PAPER_FIGURES
from eshampoo.lab.figures.results import add_results, stored_logs
from eshampoo.lab.figures.table import figure_table
from eshampoo.lab.files import made, write_atomic
from eshampoo.lab.optimizers import Option, check_options
from eshampoo.lab.report.compare import Group
from eshampoo.lab.run.environment import processor
from eshampoo.lab.run.runlog import FILE_NAME, Log, finished, read_log, read_records
from eshampoo.lab.run.runs import Run, Scale

FIGURES: Mapping[str, Figure] = {**PAPER_FIGURES, **OUR_FIGURES}
MOST_RATES = 6  # learning rates of one search, with those that were added


@dataclass(frozen=True)
class Point:
    """The runs of one curve of a panel at one learning rate and β2, one per seed."""

    panel: int
    curve: Curve
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Collected:
    """A figure with the points that were tried, those on fresh seeds, and all their logs.

    A point has the runs that have a log; ``missing`` are the others.
    """

    figure: Figure
    tried: Sequence[Point]
    fresh: Sequence[Point]
    logs: Mapping[Path, Log]
    missing: Sequence[Run] = ()


def scaled_frequency(frequency: int, steps: int, paper_steps: int) -> int:
    """Return F for a run of another length: the same share of the run, and at least 1."""
    return max(1, round(frequency * steps / paper_steps))


def plan(figure: Figure, scale: Scale, seeds: int | None, steps: int | None) -> list[Point]:
    """List every run of a figure."""
    points = []
    for index, panel in enumerate(figure.panels):
        row = workload(panel.workload)
        lengths = {scale: row.settings[scale].steps, **figure.steps, **panel.steps}
        length = steps or lengths[scale]
        count = seeds or (1 if scale == "tiny" else figure.seeds)
        for curve in panel.curves:
            own = {**curve.options, **curve.scaled.get(scale, {})}
            options = {**figure.options.get(curve.optimizer, {}), **own}
            if curve.frequency is not None:
                paper = row.settings["paper"].steps
                options["frequency"] = scaled_frequency(curve.frequency, length, paper)
            check_options(curve.optimizer, options)
            for memory, rate in product(curve.memories, curve.rates.get(scale, (None,))):
                chosen = options if rate is None else {**options, "lr": rate}
                if memory is not None:
                    chosen = {**chosen, "betas": (0.9, memory)}
                runs = tuple(
                    row.run(
                        curve.optimizer,
                        chosen,
                        scale=scale,
                        seed=seed,
                        steps=length,
                        evaluations=panel.evaluations,
                    )
                    for seed in range(count)
                )
                points.append(Point(index, curve, runs))
    return points


def reproduce(known: argparse.Namespace, console: Console) -> int:
    """Carry out ``eshampoo reproduce``: the runs that are missing, the figure, its table."""
    if known.figure not in FIGURES:
        names = ", ".join(FIGURES)
        raise UserError(f"unknown figure {known.figure!r}; choose one of: {names}")
    out = known.out or Path("runs") / "figures"
    with made(out):
        found = collect_all(FIGURES[known.figure], known, console)
        if found is None:
            return INTERRUPTED
        write_figure(found, out / f"{known.figure}-{known.scale}", console)
    return 0


def collect_all(figure: Figure, known: argparse.Namespace, console: Console) -> Collected | None:
    """Get the logs of a figure, with further rates and fresh seeds; None when interrupted."""
    figure = chosen(figure, known.only)
    points = plan(figure, known.scale, known.seeds, known.steps)
    try:
        tried, logs = searched(figure, points, known, console)
        again = repeated(present(tried, logs), logs, figure.fresh, len(points[0].runs))
        logs |= collect(f"{figure.name}, fresh seeds", again, known, console) if again else {}
    except KeyboardInterrupt:
        console.print("interrupted and saved; the same command continues")
        return None
    return collected(figure, tried, again, logs)


def collected(
    figure: Figure, tried: Sequence[Point], fresh: Sequence[Point], logs: Mapping[Path, Log]
) -> Collected:
    """Return a figure with what there is of it, and what is missing."""
    runs = {run.place: run for point in (*tried, *fresh) for run in point.runs}
    missing = [run for place, run in runs.items() if place not in logs]
    if not present(tried, logs):
        raise UserError(
            f"no run of {figure.name} is stored; leave out --stored, or give other --results"
        )
    return Collected(figure, present(tried, logs), present(fresh, logs), logs, missing)


def present(points: Sequence[Point], logs: Mapping[Path, Log]) -> list[Point]:
    """Return the points with those of their runs that have a log; without any, they go."""
    there = [
        Point(point.panel, point.curve, tuple(run for run in point.runs if run.place in logs))
        for point in points
    ]
    return [point for point in there if point.runs]


def chosen(figure: Figure, only: str | None) -> Figure:
    """Return a figure with only the named workloads."""
    if only is None:
        return figure
    names = only.split(",")
    known = [panel.workload for panel in figure.panels]
    for name in names:
        if name not in known:
            raise UserError(f"{name!r} is not in this figure; choose from: {', '.join(known)}")
    return replace(figure, panels=tuple(p for p in figure.panels if p.workload in names))


def searched(
    figure: Figure, points: Sequence[Point], known: argparse.Namespace, console: Console
) -> tuple[list[Point], dict[Path, Log]]:
    """Return the points with those at further learning rates, and all their logs."""
    tried = list(points)
    logs = collect(figure.name, tried, known, console)
    while figure.extend and (more := unlisted(extended(present(tried, logs), logs), tried)):
        logs |= collect(f"{figure.name}, further rates", more, known, console)
        tried += more
    if figure.fresh and (more := unlisted(carried_over(present(tried, logs), logs), tried)):
        logs |= collect(f"{figure.name}, AdamW's best rate", more, known, console)
        tried += more
    return tried, logs


def unlisted(points: Sequence[Point], tried: Sequence[Point]) -> list[Point]:
    """Return the points that were not asked for before; a run that is missing stays missing."""
    listed = {run.place for point in tried for run in point.runs}
    return [point for point in points if point.runs[0].place not in listed]


def extended(points: Sequence[Point], logs: Mapping[Path, Log]) -> list[Point]:
    """Return points at the next learning rate, for searches whose best rate is an outermost one.

    Every β2 of a curve is a search of its own. One with fewer than three rates is no search.
    """
    more = []
    for tried in together(points, lambda p: (p.panel, p.curve.label, memory_of(p.runs[0]))):
        if len(tried) < 3:
            continue
        ranked = sorted(tried, key=lambda point: point.runs[0].rate)
        best = min(ranked, key=lambda point: group(point, logs).mean("final_loss"))
        if best not in (ranked[0], ranked[-1]) or len(ranked) > MOST_RATES:
            continue
        more.append(at_rate(best, next_rate(best.runs[0].rate, 1 if best is ranked[-1] else -1)))
    return more


def carried_over(points: Sequence[Point], logs: Mapping[Path, Log]) -> list[Point]:
    """Return EShampoo at AdamW's best learning rate, on the panels where it was not tried there."""
    more = []
    for panel in sorted({point.panel for point in points}):
        here = [point for point in points if point.panel == panel]
        adamw = [point for point in here if point.curve.optimizer == "adamw"]
        ours = [point for point in here if point.curve.label == "EShampoo"]
        if not (adamw and ours):
            continue
        lr = min(adamw, key=lambda point: group(point, logs).mean("final_loss")).runs[0].rate
        if all(point.runs[0].rate != lr for point in ours):
            more.append(at_rate(ours[0], lr))
    return more


def at_rate(point: Point, lr: float) -> Point:
    """Return a point with the same runs at another learning rate."""
    runs = tuple(replace(run, options={**run.options, "lr": lr}) for run in point.runs)
    return Point(point.panel, point.curve, runs)


def next_rate(lr: float, direction: int) -> float:
    """Return the next of … 1e-3, 3e-3, 1e-2, 3e-2 …, at most a factor √10 away.

    >>> next_rate(3e-3, 1), next_rate(1e-3, -1), next_rate(6e-3, 1), next_rate(1.5e-3, -1)
    (0.01, 0.0003, 0.01, 0.001)
    """
    place = 2 * math.log10(lr)
    if abs(place - round(place)) < 0.1:  # it is one of them, rounded to a digit
        place = round(place)
    place = math.floor(place) + 1 if direction > 0 else math.ceil(place) - 1
    return float(f"{10 ** (place / 2):.0e}")


def memory_of(run: Run) -> Option:
    """Return the β2 of a run, None for an optimizer without one."""
    betas = run.options.get("betas")
    return betas[1] if isinstance(betas, tuple) else None


def together(points: Iterable[Point], key: Callable[[Point], Hashable]) -> list[list[Point]]:
    """Return the points that share a key."""
    found: dict[Hashable, list[Point]] = {}
    for point in points:
        found.setdefault(key(point), []).append(point)
    return list(found.values())


def collect(
    what: str, points: Sequence[Point], known: argparse.Namespace, console: Console
) -> dict[Path, Log]:
    """Read the logs of the points, after training the runs that are neither stored nor finished.

    With ``--stored`` nothing is trained, and the logs are those that there are. With ``--here``
    a stored run of another kind of processor counts as missing.
    """
    runs = {run.place: run for point in points for run in point.runs}
    logs = stored_logs(known.results, runs.values())
    if known.here:
        kind = processor()
        logs = {p: log for p, log in logs.items() if log.processor == kind}
    others = {known.runs / place: run for place, run in runs.items() if place not in logs}
    missing = {path: run for path, run in others.items() if not finished(path, run)}
    console.print(
        f"{what}: {len(runs)} runs, {len(logs)} of them in {known.results},"
        f" {len(others) - len(missing)} finished before, {len(missing)} missing"
    )
    if known.stored:
        others = {path: run for path, run in others.items() if path not in missing}
    elif missing:
        for run in missing.values():
            workload(run.workload).locate(known.data)
        if not run_all(missing, known, console):
            raise KeyboardInterrupt
    if known.add and others:
        added = [(run, read_records(path / FILE_NAME)) for path, run in others.items()]
        changed = add_results(known.results, added)
        console.print(f"added {len(added)} runs to {', '.join(map(str, changed))}")
        # draw the compact logs, so that the results give the same figure later
        return logs | stored_logs(known.results, others.values())
    return logs | {run.place: read_log(path / FILE_NAME) for path, run in others.items()}


def repeated(
    points: Sequence[Point], logs: Mapping[Path, Log], seeds: int, first: int
) -> list[Point]:
    """Return the best point of each curve of each panel, with fresh seeds from ``first`` on."""
    again = []
    for tried in together(points, lambda p: (p.panel, p.curve.label)) if seeds else ():
        best = min(tried, key=lambda point: group(point, logs).mean("final_loss"))
        runs = tuple(replace(best.runs[0], seed=first + number) for number in range(seeds))
        again.append(Point(best.panel, best.curve, runs))
    return again


def group(point: Point, logs: Mapping[Path, Log], suffix: str = "") -> Group:
    """Return the runs of a point as one group."""
    return Group(point.curve.label + suffix, tuple(logs[run.place] for run in point.runs))


def write_figure(found: Collected, stem: Path, console: Console) -> None:
    """Write the picture and the table of a figure, whose runs have all finished."""
    drawn = [(p.panel, p.curve, group(p, found.logs)) for p in found.tried]
    fresh = [(p.panel, p.curve, group(p, found.logs, ", fresh seeds")) for p in found.fresh]
    scale = found.tried[0].runs[0].scale
    command = f"eshampoo reproduce {found.figure.name} --scale {scale}"
    table = figure_table(found.figure, drawn + fresh, command, found.missing)
    write_atomic(stem.with_suffix(".png"), draw(found.figure, drawn))
    write_atomic(stem.with_suffix(".md"), table.encode())
    console.print(f"figure: {stem}.png, table: {stem}.md")
