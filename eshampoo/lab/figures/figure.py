"""What a figure is: panels of curves, and the runs that each curve asks for."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from eshampoo.classes import EShampoo
from eshampoo.lab.optimizers import Option
from eshampoo.lab.run.runs import Scale

Horizontal = Literal["rate", "step", "time", "cpu"]
Grouping = Literal["letter", "bias", "layer", "part", "ends"]
Rates = Mapping[Scale, tuple[float, ...]]
PUBLISHED = inspect.signature(EShampoo.as_published).parameters
# The rules of the paper; β2 is that of the workload.
PAPER_OPTIONS: Mapping[str, Mapping[str, Option]] = {
    "eshampoo": {k: PUBLISHED[k].default for k in ("merge_dims", "tau", "budget", "rms")},
    "shampoo": {"merge_dims": True},
}


@dataclass(frozen=True)
class Curve:
    """One method: its optimizer, options, the paper's F, and its learning rates."""

    label: str
    optimizer: str
    options: Mapping[str, Option] = field(default_factory=dict)
    frequency: int | None = None  # the paper's F; None keeps the optimizer's default
    # a scale without rates takes the workload's own
    rates: Rates = field(default_factory=dict)
    scaled: Mapping[Scale, Mapping[str, Option]] = field(default_factory=dict)  # of one scale alone
    # values of β2 that are searched like learning rates; None keeps the options' or the workload's
    memories: tuple[float | None, ...] = (None,)


@dataclass(frozen=True)
class Panel:
    """One plot: curves over learning rates, steps, wall seconds or CPU time.

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
    options: Mapping[str, Mapping[str, Option]] = field(default_factory=lambda: PAPER_OPTIONS)


def rates(small: tuple[float, ...], paper: tuple[float, ...] | None = None) -> Rates:
    """Return learning rates by scale; a tiny run takes only the middle one of a small run."""
    found: Rates = {"small": small, "tiny": small[len(small) // 2 :][:1]}
    return found if paper is None else {**found, "paper": paper}
