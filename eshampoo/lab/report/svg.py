"""Line charts as inline SVG: no script, no network, legible when scaled to a phone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

WIDTH, HEIGHT = 460, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 12, 42
MAX_POINTS = 240
# Okabe and Ito's colours are distinct for every kind of colour vision; dashes help in print
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B8860B", "#56B4E9", "#444444")
DASHES = ("", "7 3", "2 3", "9 3 2 3", "5 2", "1 2", "12 3")


@dataclass(frozen=True)
class Line:
    """One curve, with the range of its seeds where there are several."""

    label: str
    x: Array
    y: Array
    low: Array | None = None
    high: Array | None = None


@dataclass(frozen=True)
class Axis:
    """A range of values on a range of pixels, linear or logarithmic."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def place(self, values: Array) -> Array:
        """Return the pixels of values, at the edge for values outside the range."""
        low, high = self.low, self.high
        clipped = np.clip(values, low, high)
        if self.log:
            low, high, clipped = math.log10(low), math.log10(high), np.log10(clipped)
        return np.asarray(self.start + (clipped - low) / (high - low) * (self.stop - self.start))

    def ticks(self) -> list[float]:
        """Return round values inside the range."""
        if not self.log:
            return round_ticks(self.low, self.high)
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        factors = (1, 2, 5) if len(decades) <= 3 else (1,)
        candidates = [factor * 10.0**decade for decade in decades for factor in factors]
        return [tick for tick in candidates if self.low * 0.999 <= tick <= self.high * 1.001]


def round_ticks(low: float, high: float) -> list[float]:
    """Return about five multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def chart(
    title: str, lines: Sequence[Line], *, x_label: str, y_label: str, log: bool = False
) -> str:
    """Draw lines with a legend; ``log`` allows a logarithmic axis for values that need one."""
    lines = [finite(line) for line in lines]
    x_axis, y_axis = axes(lines, log)
    parts = [grid(x_axis, y_axis, x_label, y_label)]
    parts += [curve(line, index, x_axis, y_axis) for index, line in enumerate(lines)]
    legend = "".join(
        f'<li><svg viewBox="0 0 26 8" aria-hidden="true"><path d="M1 4H25" {stroke(i)}/></svg>'
        f"{escape(line.label)}</li>"
        for i, line in enumerate(lines)
    )
    return (
        f'<figure class="chart"><figcaption>{escape(title)}</figcaption>'
        f'<ul class="legend">{legend}</ul>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg></figure>"
    )


def finite(line: Line) -> Line:
    """Drop points that cannot be drawn, and thin the line to what a screen resolves."""
    kept = np.flatnonzero(np.isfinite(line.x) & np.isfinite(line.y))
    if len(kept) > MAX_POINTS:
        kept = kept[np.linspace(0, len(kept) - 1, MAX_POINTS).astype(int)]
    low = None if line.low is None else line.low[kept]
    high = None if line.high is None else line.high[kept]
    return Line(line.label, line.x[kept], line.y[kept], low, high)


def axes(lines: Sequence[Line], log: bool) -> tuple[Axis, Axis]:
    """Return axes that show all lines."""
    xs = np.concatenate([line.x for line in lines] or [np.zeros(0)])
    ys = np.concatenate([line.y for line in lines] or [np.zeros(0)])
    if not len(xs):
        xs, ys = np.array([0.0, 1.0]), np.array([0.0, 1.0])
    low, high = float(ys.min()), float(ys.max())
    log = log and low > 0 and high / low > 20
    if not log:
        low = 0.0 if 0 <= low < 0.5 * high else low
        high = high if high > low else low + 1
        high += 0.04 * (high - low)
    right = float(xs.max()) if xs.max() > 0 else 1.0
    x_axis = Axis(0.0, right, LEFT, WIDTH - RIGHT)
    return x_axis, Axis(low, high, HEIGHT - BOTTOM, TOP, log)


def grid(x_axis: Axis, y_axis: Axis, x_label: str, y_label: str) -> str:
    """Draw grid lines, tick labels and the names of the axes."""
    parts = []
    for tick, at in zip(y_axis.ticks(), y_axis.place(np.array(y_axis.ticks())), strict=True):
        parts.append(f'<path class="grid" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick, at in zip(x_axis.ticks(), x_axis.place(np.array(x_axis.ticks())), strict=True):
        parts.append(
            f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">{tick:g}</text>'
        )
    parts.append(f'<path class="axis" d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>'
    )
    height = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text transform="translate(12 {height}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text>"
    )
    return "".join(parts)


def curve(line: Line, index: int, x_axis: Axis, y_axis: Axis) -> str:
    """Draw one line over the band of its seeds."""
    if not len(line.x):
        return ""
    xs = x_axis.place(line.x)
    band = ""
    if line.low is not None and line.high is not None:
        outline = points(xs, y_axis.place(line.high)) + points(
            xs[::-1], y_axis.place(line.low)[::-1]
        )
        band = f'<path d="M{"L".join(outline)}Z" fill="{colour(index)}" fill-opacity="0.13"/>'
    path = "L".join(points(xs, y_axis.place(line.y)))
    return (
        f'{band}<path class="curve" d="M{path}" {stroke(index)}>'
        f"<title>{escape(line.label)}</title></path>"
    )


def points(xs: Array, ys: Array) -> list[str]:
    """Write coordinates to a tenth of a pixel."""
    return [f"{x:.1f} {y:.1f}" for x, y in zip(xs, ys, strict=True)]


def colour(index: int) -> str:
    """Return the colour of the n-th line."""
    return COLOURS[index % len(COLOURS)]


def stroke(index: int) -> str:
    """Return colour and dash of the n-th line."""
    dash = DASHES[index % len(DASHES)]
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'fill="none" stroke="{colour(index)}" stroke-width="2"{dashes}'
