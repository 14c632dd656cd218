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
    from matplotlib.figure import Figure

    layers = report.layers()
    if not layers:
        raise ValueError(
            f"this report has {len(report)} rows and no factor, so there is nothing to draw: "
            "pass the basis_report() of an optimizer in which a parameter has a basis"
        )
    recorded = any(row.history for row in report)
    size = 11.0 if recorded else 6.0, max(3.6, 1.6 + 0.24 * len(layers))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, 2 if recorded else 1, squeeze=False)[0]
    draw_outcomes(axes[0], layers)
    if recorded:
        draw_criteria(axes[1], report)
    return figure


def draw_outcomes(axes: "Axes", layers: dict[tuple[str, str], BasisReport]) -> None:
    """A bar per layer and factor: what its checks led to."""
    labels, left = [f"{layer}  {letter}" for layer, letter in layers], [0.0] * len(layers)
    for outcome, colour in OUTCOMES.items():
        shares = [outcomes(rows)[outcome] for rows in layers.values()]
        axes.barh(labels, shares, left=left, color=colour, label=outcome)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axes.invert_yaxis()
    axes.set(xlim=(0, 1), xlabel="share of the checks")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False, fontsize=8)


def outcomes(rows: BasisReport) -> dict[str, float]:
    """The shares of the checks that computed a basis, waited for budget, or kept the basis."""
    checks = max(1, sum(row.checks for row in rows))
    computed = sum(row.computations for row in rows) / checks
    waited = sum(row.waited for row in rows) / checks
    return dict(zip(OUTCOMES, (computed, waited, max(0.0, 1 - computed - waited)), strict=True))


def draw_criteria(axes: "Axes", report: BasisReport) -> None:
    """A line per factor: its criterion at every check that was recorded."""
    labels = {row.letter: f"factor {row.letter}" for row in report}
    for row in report:
        history = [check for check in row.history if check[1] > 0]
        steps, values = [step for step, _, _ in history], [value for _, value, _ in history]
        colour, label = LETTERS.get(row.letter, OTHER), labels.pop(row.letter, None)
        computed = [number for number, (_, _, new) in enumerate(history) if new]
        (line,) = axes.plot(steps, values, color=colour, linewidth=0.8, alpha=0.6, label=label)
        line.set(marker="o", markersize=3, markevery=computed)
    axes.set(yscale="log", xlabel="step", ylabel="criterion ‖Λ̂ − diag Λ̂‖ / ‖Λ̂‖")
    axes.legend(loc="upper right", frameon=False, fontsize=8)
