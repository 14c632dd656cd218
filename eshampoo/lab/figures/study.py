"""``eshampoo study``: search, fresh seeds, and a page that says what they show."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from eshampoo.lab.errors import INTERRUPTED, UserError
from eshampoo.lab.figures.draw import draw
from eshampoo.lab.figures.ours import LEFT_OUT, NAMES, STUDIES
from eshampoo.lab.figures.page import Problem, page, picture, short_table
from eshampoo.lab.figures.reproduce import Collected, collect_all, group
from eshampoo.lab.files import made, write_atomic


def study(known: argparse.Namespace, console: Console) -> int:
    """Carry out ``eshampoo study``: the runs that are missing, the page and its pictures."""
    if known.figure not in STUDIES:
        raise UserError(f"unknown study {known.figure!r}; choose one of: {', '.join(STUDIES)}")
    out = known.out or Path("runs") / "study"
    with made(out):
        found = collect_all(STUDIES[known.figure], known, console)
        if found is None:
            return INTERRUPTED
        write_page(found, out / known.figure, console)
    return 0


def problems(found: Collected) -> list[Problem]:
    """Return the groups of runs of each problem that has AdamW and EShampoo, by method."""
    by_panel = []
    for index, panel in enumerate(found.figure.panels):
        tried = [point for point in found.tried if point.panel == index]
        search = {
            curve.label: [group(point, found.logs) for point in tried if point.curve is curve]
            for curve in panel.curves
        }
        search = {label: groups for label, groups in search.items() if groups}
        fresh = {p.curve.label: group(p, found.logs) for p in found.fresh if p.panel == index}
        if {"AdamW", "EShampoo"} <= search.keys():
            by_panel.append(Problem(panel.workload, search, fresh))
    return by_panel


def page_of(found: Collected, groups: Sequence[Problem]) -> str:
    """Return the text of the page, which names the problems and the runs that it does not have."""
    name = found.figure.name
    here = [panel.workload for panel in found.figure.panels]
    others = [panel.workload for panel in STUDIES[name].panels if panel.workload not in here]
    command, left_out = f"eshampoo study {name}", [*LEFT_OUT]
    if others:
        command += f" --only {','.join(here)}"
        left_out.insert(0, f"Problems of this study: {', '.join(others)}.")
    if found.missing:
        command += " --stored"
    return page(groups, found.figure, command, left_out, found.missing)


def write_page(found: Collected, stem: Path, console: Console) -> None:
    """Write the page and its pictures, and show README's table of the same runs."""
    groups = problems(found)
    if not groups:
        raise UserError("no problem has AdamW and EShampoo; leave out --stored")
    drawn = [(point.panel, point.curve, group(point, found.logs)) for point in found.tried]
    write_atomic(stem.with_suffix(".md"), page_of(found, groups).encode())
    write_atomic(stem.with_suffix(".png"), picture(groups))
    write_atomic(stem.with_name(f"{stem.name}-rates.png"), draw(found.figure, drawn))
    for line in short_table(groups, NAMES):
        console.print(line, soft_wrap=True, highlight=False)
    console.print(f"page: {stem}.md")
