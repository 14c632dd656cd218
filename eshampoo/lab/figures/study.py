"""``eshampoo study``: search, fresh seeds, and a page that says what they show."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from eshampoo.lab.errors import UserError
from eshampoo.lab.figures.draw import draw
from eshampoo.lab.figures.figure import Figure
from eshampoo.lab.figures.ours import LEFT_OUT, STUDIES
from eshampoo.lab.figures.page import Problem, page, picture
from eshampoo.lab.figures.reproduce import Point, carry_out, group
from eshampoo.lab.files import write_atomic
from eshampoo.lab.run.runlog import Log


def study(known: argparse.Namespace, console: Console) -> int:
    """Carry out ``eshampoo study``: the runs that are missing, the page and its pictures."""
    if known.figure not in STUDIES:
        raise UserError(f"unknown study {known.figure!r}; choose one of: {', '.join(STUDIES)}")
    out = known.out or Path("runs") / "study"
    return carry_out(STUDIES[known.figure], out, known.figure, known, console, write_page)


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
    stem: Path,
    console: Console,
) -> None:
    """Write the page and its pictures; the page names the problems that it does not have."""
    found = problems(figure, tried, again, logs)
    drawn = [(point.panel, point.curve, group(point, logs)) for point in tried]
    here = [panel.workload for panel in figure.panels]
    others = [p.workload for p in STUDIES[figure.name].panels if p.workload not in here]
    command, left_out = f"eshampoo study {figure.name}", [*LEFT_OUT]
    if others:
        command += f" --only {','.join(here)}"
        left_out.insert(0, f"Problems of this study: {', '.join(others)}.")
    write_atomic(stem.with_suffix(".md"), page(found, figure, command, left_out).encode())
    write_atomic(stem.with_suffix(".png"), picture(found))
    write_atomic(stem.with_name(f"{stem.name}-rates.png"), draw(figure, drawn))
    console.print(f"page: {stem}.md")
