"""A picture of the bases: what the checks led to, and the criterion over the steps."""

from typing import TYPE_CHECKING

from ..report import BasisReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which every kind of colour vision can tell apart.
OUTCOMES = {"basis computed": "#0072B2", "waited for budget": "#E69F00", "basis kept": "#D9D9D9"}
LETTERS = {"L": "#0072B2", "R": "#D55E00", "A": "#009E73"}
OTHER = "#CC79A7"


def plot_basis(report: BasisReport) -> "Figure":
    """Draw a report with matplotlib, which must be installed.

    The left side shows, per layer and factor, the share of the checks that computed a basis, had to
    wait for budget, or kept the basis. The right side, which needs record=True, shows the criterion
    of every factor over the steps. Dots mark computed bases.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "plot_basis draws with matplotlib, which is not installed: pip install matplotlib"
        ) from error
    layers = report.layers()
    if not layers:
        raise ValueError(
            f"this report has {len(report)} rows and no factor, so there is nothing to draw: "
            "pass the basis_report() of an optimizer in which a parameter has a basis"
        )
    recorded = any(row.history for row in report)
    size = (11.0 if recorded else 6.0, 1.6 + 0.24 * len(layers))
    figure = Figure(figsize=(size[0], max(3.6, size[1])), layout="constrained")
    axes = figure.subplots(1, 2 if recorded else 1, squeeze=False)[0]
    draw_outcomes(axes[0], layers)
    if recorded:
        draw_criteria(axes[1], report)
    return figure


def draw_outcomes(axes: "Axes", layers: dict[tuple[str, str], BasisReport]) -> None:
    """A bar per layer and factor: what its checks led to."""
    labels = [f"{layer}  {letter}" for layer, letter in layers]
    left = [0.0] * len(layers)
    checks = [max(1, sum(row.checks for row in rows)) for rows in layers.values()]
    computed = [sum(row.computations for row in rows) for rows in layers.values()]
    waited = [sum(row.waited for row in rows) for rows in layers.values()]
    kept = [c - b - w for c, b, w in zip(checks, computed, waited, strict=True)]
    for (outcome, colour), counts in zip(OUTCOMES.items(), (computed, waited, kept), strict=True):
        shares = [max(0, count) / all_ for count, all_ in zip(counts, checks, strict=True)]
        axes.barh(labels, shares, left=left, color=colour, label=outcome)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of the checks")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False, fontsize=8)


def draw_criteria(axes: "Axes", report: BasisReport) -> None:
    """A line per factor: its criterion at every check that was recorded."""
    named: set[str] = set()
    for row in report:
        steps = [step for step, value, _ in row.history if value > 0]
        values = [value for _, value, _ in row.history if value > 0]
        colour = LETTERS.get(row.letter, OTHER)
        label = None if row.letter in named else f"factor {row.letter}"
        axes.plot(steps, values, color=colour, linewidth=0.8, alpha=0.6, label=label)
        computed = [(step, value) for step, value, new in row.history if new and value > 0]
        axes.scatter([s for s, _ in computed], [v for _, v in computed], s=9, color=colour)
        named.add(row.letter)
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("criterion ‖Λ̂ − diag Λ̂‖ / ‖Λ̂‖")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper right", frameon=False, fontsize=8)
