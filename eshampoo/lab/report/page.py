"""One self-contained HTML page about some runs: verdict, table, curves, bases, how it was made."""

from collections.abc import Callable, Sequence
from html import escape

import numpy as np

from eshampoo.lab.catalogue import WORKLOADS
from eshampoo.lab.report.compare import Group, comparison_table, group_logs, smooth, verdict
from eshampoo.lab.report.style import STYLE
from eshampoo.lab.report.svg import Line, chart
from eshampoo.lab.run.runlog import Array, Log
from eshampoo.lab.run.runs import typed


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
        table_section(groups),
        loss_section(groups),
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
    header = groups[0].logs[0].header if groups else {"trivial": None, "metric": "metric"}
    trivial = "no" if header["trivial"] is None else f"{header['trivial']:.3g}"
    seeds = max((len(group.logs) for group in groups), default=0)
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
    by_step = [curve(group, lambda log: log.step) for group in groups]
    by_time = [curve(group, lambda log: log.seconds) for group in groups]
    return (
        "<section><h2>Training loss</h2><div class=charts>"
        + chart("Loss against steps", by_step, x_label="step", y_label="loss", log=True)
        + chart("Loss against time", by_time, x_label="seconds", y_label="loss", log=True)
        + "</div><p class=note>Lines are means over the seeds, bands reach from the lowest to the"
        " highest seed; each point averages the last 5 % of the steps.</p></section>"
    )


def curve(group: Group, horizontal: Callable[[Log], Array]) -> Line:
    """Return the mean curve of a group, as long as the shortest of its seeds (some may diverge)."""
    length = min(len(log.step) for log in group.logs)
    losses = np.stack([smooth(log)[:length] for log in group.logs])
    x = np.mean([horizontal(log)[:length] for log in group.logs], axis=0)
    if len(group.logs) == 1:
        return Line(group.label, x, losses[0])
    return Line(group.label, x, losses.mean(0), losses.min(0), losses.max(0))


def basis_section(group: Group) -> str:
    """Draw criterion and refresh patterns of one optimizer, by layer kind and by factor."""
    charts = [
        chart(
            "Criterion at the last check",
            basis_lines(group, "kind", last_criterion),
            x_label="step",
            y_label="off-diagonal share",
        ),
        chart(
            "Basis computations per factor",
            basis_lines(group, "kind", lambda log: log.basis_computations),
            x_label="step",
            y_label="computations so far",
        ),
        chart(
            "By factor: L, R, A for vectors",
            basis_lines(group, "letter", lambda log: log.basis_computations),
            x_label="step",
            y_label="computations so far",
        ),
    ]
    return (
        f"<section><h2>Bases of {escape(group.label)}</h2>"
        f'<div class="charts three">{"".join(charts)}</div></section>'
    )


def last_criterion(log: Log) -> Array:
    """Return the criterion of every factor, which is not a number before its first check."""
    return np.where(log.basis_checks > 0, log.basis_criterion, np.nan)


def basis_lines(group: Group, attribute: str, quantity: Callable[[Log], Array]) -> list[Line]:
    """Average a per-factor quantity over the factors of each kind (or letter) and all seeds."""
    factors = group.logs[0].factors
    keys = [factor.kind if attribute == "kind" else factor.letter for factor in factors]
    length = min(len(log.basis_step) for log in group.logs)
    lines = []
    for key in sorted(set(keys)):
        chosen = [index for index, other in enumerate(keys) if other == key]
        values = np.stack([quantity(log)[:length, chosen] for log in group.logs])
        x = group.logs[0].basis_step[:length]
        name = f"{key.replace('_', ' ')} ({len(chosen)})"
        lines.append(Line(name, x, values.mean(axis=(0, 2))))
    return lines


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
