"""The study behind the defaults: one change at a time around a candidate, on six workloads.

Every option that the study speaks of is written out, so that its runs keep their meaning when
defaults change.
"""

from collections.abc import Mapping

from eshampoo.lab.figures.catalogue import Curve, Figure, Panel
from eshampoo.lab.optimizers import Option
from eshampoo.lab.run.runs import Scale

CANDIDATE: Mapping[str, Option] = {
    "merge_dims": False,
    "frequency": "auto",
    "novelty": 0.1,
    "tau": 0.03,
    "budget": 0.25,
    "rms": 0.4,
}
PAPER: Mapping[str, Option] = {"merge_dims": False, "tau": 0.1, "budget": None, "rms": None}
CHANGES: Mapping[str, tuple[Option, ...]] = {
    "rms": (None, 0.3, 0.6),
    "tau": (0.1, 0.01),
    "budget": (None, 0.5, 0.1),
    "novelty": (0.05, 0.2),
}
RATES = {
    "digits-vit": (1e-3, 3e-3, 1e-2),
    "imagewoof-vit": (1e-3, 3e-3, 1e-2),
    "imagewoof-convnext": (1e-3, 3e-3, 1e-2),
    "molecules-gnn": (3e-3, 1e-2, 3e-2),
    "mri-unet": (1e-3, 3e-3, 1e-2),
    "text-llama": (3e-3, 1e-2, 3e-2),
}


def panel(workload: str) -> Panel:
    """Return final loss over the learning rate: the candidate, its neighbours, and its rivals."""
    tried = RATES[workload]
    rates: Mapping[Scale, tuple[float, ...]] = {"small": tried, "tiny": tried[1:2]}

    def curve(label: str, optimizer: str, options: Mapping[str, Option], f: int | None) -> Curve:
        return Curve(label, optimizer, options, f, rates)

    neighbours = [
        curve(f"candidate, {name} = {value}", "eshampoo", {**CANDIDATE, name: value}, None)
        for name, values in CHANGES.items()
        for value in values
    ]
    rivals = [
        *(curve(f"SOAP, F = {f}", "soap", {"frequency": f}, None) for f in (10, 5, 1)),
        *(curve(f"F = {f}", "eshampoo", {**PAPER, "frequency": f}, None) for f in (1, 10)),
        curve("F = 50, scaled", "eshampoo", PAPER, 50),
    ]
    return Panel(
        workload,
        workload,
        (
            curve("AdamW", "adamw", {}, None),
            curve("candidate", "eshampoo", CANDIDATE, None),
            *rivals,
            *neighbours,
        ),
        "rate",
    )


DEFAULTS = Figure(
    name="defaults",
    title="What the defaults should be",
    note="Final loss over the learning rate: EShampoo with checks when something is new, within a"
    " budget, with updates of a fixed size, and one change of each at a time.",
    panels=tuple(panel(workload) for workload in RATES),
    seeds=2,
)
