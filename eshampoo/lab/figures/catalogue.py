"""The table of figures: the paper's five, and ours on partial refreshes and the time it takes.

F is given as in the paper, for runs of the paper's length; a shorter run scales it with its
length, so that it stays the same share of the run. The paper preconditions vectors as well, so
its figures do it here (``vectors="full"``).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Literal

from eshampoo.lab.optimizers import Option
from eshampoo.lab.run.runs import Scale

Horizontal = Literal["rate", "step", "time", "cost", "share"]
AXES: tuple[Horizontal, ...] = ("step", "time")
Grouping = Literal["letter", "bias", "layer", "part", "ends"]


@dataclass(frozen=True)
class Curve:
    """One method: its optimizer, options, the paper's F, and its learning rates."""

    label: str
    optimizer: str
    options: Mapping[str, Option] = field(default_factory=dict)
    frequency: int | None = None  # the paper's F; None keeps the optimizer's default
    # a scale without rates takes the workload's own
    rates: Mapping[Scale, tuple[float, ...]] = field(default_factory=dict)
    scaled: Mapping[Scale, Mapping[str, Option]] = field(default_factory=dict)  # of one scale alone


@dataclass(frozen=True)
class Panel:
    """One plot: curves over learning rates, steps, time or cost, or the sizes of refreshes.

    With a pattern, it shows the counts of one curve's basis computations.
    """

    title: str
    workload: str
    curves: tuple[Curve, ...]
    horizontal: Horizontal
    pattern: Grouping | None = None  # draws basis computations by group instead of losses
    steps: Mapping[Scale, int] = field(default_factory=dict)  # else the figure's
    evaluations: int | None = None  # of the metric in a run, for a table of targets


@dataclass(frozen=True)
class Figure:
    """Panels with a title, the number of seeds, and the length of the runs."""

    name: str
    title: str
    note: str  # what the paper says about the figure, or what a figure of our own shows
    panels: tuple[Panel, ...]
    seeds: int
    extend: bool = False  # tries further rates while the best of a curve is at an edge
    fresh: int = 0  # further seeds, at the best learning rate of each curve
    steps: Mapping[Scale, int] = field(default_factory=dict)  # else the workload's own
    # what an optimizer is given where a curve does not say otherwise
    options: Mapping[str, Mapping[str, Option]] = field(default_factory=lambda: PAPER)


# The rules of the paper written out, so that its runs stay what they are when defaults change.
PAPER: Mapping[str, Mapping[str, Option]] = {
    "eshampoo": {"merge_dims": True, "tau": 0.1, "budget": None, "rms": None},
    "shampoo": {"merge_dims": True},
}
FULL: Mapping[str, Option] = {"vectors": "full"}


def rates(paper: tuple[float, ...], small: tuple[float, ...]) -> Mapping[Scale, tuple[float, ...]]:
    """Return the rates by scale; a tiny run takes only the second one of a small run."""
    return {"paper": paper, "small": small, "tiny": small[1:2]}


ADAMW = Curve("AdamW", "adamw")

FIGURE_1 = Figure(
    name="fig1",
    title="Stale Shampoo without grafting",
    note="The paper: Shampoo with F = 100 and no grafting is worse than AdamW for every α and ε.",
    panels=(
        Panel(
            title="Imagewoof ViT",
            workload="imagewoof-vit",
            curves=(
                Curve("AdamW", "adamw", rates=rates((1e-4, 1e-3, 1e-2), (3e-4, 1e-3, 3e-3))),
                *(
                    Curve(
                        f"Shampoo ε = {eps:g}",
                        "shampoo",
                        {**FULL, "graft": None, "eps": eps},
                        frequency=100,
                        rates=rates((1e-4, 1e-3, 1e-2), (3e-4, 1e-3, 3e-3)),
                    )
                    for eps in (1e-10, 1e-4)
                ),
            ),
            horizontal="rate",
        ),
    ),
    seeds=2,
)


def transfer_panel(
    title: str,
    workload: str,
    shampoo_rates: tuple[float, ...],
    small: tuple[float, ...] = (3e-4, 1e-3, 3e-3, 1e-2),
) -> Panel:
    """Return the methods of Fig. 2 on one model, each with as many learning rates as AdamW."""
    adam_rates = rates((1e-4, 3e-4, 6e-4, 1e-3, 3e-3, 6e-3, 1e-2), small)
    grafted_rates = rates((1e-4, 3e-4, 1e-3, 3e-3), small)
    squared: Mapping[str, Option] = {"variant": "shampoo2", "trace_scaling": True}
    return Panel(
        title=title,
        workload=workload,
        curves=(
            Curve("AdamW", "adamw", rates=adam_rates),
            Curve("Shampoo, Adam grafting, F = 100", "shampoo", FULL, 100, grafted_rates),
            Curve(
                "Shampoo, F = 1",
                "shampoo",
                {**FULL, "graft": None},
                frequency=1,
                rates=rates(shampoo_rates, (*small[1:], 3e-2)),
            ),
            Curve(
                "Shampoo² / S, F = 1",
                "shampoo",
                {**FULL, "graft": None, **squared},
                frequency=1,
                rates=rates((1e-4, 3e-4, 6e-4, 1e-3, 3e-3), small),
            ),
            Curve("EShampoo, F = 100", "eshampoo", {**FULL, "tau": 0.0}, 100, grafted_rates),
        ),
        horizontal="rate",
    )


FIGURE_2 = Figure(
    name="fig2",
    title="Transfer of the learning rate",
    note="The paper: EShampoo is better than Shampoo with grafting, Adam's best learning rate"
    " serves both; trace-scaled Shampoo² matches them; Shampoo without grafting does on the ViT"
    " alone.",
    panels=(
        transfer_panel("Imagewoof ViT", "imagewoof-vit", (3e-3, 6e-3, 1e-2, 3e-2)),
        transfer_panel(
            "Imagewoof ConvNeXt V2",
            "imagewoof-convnext",
            (1e-4, 3e-4, 1e-3, 3e-3),
            small=(1e-3, 3e-3, 1e-2),
        ),
    ),
    seeds=2,
)

FIGURE_3 = Figure(
    name="fig3",
    title="Adaptive computation of the basis",
    note="The paper: Adaptive QR is slower than adaptive eigh, the more so with few iterations;"
    " SOAP ends higher; τ = 0.1 with F = 50 takes 20 % less time than F = 100 without a criterion.",
    panels=(
        Panel(
            title="Solvers, τ = 0.2, F = 1",
            workload="imagewoof-vit",
            curves=(
                Curve("eigh", "eshampoo", {**FULL, "tau": 0.2}, 1),
                *(
                    Curve(
                        f"QR, I = {iterations}",
                        "eshampoo",
                        {**FULL, "tau": 0.2, "solver": "qr", "qr_iterations": iterations},
                        1,
                    )
                    for iterations in (1, 3, 10)
                ),
                Curve("SOAP", "soap", {"betas": (0.95, 0.95)}),
            ),
            horizontal="time",
        ),
        Panel(
            title="When eigh is computed",
            workload="imagewoof-vit",
            curves=(
                Curve("F = 100", "eshampoo", {**FULL, "tau": 0.0}, 100),
                *(
                    Curve(f"F = {f}, τ = {tau:g}", "eshampoo", {**FULL, "tau": tau}, f)
                    for f, tau in product((50, 100, 200), (0.01, 0.1))
                ),
                ADAMW,
            ),
            horizontal="time",
        ),
    ),
    seeds=2,
)

PATTERNS = Curve("EShampoo", "eshampoo", {**FULL, "tau": 0.01}, 1)
FIGURE_4 = Figure(
    name="fig4",
    title="Patterns of adaptivity",
    note="The paper: Bases change most early on; those of biases more often than of weights, of"
    " layer norms four times as often as of linear layers; A more often than L, L more often than"
    " R.",
    panels=(
        Panel("Factors", "imagewoof-vit", (PATTERNS,), "step", "letter"),
        Panel("Biases and weights", "imagewoof-vit", (PATTERNS,), "step", "bias"),
        Panel("Norms and linear layers", "imagewoof-vit", (PATTERNS,), "step", "layer"),
    ),
    seeds=2,
)

FIGURE_5 = Figure(
    name="fig5",
    title="When and where the basis matters",
    note="The paper: A good basis matters early: τ = 0.01 for the first 10 % is worth far more"
    " than for the last 10 %; a single basis (τ = 0.99) beats AdamW; all of the gain"
    " comes from matrices.",
    panels=(
        Panel(
            title="Schedules of τ",
            workload="imagewoof-vit",
            curves=(
                ADAMW,
                *(
                    Curve(label, "eshampoo", {**FULL, "tau": tau}, 1)
                    for label, tau in (
                        ("τ = 0.99", 0.99),
                        ("one basis, at the first step", "0,1@0.0001"),
                        ("τ = 0.8", 0.8),
                        ("τ = 0.8, then 0.01 from 90 %", "0.8,0.01@0.9"),
                        ("τ = 0.01, then 0.8 from 10 %", "0.01,0.8@0.1"),
                        ("τ = 0.01", 0.01),
                    )
                ),
            ),
            horizontal="step",
        ),
        Panel(
            title="Vectors and matrices",
            workload="imagewoof-vit",
            curves=(
                ADAMW,
                Curve("vectors alone", "eshampoo", {**FULL, "matrices": "adam", "tau": 0.01}, 1),
                Curve("matrices alone", "eshampoo", {"vectors": "adam", "tau": 0.01}, 1),
                Curve("both", "eshampoo", {**FULL, "tau": 0.01}, 1),
            ),
            horizontal="step",
        ),
    ),
    seeds=2,
)


def partial_panels(title: str, workload: str) -> tuple[Panel, Panel]:
    """Compare full and partial refreshes over F × τ × refresh_to by cost and by size."""
    curves = [ADAMW]
    for f, tau in product((1, 10), (0.03, 0.1)):
        check: Mapping[str, Option] = {"frequency": f, "tau": tau}
        curves.append(Curve(f"eigh F={f} τ={tau}", "eshampoo", check))
        if f == 1:
            matched: Mapping[str, Option] = {**check, "slots": "match"}
            curves.append(Curve(f"eigh matched F={f} τ={tau}", "eshampoo", matched))
        for to in (0.5, 0.8):
            partial: Mapping[str, Option] = {**check, "solver": "partial", "refresh_to": to}
            curves.append(Curve(f"partial F={f} τ={tau} to={to}", "eshampoo", partial))
    partly = tuple(curve for curve in curves if curve.options.get("solver") == "partial")
    return (
        Panel(title, workload, tuple(curves), "cost"),
        Panel(f"{title}: sizes of refreshes", workload, partly, "share"),
    )


PARTIAL = Figure(
    name="partial",
    title="Refreshing only what moved",
    note="Final loss against the optimizer's seconds, with full and with partial refreshes: is the"
    " loss as low when a refresh does a small share of the work?",
    panels=(
        *partial_panels("Imagewoof ViT", "imagewoof-vit"),
        *partial_panels("Molecules, message passing", "molecules-gnn"),
    ),
    seeds=3,
    steps={"small": 240},
)

TIME_RATES = rates((6e-4, 1e-3), (2e-3, 4e-3))
TIME = Figure(
    name="time",
    title="Time to AdamW's loss",
    note="Training loss against steps and against seconds; the curves show each method at the"
    " better of its two learning rates.",
    panels=tuple(
        Panel(
            title=f"Imagewoof ViT, {horizontal}",
            workload="imagewoof-vit",
            curves=(
                Curve("AdamW", "adamw", rates=rates((6e-4, 1e-3), (1e-3, 2e-3))),
                Curve("Shampoo, Adam grafting", "shampoo", {}, 100, TIME_RATES),
                Curve("SOAP", "soap", rates=TIME_RATES),
                Curve("EShampoo", "eshampoo", {}, 50, TIME_RATES),
                Curve("EShampoo, bounded", "eshampoo", {"correction": "bounded"}, 50, TIME_RATES),
                Curve("EShampoo, partial", "eshampoo", {"solver": "partial"}, 1, TIME_RATES),
            ),
            horizontal=horizontal,
        )
        for horizontal in AXES
    ),
    seeds=2,
    steps={"small": 630},
)

PAPERS: Mapping[str, Figure] = {
    figure.name: figure
    for figure in (FIGURE_1, FIGURE_2, FIGURE_3, FIGURE_4, FIGURE_5, PARTIAL, TIME)
}
