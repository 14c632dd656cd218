"""Studies of what a user may have chosen already: β2, the batch, the width and the length of a run.

They compare EShampoo with AdamW and SOAP, and write out its defaults, as ``defaults.py`` does.
"""

from collections.abc import Mapping, Sequence

from eshampoo.lab.figures.catalogue import Curve, Figure, Panel
from eshampoo.lab.figures.defaults import CHOICE_RATES, DEFAULT, RATES, STEPS
from eshampoo.lab.optimizers import Option
from eshampoo.lab.run.runs import Scale

BETAS = (0.9, 0.95, 0.99, 0.999)
RULES: tuple[Option, ...] = ("auto", 1, 10)
# By workload, the sizes of a batch; the workload of a size that is not its own is a variant.
BATCHES = {"digits-vit": (16, 64, 512), "imagewoof-vit": (16, 128)}
OWN_BATCH = {"digits-vit": 64, "imagewoof-vit": 128}
WIDTHS, LENGTHS = (64, 128), (500, 1500)


def rivals(rates: Sequence[float]) -> tuple[Curve, ...]:
    """Return AdamW, SOAP and EShampoo at each of some learning rates."""
    tried: Mapping[Scale, tuple[float, ...]] = {"small": tuple(rates), "tiny": tuple(rates[:1])}
    return (
        Curve("AdamW", "adamw", rates=tried),
        Curve("SOAP", "soap", {"frequency": 10}, rates=tried),
        Curve("EShampoo", "eshampoo", DEFAULT, rates=tried),
    )


def check_rules(workload: str, beta2: float) -> Panel:
    """Compare three rules of when to check for EShampoo and SOAP at one β2."""
    betas: Option = (0.9, beta2)
    middle = CHOICE_RATES[workload][1:2]
    rates: Mapping[Scale, tuple[float, ...]] = {"small": middle, "tiny": middle}
    curves = tuple(
        Curve(f"{name}, F = {f}", optimizer, {**own, "betas": betas, "frequency": f}, rates=rates)
        for name, optimizer, own in (("EShampoo", "eshampoo", DEFAULT), ("SOAP", "soap", {}))
        for f in RULES
    )
    length: Mapping[Scale, int] = {"small": STEPS[workload]}
    return Panel(f"{workload}, β2 = {beta2:g}", workload, curves, "step", steps=length)


def sized(workload: str, batch: int) -> str:
    """Return the name of a workload with a batch of this size."""
    return workload if batch == OWN_BATCH[workload] else f"{workload}-batch-{batch}"


def wide(width: int) -> str:
    """Return the name of the workload on characters with this width; 128 is its own."""
    return "text-char" if width == 128 else f"text-char-width-{width}"


BETA2 = Figure(
    name="beta2",
    title="β2, and when a basis is looked at",
    note="Final loss of EShampoo and SOAP with checks by novelty, at every step and at every tenth,"
    " over β2: does the rule without a number hold for every memory of the averages?",
    panels=tuple(
        check_rules(workload, beta2)
        for workload in ("imagewoof-vit", "text-char")
        for beta2 in BETAS
    ),
    seeds=1,
)
BATCH = Figure(
    name="batch",
    title="The size of a batch",
    note="Loss by steps with small and large batches, each method at three learning rates and more"
    " while the best is at an edge: does the gain in steps depend on the batch?",
    panels=tuple(
        Panel(
            f"{workload}, batch {batch}",
            sized(workload, batch),
            rivals(RATES[workload]),
            "step",
            steps={"small": STEPS[workload]},
        )
        for workload, batches in BATCHES.items()
        for batch in batches
    ),
    seeds=2,
    extend=True,
)
HORIZON = Figure(
    name="horizon",
    title="Width of the model and length of the run",
    note="Loss by steps for two widths and two lengths, at a learning rate of 0.003, the best one"
    " of all three methods at width 128 and 500 steps. Nothing in EShampoo's options was scaled.",
    panels=tuple(
        Panel(
            f"width {width}, {steps} steps",
            wide(width),
            rivals((3e-3,)),
            "step",
            steps={"small": steps},
        )
        for width in WIDTHS
        for steps in LENGTHS
    ),
    seeds=1,
)
SENSITIVITY: Mapping[str, Figure] = {figure.name: figure for figure in (BETA2, BATCH, HORIZON)}
