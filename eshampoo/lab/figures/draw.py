"""Figures from logs, as matplotlib's PNG."""

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from eshampoo.lab.figures.figure import Curve, Figure, Grouping, Panel
from eshampoo.lab.figures.table import Points
from eshampoo.lab.models import PARTS
from eshampoo.lab.report.charts import AGAINST, colour, draw_bases, draw_losses, plain_axes, png
from eshampoo.lab.report.compare import Group
from eshampoo.lab.run.runlog import Factor


def draw(figure: Figure, points: Points) -> bytes:
    """Draw a figure as PNG."""
    columns = len(figure.panels) if len(figure.panels) < 5 else 3
    rows = math.ceil(len(figure.panels) / columns)
    canvas = Canvas(figsize=(5.2 * columns, 4.2 * rows), layout="constrained")
    grid: Any = canvas.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(figure.panels) :]:
        axes.set_axis_off()
    # Many panels with the same methods have one legend, which covers no curve.
    is_shared = rows > 1 and all(panel.horizontal == "rate" for panel in figure.panels)
    for index, (panel, axes) in enumerate(zip(figure.panels, grid.flat, strict=False)):
        chosen = [(curve, group) for number, curve, group in points if number == index]
        if not chosen:  # its runs are missing
            axes.set_axis_off()
            continue
        axes.set_title(panel.title, fontsize=11)
        plain_axes(axes)
        if panel.pattern is not None:
            draw_pattern(axes, chosen[0][1], panel.pattern)
        elif panel.horizontal == "rate":
            draw_rates(axes, panel, chosen)
        else:
            draw_losses(axes, best_rates(chosen), *AGAINST[panel.horizontal])
        if not is_shared:
            axes.legend(fontsize=7.5, frameon=False)
    canvas.suptitle(figure.title, fontsize=13, fontweight="bold")
    if is_shared:
        legends = [axes.get_legend_handles_labels() for axes in grid.flat]
        named = {
            label: handle
            for handles, labels in legends
            for handle, label in zip(handles, labels, strict=True)
        }
        canvas.legend([*named.values()], [*named], loc="outside lower center", ncols=8)
    return png(canvas)


def draw_rates(axes: Axes, panel: Panel, points: Sequence[tuple[Curve, Group]]) -> None:
    """Draw the final loss against the learning rate, and a cross at the top for divergence.

    At each rate a curve shows the best of its values of β2.
    """
    finite = [v for _, group in points for v in group.values("final_loss") if math.isfinite(v)]
    top = max(finite, default=1.0)
    for index, curve in enumerate(panel.curves):
        every = [group for other, group in points if other is curve]
        own = [
            min(
                (group for group in every if group.run.rate == rate),
                key=lambda group: group.mean("final_loss"),
            )
            for rate in sorted({group.run.rate for group in every})
        ]
        if not own:
            continue
        rates = [group.run.rate for group in own]
        losses = [group.mean("final_loss") for group in own]
        shown = [loss if math.isfinite(loss) else math.nan for loss in losses]
        spread = [group.spread("final_loss") for group in own]
        if not curve.rates:  # a method that searches its own step sizes
            axes.axhline(shown[0], color=colour(index), linestyle=":", label=curve.label)
            continue
        hue = colour(index)
        axes.errorbar(rates, shown, yerr=spread, marker="o", label=curve.label, color=hue)
        lost = [rate for rate, loss in zip(rates, losses, strict=True) if math.isinf(loss)]
        axes.plot(lost, [top] * len(lost), "x", color=hue)
    axes.set_xscale("log")
    axes.set_yscale("log" if top > 20 * min(finite, default=1.0) else "linear")
    axes.set_xlabel("learning rate")
    axes.set_ylabel("final training loss (× diverged)")


def best_rates(points: Sequence[tuple[Curve, Group]]) -> list[tuple[str, Group]]:
    """Choose for each curve the runs at the learning rate with the lowest final loss."""
    best: dict[str, Group] = {}
    for curve, group in points:
        found = best.setdefault(curve.label, group)
        if group.mean("final_loss") < found.mean("final_loss"):
            best[curve.label] = group
    return list(best.items())


def pattern_group(factor: Factor, grouping: Grouping) -> str | None:
    """Return the name of the line to which a factor belongs in a plot of patterns."""
    if grouping == "letter":
        return factor.letter
    if grouping == "bias":
        weights = "weights" if factor.letter != "A" else None
        return "biases" if factor.kind == "bias" else weights
    if grouping == "part":
        part = {"attention": "attention", "feed_forward": "MLP"}.get(factor.kind)
        return part and f"{part}, {factor.letter}"
    if grouping == "ends":
        end = "embedding" if factor.kind == "embedding" else None
        end = "output layer" if factor.parameter == "head.weight" else end
        return end and f"{end}, {factor.letter}"
    if factor.kind == "norm":
        return "norms"
    return "linear layers" if factor.kind in ("linear", "bias", *PARTS) else None


def draw_pattern(axes: Axes, group: Group, grouping: Grouping) -> None:
    """Draw the basis computations so far, by group of factors."""
    draw_bases(
        axes,
        group,
        lambda factor: pattern_group(factor, grouping),
        lambda log: log.basis_computations,
    )
    axes.set_ylabel("basis computations per factor")
