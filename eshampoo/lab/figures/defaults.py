"""The studies behind the defaults, on six workloads.

``defaults`` compares EShampoo's defaults with AdamW and SOAP, each at the best of the same learning
rates, and repeats the best on fresh seeds. ``choices`` changes one of the defaults at a time. The
studies write out every option that they are about, so that their runs keep their meaning when
defaults change.
"""

from collections.abc import Mapping, Sequence

from eshampoo.lab.figures.catalogue import Curve, Figure, Panel
from eshampoo.lab.optimizers import Option
from eshampoo.lab.run.runs import Scale

DEFAULT: Mapping[str, Option] = {
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
# The questions for a workload on which all of them would take too long.
FEW_CHANGES: Mapping[str, Mapping[str, tuple[Option, ...]]] = {
    "imagewoof-vit": CHANGES,
    "imagewoof-convnext": {"merge_dims": ("kernel",)},
    "mri-unet": {"merge_dims": ("kernel",)},
    "text-llama": {"rms": (None,), "tau": (0.1,), "budget": (None,), "novelty": (0.2,)},
    "text-char": {"rms": (None,), "budget": (None, 0.5)},
}
RATES: Mapping[str, tuple[float, ...]] = {
    "digits-vit": (1e-3, 3e-3, 1e-2),
    "molecules-gnn": (3e-3, 1e-2, 3e-2),
    "imagewoof-convnext": (1e-3, 3e-3, 1e-2),
    "imagewoof-vit": (1e-3, 3e-3, 1e-2),
    "mri-unet": (1e-3, 3e-3, 1e-2),
    "text-llama": (3e-3, 1e-2, 3e-2),
}
# The choices are also tried where the defaults are not ahead.
CHOICE_RATES: Mapping[str, tuple[float, ...]] = {**RATES, "text-char": (1e-3, 3e-3, 1e-2)}
# Shorter than the workloads' own runs, so that six of them fit into an afternoon.
STEPS = {
    "digits-vit": 300,
    "molecules-gnn": 150,
    "imagewoof-convnext": 150,
    "imagewoof-vit": 300,
    "mri-unet": 120,
    "text-llama": 120,
    "text-char": 500,
}
# SOAP as its authors advise for language models: no basis on the side of the vocabulary.
SOAP: Mapping[str, Mapping[str, Option]] = {"text-llama": {"max_dim": 1024}}


def panel(workload: str, curves: Sequence[Curve]) -> Panel:
    """Return final loss over the learning rate on one workload."""
    return Panel(workload, workload, tuple(curves), "rate", steps={"small": STEPS[workload]})


def rivals(workload: str) -> list[Curve]:
    """Return AdamW, SOAP and EShampoo with its defaults, at three learning rates."""
    tried = RATES[workload]
    rates: Mapping[Scale, tuple[float, ...]] = {"small": tried, "tiny": tried[1:2]}
    soap = {"frequency": 10, **SOAP.get(workload, {})}
    return [
        Curve("AdamW", "adamw", rates=rates),
        Curve("SOAP", "soap", soap, rates=rates),
        Curve("EShampoo", "eshampoo", DEFAULT, rates=rates),
    ]


def changed(workload: str) -> list[Curve]:
    """Return EShampoo with one change of its defaults at a time, at the middle learning rate.

    Without a fixed size of the updates the best rate differs, so that case also gets the next
    higher rate.
    """
    _, middle, high = CHOICE_RATES[workload]

    def curve(label: str, optimizer: str, options: Mapping[str, Option], *tried: float) -> Curve:
        return Curve(label, optimizer, options, rates={"small": tried, "tiny": tried[:1]})

    curves = [curve("the defaults", "eshampoo", DEFAULT, middle)]
    for name, values in FEW_CHANGES.get(workload, CHANGES).items():
        for value in values:
            rates = (middle, high) if (name, value) == ("rms", None) else (middle,)
            curves.append(curve(f"{name} = {value}", "eshampoo", {**DEFAULT, name: value}, *rates))
    if workload in FEW_CHANGES:
        return curves
    for f in (10, 1):
        options = {**PAPER, "frequency": f}
        curves.append(curve(f"the paper's, F = {f}", "eshampoo", options, middle, high))
    for f in (5, 1):
        curves.append(curve(f"SOAP, F = {f}", "soap", {"frequency": f}, middle, high))
    return curves


DEFAULTS = Figure(
    name="defaults",
    title="EShampoo with its defaults, against AdamW and SOAP",
    note="Final loss over the learning rate, two seeds, and at the best rate of each three fresh"
    " seeds. A learning rate is added while the best is at an edge.",
    panels=tuple(panel(workload, rivals(workload)) for workload in RATES),
    seeds=2,
    extend=True,
    fresh=3,
)
CHOICES = Figure(
    name="choices",
    title="What the defaults could be instead",
    note="Final loss with one change of the defaults at a time, at the middle learning rate; also"
    " at the next higher one where updates have the size that comes out.",
    panels=tuple(panel(workload, changed(workload)) for workload in CHOICE_RATES),
    seeds=2,
)
