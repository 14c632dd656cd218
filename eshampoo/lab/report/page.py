"""One self-contained HTML page about some runs: verdict, table, curves, bases, how it was made."""

from collections.abc import Callable, Sequence
from html import escape

import numpy as np
from matplotlib.axes import Axes

from eshampoo.lab.catalogue import WORKLOADS
from eshampoo.lab.report.charts import AGAINST, chart, draw_bases, draw_losses
from eshampoo.lab.report.compare import Group, comparison_table, group_logs, verdict
from eshampoo.lab.report.style import STYLE
from eshampoo.lab.run.runlog import Array, Factor, Log
from eshampoo.lab.run.runs import typed

WIDE, NARROW = 5.2, 4.2  # inches of a chart, two or three of which stand beside each other


def report_page(logs: Sequence[Log]) -> str:
    """Write the page as HTML."""
    groups = group_logs(logs)
    first = logs[0]
    names = sorted({log.run.workload for log in logs})
    titles = [WORKLOADS[name].title if name in WORKLOADS else name for name in names]
    unfinished = len(logs) - sum(log.finished for log in logs)
    note = f"<p class=note>{unfinished} of the runs are unfinished and left out.</p>" * bool(
        unfinished
    )
    sections = [
        f"<p class=verdict>{escape(verdict(groups))}</p>{note}",
        *([table_section(groups), loss_section(groups)] if groups else []),
        *(basis_section(group) for group in groups if group.logs[0].factors),
        origin_section(first, groups),
    ]
    title = f"{', '.join(names)} — optimizers compared"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # with an empty icon, browsers do not ask for one
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head>"
        f"<body><main><header><p class=eyebrow>eshampoo lab · {escape(', '.join(names))}</p>"
        f"<h1>{escape('; '.join(titles))}</h1></header>{''.join(sections)}</main></body></html>\n"
    )


def table_section(groups: Sequence[Group]) -> str:
    """Write the comparison as a table that turns into cards on a phone."""
    columns, rows = comparison_table(groups)
    head = "".join(f"<th scope=col>{escape(column)}</th>" for column in columns)
    body = ""
    for row in rows:
        cells = [
            f'<td data-label="{escape(column)}">{escape(cell)}</td>'
            for column, cell in zip(columns[1:], row[1:], strict=True)
        ]
        body += f"<tr><th scope=row>{escape(row[0])}</th>{''.join(cells)}</tr>"
    header = groups[0].logs[0].header
    trivial = "no" if header["trivial"] is None else f"{header['trivial']:.3g}"
    seeds = max(len(group.logs) for group in groups)
    return (
        "<section><h2>Results</h2>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        f"<p class=note>{'Means ± one standard deviation over ' if seeds > 1 else ''}{seeds}"
        f" seed{'s' * (seeds != 1)}. The final loss is the training loss averaged over the last"
        " 5 % of the steps. Time is that of the training steps alone, without evaluation and"
        " logging; CPU time is that of all threads of the process, and leaves out what else the"
        " machine did. A trivial predictor has"
        f" {escape(str(header['metric']))} {trivial}.</p></section>"
    )


def loss_section(groups: Sequence[Group]) -> str:
    """Draw the loss against steps and against seconds."""
    named = [(group.label, group) for group in groups]
    return (
        "<section><h2>Training loss</h2><div class=charts>"
        + chart("Loss against steps", WIDE, lambda axes: draw_losses(axes, named, *AGAINST["step"]))
        + chart("Loss against time", WIDE, lambda axes: draw_losses(axes, named, *AGAINST["time"]))
        + "</div><p class=note>Lines are means over the seeds, bands reach from the lowest to the"
        " highest seed; each point averages the last 5 % of the steps.</p></section>"
    )


def basis_section(group: Group) -> str:
    """Draw criterion and refresh patterns of one optimizer, by layer kind and by factor."""

    def by(
        name_of: Callable[[Factor], str], quantity: Callable[[Log], Array], label: str
    ) -> Callable[[Axes], None]:
        def draw(axes: Axes) -> None:
            draw_bases(axes, group, name_of, quantity)
            axes.set_ylabel(label)

        return draw

    charts = (
        chart(
            "Criterion at the last check", NARROW, by(kind, last_criterion, "off-diagonal share")
        ),
        chart("Bases by layer", NARROW, by(kind, computations, "computations per factor")),
        chart(
            "Bases by factor: L, R, A for vectors",
            NARROW,
            by(lambda factor: factor.letter, computations, "computations per factor"),
        ),
    )
    return (
        f"<section><h2>Bases of {escape(group.label)}</h2>"
        f'<div class="charts three">{"".join(charts)}</div></section>'
    )


def kind(factor: Factor) -> str:
    """Return the kind of layer to which a factor belongs."""
    return factor.kind.replace("_", " ")


def computations(log: Log) -> Array:
    """Return the basis computations of every factor so far."""
    return log.basis_computations


def last_criterion(log: Log) -> Array:
    """Return the criterion of every factor, which is not a number before its first check."""
    return np.where(log.basis_checks > 0, log.basis_criterion, np.nan)


def origin_section(log: Log, groups: Sequence[Group]) -> str:
    """Write the command, the settings and the machine."""
    settings = "".join(
        f"<tr><th scope=row>{escape(group.label)}</th><td>"
        + escape(", ".join(f"{key} {typed(value)}" for key, value in group.run.options.items()))
        + f"</td><td>seeds {escape(', '.join(str(log.run.seed) for log in group.logs))}</td></tr>"
        for group in groups
    )
    facts = {
        **log.header["environment"],
        "parameters": f"{log.header['parameters']:,}",
        "training examples": f"{log.header['examples']:,}",
        "steps": f"{log.run.steps:,}",
        **{key: value for key, value in log.header["setting"].items() if key != "data"},
    }
    items = "".join(
        f"<div><dt>{escape(key)}</dt><dd>{escape(fact_text(value))}</dd></div>"
        for key, value in facts.items()
    )
    return (
        "<section><h2>How this was made</h2>"
        f"<pre><code>{escape(log.header['command'])}</code></pre>"
        f"<table class=plain><tbody>{settings}</tbody></table><dl>{items}</dl></section>"
    )


def fact_text(value: object) -> str:
    """Write a fact as text, with the model's keywords in one line."""
    if isinstance(value, dict):
        return ", ".join(
            f"{key} {item}" if key != "name" else str(item) for key, item in value.items()
        )
    return str(value)
