"""Figures from logs, as matplotlib's PNG."""

import io
import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from eshampoo.lab.figures.catalogue import Curve, Figure, Grouping, Panel
from eshampoo.lab.figures.table import Points
from eshampoo.lab.models import PARTS
from eshampoo.lab.report.compare import Group, smooth
from eshampoo.lab.report.svg import COLOURS
from eshampoo.lab.run.runlog import Factor


def draw(figure: Figure, points: Points) -> bytes:
    """Draw a figure as PNG."""
    columns = len(figure.panels) if len(figure.panels) < 5 else 3
    rows = math.ceil(len(figure.panels) / columns)
    canvas = Canvas(figsize=(5.2 * columns, 4.2 * rows), layout="constrained")
    grid: Any = canvas.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(figure.panels) :]:
        axes.set_axis_off()
    for index, (panel, axes) in enumerate(zip(figure.panels, grid.flat, strict=False)):
        chosen = [(curve, group) for number, curve, group in points if number == index]
        axes.set_title(panel.title, fontsize=11)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if panel.pattern is not None:
            draw_pattern(axes, chosen[0][1], panel.pattern)
        elif panel.horizontal == "rate":
            draw_rates(axes, panel, chosen)
        elif panel.horizontal == "cost":
            draw_cost(axes, chosen)
        elif panel.horizontal == "share":
            draw_shares(axes, chosen)
        else:
            draw_losses(axes, best_rates(chosen), panel.horizontal == "time")
        axes.legend(fontsize=7.5, frameon=False)
    canvas.suptitle(figure.title, fontsize=13, fontweight="bold")
    buffer = io.BytesIO()
    canvas.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


def draw_rates(axes: Axes, panel: Panel, points: Sequence[tuple[Curve, Group]]) -> None:
    """Draw the final loss against the learning rate, and a cross at the top for divergence."""
    finite = [v for _, group in points for v in group.values("final_loss") if math.isfinite(v)]
    top = max(finite, default=1.0)
    for index, curve in enumerate(panel.curves):
        own = sorted(
            (group for other, group in points if other is curve), key=lambda group: group.run.rate
        )
        rates = [group.run.rate for group in own]
        losses = [group.mean("final_loss") for group in own]
        shown = [loss if math.isfinite(loss) else math.nan for loss in losses]
        spread = [group.spread("final_loss") for group in own]
        colour = COLOURS[index % len(COLOURS)]
        if not curve.rates:  # a method that searches its own step sizes
            axes.axhline(shown[0], color=colour, linestyle=":", label=curve.label)
            continue
        axes.errorbar(rates, shown, yerr=spread, marker="o", label=curve.label, color=colour)
        lost = [rate for rate, loss in zip(rates, losses, strict=True) if math.isinf(loss)]
        axes.plot(lost, [top] * len(lost), "x", color=colour)
    axes.set_xscale("log")
    axes.set_yscale("log" if top > 20 * min(finite, default=1.0) else "linear")
    axes.set_xlabel("learning rate")
    axes.set_ylabel("final training loss (× diverged)")


def best_rates(points: Sequence[tuple[Curve, Group]]) -> list[tuple[Curve, Group]]:
    """Choose for each curve the runs at the learning rate with the lowest final loss."""
    best: dict[str, tuple[Curve, Group]] = {}
    for curve, group in points:
        found = best.setdefault(curve.label, (curve, group))
        if group.mean("final_loss") < found[1].mean("final_loss"):
            best[curve.label] = (curve, group)
    return list(best.values())


def draw_losses(axes: Axes, points: Sequence[tuple[Curve, Group]], time: bool) -> None:
    """Draw the loss against steps or seconds: the mean over the seeds, and their range."""
    for index, (curve, group) in enumerate(points):
        length = min(len(log.step) for log in group.logs)
        losses = np.stack([smooth(log)[:length] for log in group.logs])
        places = [(log.seconds if time else log.step)[:length] for log in group.logs]
        x, colour = np.mean(places, axis=0), COLOURS[index % len(COLOURS)]
        style = "-" if index < len(COLOURS) else "--"
        axes.plot(x, losses.mean(0), style, label=curve.label, color=colour, linewidth=1.5)
        axes.fill_between(x, losses.min(0), losses.max(0), color=colour, alpha=0.15, linewidth=0)
    axes.set_xlabel("seconds of training" if time else "step")
    axes.set_ylabel("training loss")
    low, high = axes.get_ylim()
    axes.set_yscale("log" if high > 5 * low else "linear")


def draw_cost(axes: Axes, points: Sequence[tuple[Curve, Group]]) -> None:
    """Draw the final loss against the optimizer's seconds, with one point per method."""
    for index, (curve, group) in enumerate(points):
        seconds = fmean(float(log.times["optimizer"].sum()) for log in group.logs)
        loss, spread = group.mean("final_loss"), group.spread("final_loss")
        marker, colour = "osD^v<>"[index // len(COLOURS) % 7], COLOURS[index % len(COLOURS)]
        axes.errorbar([seconds], [loss], [spread], marker=marker, color=colour, label=curve.label)
    axes.set_xscale("log")
    axes.set_xlabel("seconds in the optimizer")
    axes.set_ylabel("final training loss")


def draw_shares(axes: Axes, points: Sequence[tuple[Curve, Group]]) -> None:
    """Draw |S|/d of the refreshes since the sample before: the cube root of Σ|S|³ / Σd³."""
    for index, (curve, group) in enumerate(points):
        shares = []
        for log in group.logs:
            cubes = np.array([factor.size for factor in log.factors], dtype=np.float64) ** 3
            whole = np.diff(log.basis_computations @ cubes, prepend=0.0)
            part = np.diff(log.basis_work, prepend=0.0)
            with np.errstate(invalid="ignore"):  # 0 / 0 without a refresh: a gap
                shares.append(np.cbrt(part / whole))
        mean, colour = np.mean(shares, axis=0), COLOURS[index % len(COLOURS)]
        axes.plot(group.logs[0].basis_step, mean, marker=".", label=curve.label, color=colour)
    axes.set_ylim(0, 1)
    axes.set_xlabel("step")
    axes.set_ylabel("|S| / d of a refresh")


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
    """Draw the basis computations so far: mean and standard error over the factors of a group."""
    names = [pattern_group(factor, grouping) for factor in group.logs[0].factors]
    steps = group.logs[0].basis_step
    for index, name in enumerate(sorted({name for name in names if name is not None})):
        chosen = [i for i, other in enumerate(names) if other == name]
        counts = np.concatenate([log.basis_computations[:, chosen] for log in group.logs], axis=1)
        mean = counts.mean(1)
        error = counts.std(1) / math.sqrt(counts.shape[1])
        axes.plot(steps, mean, color=COLOURS[index], label=f"{name} ({len(chosen)})")
        axes.fill_between(steps, mean - error, mean + error, color=COLOURS[index], alpha=0.15)
    axes.set_xlabel("step")
    axes.set_ylabel("basis computations per factor")
