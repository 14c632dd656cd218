"""Our own figures and studies: what the library costs and gains, and what its defaults could be.

The studies write out every option that they are about, so that their runs keep their meaning when
defaults change. A workload that has no learning rate of its own here takes those of ``RATES``, and
runs are as long as ``STEPS`` says.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from eshampoo.lab.figures.figure import Curve, Figure, Horizontal, Panel, rates
from eshampoo.lab.optimizers import Option

Options = Mapping[str, Option]
Changes = Mapping[str, Options]

# The default of version 0.2: updates of a fixed size, and the β2 of the workload.
FIXED_SIZE: Options = {
    "merge_dims": False,
    "frequency": "auto",
    "novelty": 0.1,
    "tau": 0.03,
    "budget": 0.25,
    "rms": 0.4,
}
DEFAULT: Options = {**FIXED_SIZE, "rms": "auto", "betas": (0.9, 0.95)}
METHODS: Mapping[str, Curve] = {
    curve.label: curve
    for curve in (
        Curve("AdamW", "adamw"),
        Curve("Muon", "muon"),
        Curve("Shampoo, Adam grafting", "shampoo", {"merge_dims": False}, 100),
        Curve("SOAP", "soap", {"frequency": 10}),
        Curve("KL-Shampoo", "klshampoo", {"frequency": 10}),
    )
}

RATES: Mapping[str, tuple[float, ...]] = {
    "digits-vit": (1e-3, 3e-3, 1e-2),
    "molecules-gnn": (3e-3, 1e-2, 3e-2),
    "imagewoof-convnext": (1e-3, 3e-3, 1e-2),
    "imagewoof-vit": (1e-3, 3e-3, 1e-2),
    "mri-unet": (1e-3, 3e-3, 1e-2),
    "text-llama": (3e-3, 1e-2, 3e-2),
    "text-char": (1e-3, 3e-3, 1e-2),
    "pinn-poisson": (1e-3, 3e-3, 1e-2),
}
# Shorter than the workloads' own runs, so that hundreds of them fit into a day of one core.
STEPS = {
    "digits-vit": 300,
    "molecules-gnn": 150,
    "imagewoof-convnext": 150,
    "imagewoof-vit": 300,
    "mri-unet": 120,
    "text-llama": 120,
    "text-char": 500,
    "pinn-poisson": 1000,
}
# A run of the Llama with 12 million parameters is so short that all 22 take five core hours.
# results/ has some of 700 steps, too.
LARGE_STEPS = 350


def methods(labels: Sequence[str], tried: tuple[float, ...]) -> tuple[Curve, ...]:
    """Return methods by name, each at the same learning rates."""
    return tuple(replace(METHODS[label], rates=rates(tried)) for label in labels)


def over_rates(workload: str, curves: Sequence[Curve]) -> Panel:
    """Return final loss over the learning rate on one workload."""
    return Panel(workload, workload, tuple(curves), "rate", steps={"small": STEPS[workload]})


TIME_RATES = rates((2e-3, 4e-3), (6e-4, 1e-3))
AXES: tuple[Horizontal, ...] = ("step", "time")
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
                Curve("AdamW", "adamw", rates=rates((1e-3, 2e-3), (6e-4, 1e-3))),
                Curve("Shampoo, Adam grafting", "shampoo", {}, 100, TIME_RATES),
                Curve("SOAP", "soap", rates=TIME_RATES),
                Curve("EShampoo", "eshampoo", {}, 50, TIME_RATES),
                Curve("EShampoo, partial", "eshampoo", {"solver": "partial"}, 1, TIME_RATES),
            ),
            horizontal=horizontal,
        )
        for horizontal in AXES
    ),
    seeds=2,
    steps={"small": 630},
)


def members(
    workloads: Sequence[str], changes: Changes, *, adamw: bool = False
) -> tuple[Panel, ...]:
    """Compare EShampoo with each of some changes, at the middle learning rate."""
    panels = []
    for workload in workloads:
        middle = RATES[workload][1:2]
        curves = [*methods(("AdamW",), middle)] if adamw else []
        for label, change in changes.items():
            curves.append(Curve(label, "eshampoo", {**FIXED_SIZE, **change}, rates=rates(middle)))
        panels.append(over_rates(workload, curves))
    return tuple(panels)


SUM: Option = (0.9, 1.0)
SIDES = Figure(
    name="sides",
    title="A basis on one side of a matrix",
    note="Final loss at the middle learning rate: what does one side alone cost, and which one?",
    panels=members(
        ("imagewoof-vit", "digits-vit"),
        {side: {"sides": side} for side in ("both", "left", "right", "smaller")},
    ),
    seeds=3,
)
MOMENT = Figure(
    name="moment",
    title="One number of D for many entries",
    note="Final loss at the middle learning rate, with D per entry, row and block.",
    panels=members(
        ("digits-vit", "molecules-gnn"),
        {f"D per {moment}": {"moment": moment} for moment in ("entry", "row", "block")},
        adamw=True,
    ),
    seeds=3,
)
ADAGRAD = Figure(
    name="adagrad",
    title="Sums instead of averages",
    note="Final loss at the middle learning rate: with AdaGrad's sums (β2 = 1), which the"
    " paper leaves open, does the basis-aware correction help or hurt?",
    panels=members(
        ("imagewoof-vit", "digits-vit"),
        {
            "average, naive": {"correction": "naive"},
            "average, basis-aware": {"correction": "basis_aware"},
            "sum, naive": {"correction": "naive", "betas": SUM},
            "sum, basis-aware": {"correction": "basis_aware", "betas": SUM},
        },
    ),
    seeds=3,
)
LEAN = Figure(
    name="lean",
    title="A lean state",
    note="Final loss at the middle learning rate, which is the best one of the defaults on"
    " these: does the state in half of the bytes end within the seeds' spread of the full"
    " one's?",
    # The full state is not named: its runs are those of the defaults.
    panels=members(
        ("digits-vit", "imagewoof-vit", "text-llama"), {"full": {}, "lean": {"state": "lean"}}
    ),
    seeds=5,
)


# Rates around AdamW's best one, which the note of the figure gives.
SIGNAL_RATES: Mapping[str, tuple[float, ...]] = {
    "digits-vit": (1.5e-3, 3e-3, 6e-3),
    "imagewoof-vit": (1e-3, 3e-3, 6e-3),
    "molecules-gnn": (5e-3, 1e-2, 3e-2),
    "mri-unet": (5e-3, 1e-2, 2e-2),
    "text-char": (1.5e-3, 3e-3, 6e-3),
    "pinn-poisson": (5e-3, 1e-2, 3e-2),
    "text-llama": (1.5e-3, 3e-3, 6e-3),
    "imagewoof-convnext": (1.5e-3, 3e-3, 6e-3),
}


def with_signal(workload: str) -> tuple[Curve, ...]:
    """Return EShampoo with Gram and with KL factors, at its rates on one workload."""
    tried = rates(SIGNAL_RATES[workload])
    with_kl: Options = {**DEFAULT, "factors": "kl"}
    return (
        Curve("EShampoo", "eshampoo", DEFAULT, rates=tried),
        Curve("EShampoo, KL factors", "eshampoo", with_kl, rates=tried),
    )


def changed(changes: Changes) -> tuple[Panel, ...]:
    """Compare changes of the default on all problems, at the middle rate of ``SIGNAL_RATES``."""
    panels = []
    for workload, (_, middle, _) in SIGNAL_RATES.items():
        tried = rates((middle,))
        curves = [
            Curve(label, "eshampoo", {**DEFAULT, **change}, rates=tried)
            for label, change in changes.items()
        ]
        panels.append(over_rates(workload, curves))
    return tuple(panels)


SIGNAL = Figure(
    name="signal",
    title="The size of an update by its signal",
    note="Final loss of EShampoo with its default over the learning rate. AdamW's best rates are"
    " 0.003 (digits, characters, Llama, ConvNeXt), 0.001 (ViT on dogs), 0.01 (U-Net) and 0.03"
    " (Poisson); on molecules 0.03 is level with its best, 0.1.",
    panels=tuple(over_rates(workload, with_signal(workload)) for workload in SIGNAL_RATES),
    seeds=2,
)
MEMORY = Figure(
    name="memory",
    title="β2 with the default",
    note='Final loss at the middle rate of the figure "signal": how long should D and the factors'
    " remember?",
    panels=changed({f"β2 = {b:g}": {"betas": (0.9, b)} for b in (0.9, 0.95, 0.99, 0.999)}),
    seeds=2,
)
THRESHOLD = Figure(
    name="threshold",
    title="The threshold of the criterion with the default",
    note='Final loss and CPU time at the middle rate of the figure "signal", with the default'
    " τ = 0.03 and with the paper's 0.1: what do fewer bases save, and what do they cost?",
    panels=changed({f"τ = {tau:g}": {"tau": tau} for tau in (0.03, 0.1)}),
    seeds=2,
)


def on_tokens(curve: Curve) -> Curve:
    """Return a rival as SOAP's authors advise for tokens: no basis on the vocabulary's side."""
    if curve.label not in ("SOAP", "KL-Shampoo"):
        return curve
    return replace(curve, options={**curve.options, "max_dim": 1024})


def evidence_curves(workload: str) -> tuple[Curve, ...]:
    """Return all methods on one problem; L-BFGS where the gradient has no noise."""
    rivals = methods(tuple(METHODS), RATES[workload])
    if workload == "text-llama":  # its own β2 is 0.95
        return (*map(on_tokens, rivals), *with_signal(workload))
    rivals = tuple(replace(curve, memories=(None, 0.95)) for curve in rivals)
    exact = (Curve("L-BFGS", "lbfgs"),) if workload == "pinn-poisson" else ()
    return (*rivals, *with_signal(workload), *exact)


EVIDENCE = Figure(
    name="evidence",
    title="Evidence: eight problems, seven methods, fresh seeds",
    note="Two seeds for the search over the learning rate and, for all but EShampoo, over β2; a"
    " learning rate is added while the best is at an edge.",
    panels=tuple(over_rates(workload, evidence_curves(workload)) for workload in SIGNAL_RATES),
    seeds=2,
    extend=True,
    fresh=5,
)

LARGE_AXES: tuple[Horizontal, ...] = ("step", "cpu")
LARGE = Figure(
    name="large",
    title="A Llama of 12 million parameters",
    note="Training loss against steps and against CPU time, counted in gradients of the same run;"
    " each method at the better of two learning rates: its best one on the small Llama, and about"
    " a third of it. AdamW has a third rate, because its best one falls with the width.",
    panels=tuple(
        Panel(
            f"WikiText-2, {horizontal}",
            "text-llama-12m",
            (
                *methods(("AdamW",), (3e-4, 1e-3, 3e-3)),
                *map(on_tokens, methods(("SOAP", "KL-Shampoo"), (1e-3, 3e-3))),
                *methods(("Muon",), (3e-3, 1e-2)),
                Curve("EShampoo", "eshampoo", DEFAULT, rates=rates((1e-3, 3e-3))),
            ),
            horizontal,
        )
        for horizontal in LARGE_AXES
    ),
    seeds=2,
    steps={"small": LARGE_STEPS},
)
WIDTH = Figure(
    name="width",
    title="The width of a model",
    note="Final loss over the learning rate for three widths of the model on characters: do the"
    " gain and the best rate stay? A rate is added while the best is at an edge. AdamW has the β2"
    " of the workload, 0.99.",
    panels=tuple(
        Panel(
            f"width {width}",
            workload,
            (
                *methods(("AdamW",), RATES["text-char"]),
                Curve("EShampoo", "eshampoo", DEFAULT, rates=rates(RATES["text-char"])),
            ),
            "rate",
            steps={"small": 1500},
        )
        for width, workload in (
            (64, "text-char-width-64"),
            (128, "text-char"),
            (256, "text-char-width-256"),
        )
    ),
    seeds=2,
    extend=True,
)
FINETUNE = Figure(
    name="finetune",
    title="Fine-tuning, of all weights and by LoRA",
    note="Final loss over the learning rate; a rate is added while the best is at an edge. A Llama"
    " of the size of text-char learned the first half of WikiText-2, byte by byte, for 500 steps of"
    " AdamW, and goes on with Tiny Shakespeare; LoRA has rank 8 in every linear layer of the"
    " blocks.",
    panels=tuple(
        Panel(
            title,
            workload,
            (
                *methods(("AdamW",), tried),
                Curve("EShampoo", "eshampoo", DEFAULT, rates=rates(tried)),
            ),
            "rate",
        )
        for title, workload, tried in (
            ("all weights", "text-tune", (3e-4, 1e-3, 3e-3)),
            ("LoRA", "text-lora", (1e-3, 3e-3, 1e-2)),
        )
    ),
    seeds=5,
    extend=True,
)

# A study searches learning rates, repeats the best on fresh seeds, and has a page of its own.
STUDIES: Mapping[str, Figure] = {EVIDENCE.name: EVIDENCE}
OUR_FIGURES: Mapping[str, Figure] = {
    figure.name: figure
    for figure in (
        TIME, SIDES, MOMENT, ADAGRAD, LEAN, SIGNAL, MEMORY, THRESHOLD, LARGE, WIDTH, FINETUNE
    )
}  # fmt: skip
# The problems of the study, in README's words.
NAMES = {
    "digits-vit": "digits",
    "imagewoof-vit": "Imagewoof, ViT",
    "molecules-gnn": "molecules",
    "mri-unet": "U-Net",
    "text-char": "characters",
    "pinn-poisson": "Poisson equation",
    "text-llama": "WikiText-2",
    "imagewoof-convnext": "Imagewoof, ConvNeXt",
}
# What the page of the study says about its own limits.
LEFT_OUT = (
    "Runs are shorter than the workloads' own, and models are small: two cores had to do.",
    "Weight decay and ε are those of the workload for every method, and were not tuned.",
    "EShampoo has three learning rates around AdamW's best one, and one β2; the others have three"
    " rates with each of two values of β2. All have more where the best is at an edge.",
    "One batch size and one width for each problem. `eshampoo reproduce width` has three widths,"
    " `eshampoo reproduce large` has a Llama of 12 million parameters, and `eshampoo reproduce"
    " finetune` begins with a model that was trained before.",
)
