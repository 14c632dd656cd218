"""The paper's figures, and those of its appendix.

F is given as in the paper, for runs of the paper's length; a shorter run scales it with its
length, so that it stays the same share of the run. Where F or the size of blocks does not follow
this rule, the values of each scale are written out. The paper preconditions vectors as well, so
its figures do it here (``vectors="full"``).
"""

from collections.abc import Mapping
from itertools import product

from eshampoo.lab.figures.figure import Curve, Figure, Grouping, Panel, rates
from eshampoo.lab.figures.ours import DEFAULT
from eshampoo.lab.optimizers import Option
from eshampoo.lab.run.runs import SCALES, Scale

FULL: Mapping[str, Option] = {"vectors": "full"}
ADAMW = Curve("AdamW", "adamw")

FIG1 = Figure(
    name="fig1",
    title="Stale Shampoo without grafting",
    note="The paper: Shampoo with F = 100 and no grafting is worse than AdamW for every α and ε.",
    panels=(
        Panel(
            title="Imagewoof ViT",
            workload="imagewoof-vit",
            curves=(
                Curve("AdamW", "adamw", rates=rates((3e-4, 1e-3, 3e-3), (1e-4, 1e-3, 1e-2))),
                *(
                    Curve(
                        f"Shampoo ε = {eps:g}",
                        "shampoo",
                        {**FULL, "graft": None, "eps": eps},
                        frequency=100,
                        rates=rates((3e-4, 1e-3, 3e-3), (1e-4, 1e-3, 1e-2)),
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
    adam_rates = rates(small, (1e-4, 3e-4, 6e-4, 1e-3, 3e-3, 6e-3, 1e-2))
    grafted_rates = rates(small, (1e-4, 3e-4, 1e-3, 3e-3))
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
                rates=rates((*small[1:], 3e-2), shampoo_rates),
            ),
            Curve(
                "Shampoo² / S, F = 1",
                "shampoo",
                {**FULL, "graft": None, **squared},
                frequency=1,
                rates=rates(small, (1e-4, 3e-4, 6e-4, 1e-3, 3e-3)),
            ),
            Curve("EShampoo, F = 100", "eshampoo", {**FULL, "tau": 0.0}, 100, grafted_rates),
        ),
        horizontal="rate",
    )


FIG2 = Figure(
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

FIG3 = Figure(
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
FIG4 = Figure(
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

FIG5 = Figure(
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
# A fifth of the paper's F, or our runs would see none of them; 1 stays.
FREQUENCIES: Mapping[int, int] = {100: 20, 50: 10, 10: 2, 1: 1}
ROWS: tuple[tuple[int, float], ...] = (
    *((f, 0.0) for f in FREQUENCIES),
    *((f, 0.1) for f in FREQUENCIES),
    (10, 0.01),
    (1, 0.01),
)


def algoperf_panel(
    title: str, workload: str, steps: int, evaluations: int, tried: tuple[float, ...]
) -> Panel:
    """Return the rows of the paper's full table on one workload.

    AdamW and Adam grafting try three learning rates. The middle one is the best for both, and
    EShampoo takes it over, as it does in the paper.
    """

    def row(
        label: str, optimizer: str, options: Mapping[str, Option], f: int, small: tuple[float, ...]
    ) -> Curve:
        scaled: dict[Scale, Mapping[str, Option]] = {
            scale: {"frequency": f if scale == "paper" else FREQUENCIES[f]} for scale in SCALES
        }
        own = rates(small, (WINNERS_RATE,))
        return Curve(label, optimizer, {**WINNER, **options}, None, own, scaled)

    curves = [
        Curve("AdamW", "adamw", rates=rates(tried, (3e-4, 1e-3, 3e-3))),
        row("Adam grafting, F = 100", "shampoo", {}, 100, tried),
    ]
    for f, tau in ROWS:
        label = f"EShampoo, {f'τ = {tau:g}, ' if tau else ''}F = {f}"
        curves.append(row(label, "eshampoo", {"tau": tau}, f, tried[1:2]))
    own = rates(tried[1:2], (WINNERS_RATE,))
    curves.append(Curve("EShampoo, its default", "eshampoo", DEFAULT, rates=own))
    length: Mapping[Scale, int] = {"small": steps}
    return Panel(title, workload, tuple(curves), "step", steps=length, evaluations=evaluations)


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
        algoperf_panel(
            "U-Net on magnetic resonance", "mri-unet", 120, 10, tried=(3e-3, 1e-2, 3e-2)
        ),
        algoperf_panel("ViT on Imagewoof", "imagewoof-vit", 300, 20, tried=(3e-4, 1e-3, 3e-3)),
        algoperf_panel(
            "Message passing on molecules", "molecules-gnn", 150, 20, tried=(3e-2, 1e-1, 3e-1)
        ),
    ),
    seeds=5,
)

PAPER_FIGURES: Mapping[str, Figure] = {
    figure.name: figure
    for figure in (
        FIG1, FIG2, FIG3, FIG4, FIG5, PATTERNS_VIT, PATTERNS_LLAMA, BETA3, ALGOPERF_STYLE
    )
}  # fmt: skip
