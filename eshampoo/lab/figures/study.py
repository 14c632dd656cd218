"""``eshampoo study``: search, fresh seeds, and a page that says what they show."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from eshampoo.lab.errors import UserError
from eshampoo.lab.figures.catalogue import Figure
from eshampoo.lab.figures.draw import draw
from eshampoo.lab.figures.evidence import LEFT_OUT, STUDIES
from eshampoo.lab.figures.page import Problem, page, picture
from eshampoo.lab.figures.reproduce import (
    Point,
    chosen,
    collect,
    group,
    plan,
    repeated,
    searched,
)
from eshampoo.lab.files import made, write_atomic
from eshampoo.lab.run.runlog import Log


def study(known: argparse.Namespace, console: Console) -> int:
    """Carry out ``eshampoo study``: the runs that are missing, the page and its pictures."""
    if known.figure not in STUDIES:
        raise UserError(f"unknown study {known.figure!r}; choose one of: {', '.join(STUDIES)}")
    figure = chosen(STUDIES[known.figure], known.only)
    points = plan(figure, known.scale, known.seeds, known.steps)
    out = known.out or Path("runs") / "study"
    with made(out):
        try:
            tried, logs = searched(figure, points, known, console)
            again = repeated(tried, logs, figure.fresh)
            logs |= collect(f"{figure.name}, fresh seeds", again, known, console)
        except KeyboardInterrupt:
            console.print("interrupted and saved; the same command continues")
            return 130
        write_page(figure, tried, again, logs, out, console)
    return 0


def problems(
    figure: Figure, tried: Sequence[Point], again: Sequence[Point], logs: Mapping[Path, Log]
) -> list[Problem]:
    """Return the groups of runs of each problem, by method."""
    found = []
    for index, panel in enumerate(figure.panels):
        search = {
            curve.label: [group(p, logs) for p in tried if p.panel == index and p.curve is curve]
            for curve in panel.curves
        }
        fresh = {p.curve.label: group(p, logs) for p in again if p.panel == index}
        found.append(Problem(panel.workload, search, fresh))
    return found


def write_page(
    figure: Figure,
    tried: Sequence[Point],
    again: Sequence[Point],
    logs: Mapping[Path, Log],
    out: Path,
    console: Console,
) -> None:
    """Write the page and its pictures."""
    found = problems(figure, tried, again, logs)
    drawn = [(point.panel, point.curve, group(point, logs)) for point in tried]
    text = page(found, figure, LEFT_OUT)
    write_atomic(out / f"{figure.name}.md", text.encode())
    write_atomic(out / f"{figure.name}.png", picture(found))
    write_atomic(out / f"{figure.name}-rates.png", draw(figure, drawn))
    console.print(f"page: {out / figure.name}.md")
