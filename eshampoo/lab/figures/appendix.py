"""The figures and tables of the paper's appendix.

Where F or the size of blocks does not follow the rule of ``catalogue.py``, the values of each scale
are written out.
"""

from collections.abc import Mapping
from itertools import product

from eshampoo.lab.figures.catalogue import FULL, PATTERNS, Curve, Figure, Grouping, Panel, rates
from eshampoo.lab.figures.defaults import STEPS
from eshampoo.lab.optimizers import Option
from eshampoo.lab.run.runs import SCALES, Scale

PATTERNS_VIT = Figure(
    name="patterns-vit",
    title="More patterns of adaptivity",
    note="The paper: Without parameters in the layer norms of the ViT the counts of L and R stay as"
    " they are, nothing compensates; in ConvNeXt V2 the difference of L and R is more pronounced.",
    panels=(
        Panel("ViT", "imagewoof-vit", (PATTERNS,), "step", "letter"),
        Panel("ViT, norms without parameters", "imagewoof-vit-bare", (PATTERNS,), "step", "letter"),
        Panel("ConvNeXt V2", "imagewoof-convnext", (PATTERNS,), "step", "letter"),
    ),
    seeds=2,
)

# The vocabulary is cut into four blocks at every scale, as 32,768 tokens are with the paper's 8192.
LLAMA = Curve(
    "EShampoo",
    "eshampoo",
    {**FULL, "tau": 0.01},
    frequency=1,
    scaled={"paper": {"max_dim": 8192}, "small": {"max_dim": 512}, "tiny": {"max_dim": 75}},
)
TEXTS = {"C4": "text-llama-c4", "WikiText-2": "text-llama"}
SPLITS: Mapping[str, Grouping] = {
    "factors": "letter",
    "attention and MLP": "part",
    "embedding and output layer": "ends",
}
PATTERNS_LLAMA = Figure(
    name="patterns-llama",
    title="Patterns of adaptivity in a language model",
    note="The paper, on C4: L more often than R, except in the embedding, where they are almost"
    " equal; A as often as L at first, less after a quarter of the run; no difference between"
    " attention and MLP.",
    panels=tuple(
        Panel(f"{text}: {split}", workload, (LLAMA,), "step", grouping)
        for text, workload in TEXTS.items()
        for split, grouping in SPLITS.items()
    ),
    seeds=2,
    steps={"small": 300},
)


def decoupled(frequency: int) -> Panel:
    """Compare the corrections over β2 × β3 at one F."""
    curves = tuple(
        Curve(
            f"β2 = {beta2:g}, β3 = {beta3:g}, {correction.replace('_', '-')}",
            "eshampoo",
            {**FULL, "tau": 0.0, "betas": (0.9, beta2), "beta3": beta3, "correction": correction},
            frequency,
        )
        for beta2, beta3, correction in product(
            (0.9, 0.999), (0.9, 0.999), ("naive", "basis_aware")
        )
    )
    return Panel(f"F = {frequency}", "imagewoof-vit", curves, "step")


BETA3 = Figure(
    name="beta3",
    title="Averages of the basis (β2) and of the eigenvalues (β3)",
    note="The paper: hardly any choice of β2 and β3 matters; the basis-aware correction hurts,"
    " most with low β2, high β3 and low F, where it should help. The paper does not print its"
    " values; these are ours.",
    panels=tuple(decoupled(frequency) for frequency in (1, 50, 200)),
    seeds=2,
    steps={"small": 300},
)

# What the winning Shampoo submission to AlgoPerf has for the paper's three workloads, to the nine
# digits that logs keep.
WINNER: Mapping[str, Option] = {
    **FULL,
    "betas": (0.974662463, 0.974919759),
    "eps": 1e-8,
    "weight_decay": 0.000197166336,
    "nesterov": True,
}
WINNERS_RATE = 0.0014381744
# The rates of AdamW and of Adam grafting on our workloads. The middle one is the best for both, and
# EShampoo takes it over, as it does in the paper.
SEARCHED: Mapping[str, tuple[float, ...]] = {
    "mri-unet": (3e-3, 1e-2, 3e-2),
    "imagewoof-vit": (3e-4, 1e-3, 3e-3),
    "molecules-gnn": (3e-2, 1e-1, 3e-1),
}
# A fifth of the paper's F, or our runs would see none of them; 1 stays.
FREQUENCIES: Mapping[int, int] = {100: 20, 50: 10, 10: 2, 1: 1}
ROWS: tuple[tuple[int, float], ...] = (
    *((f, 0.0) for f in FREQUENCIES),
    *((f, 0.1) for f in FREQUENCIES),
    (10, 0.01),
    (1, 0.01),
)


def algoperf_panel(title: str, workload: str, evaluations: int) -> Panel:
    """Return the rows of the paper's full table on one workload."""
    tried = SEARCHED[workload]

    def row(
        label: str, optimizer: str, options: Mapping[str, Option], f: int, small: tuple[float, ...]
    ) -> Curve:
        scaled: dict[Scale, Mapping[str, Option]] = {
            scale: {"frequency": f if scale == "paper" else FREQUENCIES[f]} for scale in SCALES
        }
        own: Mapping[Scale, tuple[float, ...]] = {
            "paper": (WINNERS_RATE,), "small": small, "tiny": tried[1:2],
        }  # fmt: skip
        return Curve(label, optimizer, {**WINNER, **options}, None, own, scaled)

    curves = [
        Curve("AdamW", "adamw", rates=rates((3e-4, 1e-3, 3e-3), tried)),
        row("Adam grafting, F = 100", "shampoo", {}, 100, tried),
    ]
    for f, tau in ROWS:
        label = f"EShampoo, {f'τ = {tau:g}, ' if tau else ''}F = {f}"
        curves.append(row(label, "eshampoo", {"tau": tau}, f, tried[1:2]))
    return Panel(
        title,
        workload,
        tuple(curves),
        "step",
        steps={"small": STEPS[workload]},
        evaluations=evaluations,
    )


ALGOPERF_STYLE = Figure(
    name="algoperf-style",
    title="Steps and time to a target",
    note="**AlgoPerf-style, not an AlgoPerf result**: our own workloads and lengths. The target is"
    " set as AlgoPerf sets its own, but from AdamW alone: the median over the seeds of the best"
    " validation metric, at AdamW's best learning rate. The metric is taken at twenty steps of a"
    " run (of the U-Net at ten), evenly apart. The time to the target is counted in gradients: CPU"
    " time over that of a gradient in the same run. EShampoo has the best learning rate of Adam"
    " grafting, which is AdamW's as well. F in the names is the paper's; small runs have a fifth"
    " of it. The paper: EShampoo hits more targets than Adam grafting, in fewer steps and less"
    " time.",
    panels=(
        # An evaluation of the U-Net takes as long as twenty of its steps.
        algoperf_panel("U-Net on magnetic resonance", "mri-unet", 10),
        algoperf_panel("ViT on Imagewoof", "imagewoof-vit", 20),
        algoperf_panel("Message passing on molecules", "molecules-gnn", 20),
    ),
    seeds=5,
)

APPENDIX: Mapping[str, Figure] = {
    figure.name: figure for figure in (PATTERNS_VIT, PATTERNS_LLAMA, BETA3, ALGOPERF_STYLE)
}
