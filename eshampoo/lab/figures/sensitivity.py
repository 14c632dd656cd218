"""Studies of what a user may have chosen already: β2, the batch, the width and the length of a run.

They compare EShampoo with AdamW and SOAP, and write out its defaults, as ``defaults.py`` does.
"""

from collections.abc import Mapping, Sequence

from eshampoo.lab.figures.catalogue import Curve, Figure, Panel
from eshampoo.lab.figures.defaults import DEFAULT, RATES, STEPS
from eshampoo.lab.optimizers import Option
from eshampoo.lab.run.runs import Scale

BETAS = (0.9, 0.95, 0.99, 0.999)
BATCHES = (16, 64, 256)
WIDTHS, LENGTHS = (64, 128), (400, 1600)


def rivals(rates: Sequence[float]) -> tuple[Curve, ...]:
    """Return AdamW, SOAP and EShampoo at each of some learning rates."""
    tried: Mapping[Scale, tuple[float, ...]] = {"small": tuple(rates), "tiny": tuple(rates[:1])}
    return (
        Curve("AdamW", "adamw", rates=tried),
        Curve("SOAP, F = 10", "soap", {"frequency": 10}, rates=tried),
        Curve("EShampoo", "eshampoo", DEFAULT, rates=tried),
    )


def check_rules(beta2: float) -> tuple[Curve, ...]:
    """Return EShampoo with three rules of when to check, and SOAP, at one β2."""
    betas: Option = (0.9, beta2)
    middle = RATES["imagewoof-vit"][1:2]
    rates: Mapping[Scale, tuple[float, ...]] = {"small": middle, "tiny": middle}
    rules: tuple[Option, ...] = ("auto", 1, 10)
    ours = [
        Curve(f"F = {f}", "eshampoo", {**DEFAULT, "betas": betas, "frequency": f}, rates=rates)
        for f in rules
    ]
    soap: Mapping[str, Option] = {"frequency": 10, "betas": betas}
    return (*ours, Curve("SOAP, F = 10", "soap", soap, rates=rates))


def sized(batch: int) -> str:
    """Return the name of the digits workload with a batch of this size; 64 is its own."""
    return "digits-vit" if batch == 64 else f"digits-vit-batch-{batch}"


def wide(width: int) -> str:
    """Return the name of the workload on characters with this width; 128 is its own."""
    return "text-char" if width == 128 else f"text-char-width-{width}"


BETA2 = Figure(
    name="beta2",
    title="β2, and when a basis is looked at",
    note="Final loss of EShampoo with checks by novelty, at every step and at every tenth, and of"
    " SOAP, over β2: does the rule without a number hold for every memory of the averages?",
    panels=tuple(
        Panel(
            f"β2 = {beta2:g}",
            "imagewoof-vit",
            check_rules(beta2),
            "step",
            steps={"small": STEPS["imagewoof-vit"]},
        )
        for beta2 in BETAS
    ),
    seeds=1,
)
BATCH = Figure(
    name="batch",
    title="The size of a batch",
    note="Loss by steps with batches of 16, 64 and 256, each method at the best of three learning"
    " rates: does the gain in steps depend on the batch?",
    panels=tuple(
        Panel(
            f"batch {batch}",
            sized(batch),
            rivals(RATES["digits-vit"]),
            "step",
            steps={"small": 300},
        )
        for batch in BATCHES
    ),
    seeds=2,
)
HORIZON = Figure(
    name="horizon",
    title="Width of the model and length of the run",
    note="Loss by steps for two widths and two lengths, each method at the better of two learning"
    " rates: nothing in EShampoo's options was scaled with either.",
    panels=tuple(
        Panel(
            f"width {width}, {steps} steps",
            wide(width),
            rivals((3e-3, 1e-2)),
            "step",
            steps={"small": steps},
        )
        for width in WIDTHS
        for steps in LENGTHS
    ),
    seeds=1,
)
SENSITIVITY: Mapping[str, Figure] = {figure.name: figure for figure in (BETA2, BATCH, HORIZON)}
