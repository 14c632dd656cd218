"""What the report and the figures draw alike, with matplotlib: curves of losses and of bases."""

import io
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import LogLocator, NullFormatter

from eshampoo.lab.report.compare import Group, smooth
from eshampoo.lab.run.runlog import Array, Factor, Log

# What a loss is drawn against: the name of the axis, and the values at the step records of a log.
AGAINST: Mapping[Literal["step", "time", "cpu"], tuple[str, Callable[[Log], Array]]] = {
    "step": ("step", lambda log: log.step),
    "time": ("seconds of training", lambda log: log.seconds),
    "cpu": ("CPU time, in gradients", lambda log: log.gradients),
}
POINTS = 300  # of a curve, about what a screen resolves
# Okabe and Ito's colours are distinct for every kind of colour vision
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B8860B", "#56B4E9", "#444444")


def colour(index: int) -> str:
    """Return the colour of the n-th curve."""
    return COLOURS[index % len(COLOURS)]


def plain_axes(axes: Axes) -> None:
    """Leave only a light grid and the two axes that have numbers."""
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def draw_losses(
    axes: Axes, groups: Sequence[tuple[str, Group]], name: str, spent: Callable[[Log], Array]
) -> None:
    """Draw the loss against what was spent on it: the mean over the seeds, and their range.

    A curve is as long as the shortest of its seeds, because some may diverge. A group without runs
    only keeps its colour.
    """
    for index, (label, group) in enumerate(groups):
        if not group.logs:
            continue
        length = min(len(log.step) for log in group.logs)
        kept = np.unique(np.linspace(0, length - 1, POINTS).astype(int))[:length]
        losses = np.stack([smooth(log)[kept] for log in group.logs])
        x = np.mean([spent(log)[kept] for log in group.logs], axis=0)
        style, hue = "-" if index < len(COLOURS) else "--", colour(index)
        axes.plot(x, losses.mean(0), style, label=label, color=hue, linewidth=1.5)
        axes.fill_between(x, losses.min(0), losses.max(0), color=hue, alpha=0.15, linewidth=0)
    axes.set_xlabel(name)
    axes.set_ylabel("training loss")
    low, high = axes.get_ylim()
    if high > 5 * low:
        axes.set_yscale("log")
        subs = (1.0, 2.0, 5.0) if high < 1e4 * low else (1.0,)
        axes.yaxis.set_major_locator(LogLocator(subs=subs))
        axes.yaxis.set_major_formatter("{x:g}")  # 0.2 instead of 2 × 10⁻¹
        axes.yaxis.set_minor_formatter(NullFormatter())


def draw_bases(
    axes: Axes,
    group: Group,
    name_of: Callable[[Factor], str | None],
    quantity: Callable[[Log], Array],
) -> None:
    """Draw a quantity of the bases: mean and standard error over the factors of each name."""
    names = [name_of(factor) for factor in group.logs[0].factors]
    length = min(len(log.basis_step) for log in group.logs)
    steps = group.logs[0].basis_step[:length]
    for index, name in enumerate(sorted({name for name in names if name is not None})):
        chosen = [i for i, other in enumerate(names) if other == name]
        values = np.concatenate([quantity(log)[:length, chosen] for log in group.logs], axis=1)
        mean, error = values.mean(1), values.std(1) / np.sqrt(values.shape[1])
        axes.plot(steps, mean, color=colour(index), label=f"{name} ({len(chosen)})")
        axes.fill_between(steps, mean - error, mean + error, color=colour(index), alpha=0.15)
    axes.set_xlabel("step")


def chart(title: str, width: float, draw: Callable[[Axes], None]) -> str:
    """Return a chart for a page: an image in the page itself, which needs no other file."""
    with matplotlib.rc_context({"svg.hashsalt": "eshampoo"}):  # equal charts have equal bytes
        canvas = Canvas(figsize=(width, 3.2), layout="constrained")
        axes = canvas.subplots()
        plain_axes(axes)
        draw(axes)
        canvas.legend(loc="outside upper left", ncols=2, fontsize=9, frameon=False)
        buffer = io.BytesIO()
        canvas.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    image = b64encode(buffer.getvalue()).decode()
    return (
        f'<figure class="chart"><figcaption>{escape(title)}</figcaption>'
        f'<img alt="{escape(title)}" src="data:image/svg+xml;base64,{image}"></figure>'
    )


def png(canvas: Canvas) -> bytes:
    """Return a canvas as the bytes of a PNG."""
    buffer = io.BytesIO()
    canvas.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()
