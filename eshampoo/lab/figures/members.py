"""Studies of other members: one side, means of D, sums, a lean state, spread checks.

They take lengths and learning rates from ``defaults.py`` and, like the studies there, write out
every option that they are about.
"""

from collections.abc import Mapping

from eshampoo.lab.figures.catalogue import Curve, Figure, Panel
from eshampoo.lab.figures.defaults import DEFAULT, RATES, panel
from eshampoo.lab.optimizers import Option
from eshampoo.lab.run.runs import Scale

SUM: Option = (0.9, 1.0)
SIDES: Mapping[str, Mapping[str, Option]] = {
    side: {"sides": side} for side in ("both", "left", "right", "smaller")
}
MOMENTS: Mapping[str, Mapping[str, Option]] = {
    f"D per {moment}": {"moment": moment} for moment in ("entry", "row", "block")
}
SUMS: Mapping[str, Mapping[str, Option]] = {
    "average, naive": {"correction": "naive"},
    "average, basis-aware": {"correction": "basis_aware"},
    "sum, naive": {"correction": "naive", "betas": SUM},
    "sum, basis-aware": {"correction": "basis_aware", "betas": SUM},
}
# The full state and checks at once are not named: their runs are those of the defaults.
STATES: Mapping[str, Mapping[str, Option]] = {"full": {}, "lean": {"state": "lean"}}
CHECKS: Mapping[str, Mapping[str, Option]] = {"at once": {}, "spread": {"stagger": True}}


def compared(workload: str, changes: Mapping[str, Mapping[str, Option]], adamw: bool) -> Panel:
    """Return EShampoo with each of some changes, at the middle learning rate."""
    middle = RATES[workload][1:2]
    rates: Mapping[Scale, tuple[float, ...]] = {"small": middle, "tiny": middle}
    curves = [
        Curve(label, "eshampoo", {**DEFAULT, **change}, rates=rates)
        for label, change in changes.items()
    ]
    return panel(workload, [Curve("AdamW", "adamw", rates=rates)] * adamw + curves)


MEMBERS: Mapping[str, Figure] = {
    figure.name: figure
    for figure in (
        Figure(
            name="sides",
            title="A basis on one side of a matrix",
            note="Final loss at the middle learning rate: what does one side alone cost, and which"
            " one?",
            panels=tuple(compared(w, SIDES, False) for w in ("imagewoof-vit", "digits-vit")),
            seeds=3,
        ),
        Figure(
            name="moment",
            title="One number of D for many entries",
            note="Final loss at the middle learning rate, with D per entry, row and block.",
            panels=tuple(compared(w, MOMENTS, True) for w in ("digits-vit", "molecules-gnn")),
            seeds=3,
        ),
        Figure(
            name="adagrad",
            title="Sums instead of averages",
            note="Final loss at the middle learning rate: with AdaGrad's sums (β2 = 1), which the"
            " paper leaves open, does the basis-aware correction help or hurt?",
            panels=tuple(compared(w, SUMS, False) for w in ("imagewoof-vit", "digits-vit")),
            seeds=3,
        ),
        Figure(
            name="lean",
            title="A lean state",
            note="Final loss at the middle learning rate, which is the best one of the defaults on"
            " these: does the state in half of the bytes end within the seeds' spread of the full"
            " one's?",
            panels=tuple(
                compared(w, STATES, False) for w in ("digits-vit", "imagewoof-vit", "text-llama")
            ),
            seeds=5,
        ),
        Figure(
            name="stagger",
            title="Checks spread over the steps",
            note="Final loss at the middle learning rate: does it matter that the factors are not"
            " checked at the same steps?",
            panels=tuple(compared(w, CHECKS, False) for w in ("digits-vit", "imagewoof-vit")),
            seeds=5,
        ),
    )
}
