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
PAPERS_RULE: Options = {"merge_dims": False, "tau": 0.1, "budget": None, "rms": None}
METHODS: Mapping[str, Curve] = {
    curve.label: curve
    for curve in (
        Curve("AdamW", "adamw"),
        Curve("Muon", "muon"),
        Curve("Shampoo, Adam grafting", "shampoo", {"merge_dims": False}, 100),
        Curve("SOAP", "soap", {"frequency": 10}),
        Curve("KL-Shampoo", "klshampoo", {"frequency": 10}),
        Curve("EShampoo", "eshampoo", FIXED_SIZE),
    )
}
RIVALS = ("AdamW", "SOAP", "EShampoo")

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
# By study, the workloads that it is on.
OF_THE_EVIDENCE = (
    "digits-vit", "imagewoof-vit", "molecules-gnn", "mri-unet", "text-char", "pinn-poisson"
)  # fmt: skip
OF_THE_DEFAULTS = (
    "digits-vit", "molecules-gnn", "imagewoof-convnext", "imagewoof-vit", "mri-unet", "text-llama"
)  # fmt: skip
OF_THE_CHOICES = (*OF_THE_DEFAULTS, "text-char")  # also where the defaults are not ahead


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


def evidence_curves(workload: str) -> tuple[Curve, ...]:
    """Return all methods on one problem; L-BFGS where the gradient has no noise."""
    searched = methods(tuple(METHODS), RATES[workload])
    return (*searched, Curve("L-BFGS", "lbfgs")) if workload == "pinn-poisson" else searched


EVIDENCE = Figure(
    name="evidence",
    title="Evidence: six problems, six optimizers, fresh seeds",
    note="Two seeds for the search; a learning rate is added while the best is at an edge.",
    panels=tuple(over_rates(workload, evidence_curves(workload)) for workload in OF_THE_EVIDENCE),
    seeds=2,
    extend=True,
    fresh=5,
)


def default_curves(workload: str) -> tuple[Curve, ...]:
    """Return AdamW, SOAP and EShampoo with its defaults."""
    adamw, soap, ours = methods(RIVALS, RATES[workload])
    if workload == "text-llama":
        # As SOAP's authors advise for language models: no basis on the side of the vocabulary.
        soap = replace(soap, options={**soap.options, "max_dim": 1024})
    return adamw, soap, ours


DEFAULTS = Figure(
    name="defaults",
    title="EShampoo with its defaults, against AdamW and SOAP",
    note="Final loss over the learning rate, two seeds, and at the best rate of each three fresh"
    " seeds. A learning rate is added while the best is at an edge.",
    panels=tuple(over_rates(workload, default_curves(workload)) for workload in OF_THE_DEFAULTS),
    seeds=2,
    extend=True,
    fresh=3,
)

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


def changed(workload: str) -> list[Curve]:
    """Return EShampoo with one change of its defaults at a time, at the middle learning rate.

    Without a fixed size of the updates the best rate differs, so that case also gets the next
    higher rate.
    """
    _, middle, high = RATES[workload]
    one, two = rates((middle,)), rates((middle, high))
    curves = [Curve("the defaults", "eshampoo", FIXED_SIZE, rates=one)]
    for name, values in FEW_CHANGES.get(workload, CHANGES).items():
        for value in values:
            tried = two if (name, value) == ("rms", None) else one
            options = {**FIXED_SIZE, name: value}
            curves.append(Curve(f"{name} = {value}", "eshampoo", options, rates=tried))
    if workload in FEW_CHANGES:
        return curves
    for f in (10, 1):
        options = {**PAPERS_RULE, "frequency": f}
        curves.append(Curve(f"the paper's, F = {f}", "eshampoo", options, rates=two))
    for f in (5, 1):
        curves.append(Curve(f"SOAP, F = {f}", "soap", {"frequency": f}, rates=two))
    return curves


CHOICES = Figure(
    name="choices",
    title="What the defaults could be instead",
    note="Final loss with one change of the defaults at a time, at the middle learning rate; also"
    " at the next higher one where updates have the size that comes out.",
    panels=tuple(over_rates(workload, changed(workload)) for workload in OF_THE_CHOICES),
    seeds=2,
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


def check_rules(workload: str, beta2: float) -> Panel:
    """Compare three rules of when to check for EShampoo and SOAP at one β2."""
    curves = []
    for label, own in (("EShampoo", FIXED_SIZE), ("SOAP", {})):
        for f in ("auto", 1, 10):
            options: Options = {**own, "betas": (0.9, beta2), "frequency": f}
            middle = rates(RATES[workload][1:2])
            curves.append(Curve(f"{label}, F = {f}", label.lower(), options, rates=middle))
    title = f"{workload}, β2 = {beta2:g}"
    return Panel(title, workload, tuple(curves), "step", steps={"small": STEPS[workload]})


BETA2 = Figure(
    name="beta2",
    title="β2, and when a basis is looked at",
    note="Final loss of EShampoo and SOAP with checks by novelty, at every step and at every tenth,"
    " over β2: does the rule without a number hold for every memory of the averages?",
    panels=tuple(
        check_rules(workload, beta2)
        for workload in ("imagewoof-vit", "text-char")
        for beta2 in (0.9, 0.95, 0.99, 0.999)
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
            name,
            methods(RIVALS, RATES[workload]),
            "step",
            steps={"small": STEPS[workload]},
        )
        for workload, batch, name in (
            ("digits-vit", 16, "digits-vit-batch-16"),
            ("digits-vit", 64, "digits-vit"),
            ("digits-vit", 512, "digits-vit-batch-512"),
            ("imagewoof-vit", 16, "imagewoof-vit-batch-16"),
            ("imagewoof-vit", 128, "imagewoof-vit"),
        )
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
            name,
            methods(RIVALS, (3e-3,)),
            "step",
            steps={"small": steps},
        )
        for width, name in ((64, "text-char-width-64"), (128, "text-char"))
        for steps in (500, 1500)
    ),
    seeds=1,
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


def with_signal(workload: str) -> Panel:
    """Compare EShampoo with Gram and with KL factors on one workload."""
    tried = rates(SIGNAL_RATES[workload])
    with_kl: Options = {**DEFAULT, "factors": "kl"}
    curves = (
        Curve("EShampoo", "eshampoo", DEFAULT, rates=tried),
        Curve("EShampoo, KL factors", "eshampoo", with_kl, rates=tried),
    )
    return over_rates(workload, curves)


def over_memory(workload: str) -> Panel:
    """Compare four values of β2 with the default on one workload, at the middle rate."""
    tried = rates(SIGNAL_RATES[workload][1:2])
    curves = []
    for beta2 in (0.9, 0.95, 0.99, 0.999):
        options: Options = {**DEFAULT, "betas": (0.9, beta2)}
        curves.append(Curve(f"β2 = {beta2:g}", "eshampoo", options, rates=tried))
    return over_rates(workload, curves)


SIGNAL = Figure(
    name="signal",
    title="The size of an update by its signal",
    note="Final loss of EShampoo with its default over the learning rate. AdamW's best rates are"
    " 0.003 (digits, characters, Llama, ConvNeXt), 0.001 (ViT on dogs), 0.01 (U-Net) and 0.03"
    " (Poisson); on molecules 0.03 is level with its best, 0.1.",
    panels=tuple(map(with_signal, SIGNAL_RATES)),
    seeds=2,
)
MEMORY = Figure(
    name="memory",
    title="β2 with the default",
    note='Final loss at the middle rate of the figure "signal": how long should D and the factors'
    " remember?",
    panels=tuple(map(over_memory, SIGNAL_RATES)),
    seeds=2,
)

# A study searches learning rates, repeats the best on fresh seeds, and has a page of its own.
STUDIES: Mapping[str, Figure] = {figure.name: figure for figure in (EVIDENCE, DEFAULTS)}
OUR_FIGURES: Mapping[str, Figure] = {
    figure.name: figure
    for figure in (
        TIME,
        DEFAULTS,
        CHOICES,
        SIDES,
        MOMENT,
        ADAGRAD,
        LEAN,
        BETA2,
        BATCH,
        HORIZON,
        SIGNAL,
        MEMORY,
    )
}
# What the pages of the studies say about their own limits.
LEFT_OUT = (
    "The runs are older than the present default: EShampoo has updates of a fixed size (rms=0.4)"
    ' and the β2 of the workload. The figure "signal" of our reproduction page has the new one.',
    "Runs are shorter than the workloads' own, and models are small: two cores had to do.",
    "β2, weight decay and ε are those of the workload for every method, and were not tuned.",
    "One batch size and one width for each problem. [Choosing](choosing.md) has other batches,"
    " widths, lengths and values of β2, with one or two seeds.",
    "Runs on an Intel processor are older than the check that every basis is orthogonal"
    " (reliability.md). One of them was repeated with the check, and has the same bits.",
    "Runs come from several processors, and are older than the last corrections of the library."
    " Seed 0 of EShampoo, repeated on the corrected code and another processor, ends at 0.00066"
    " instead of 0.00090 (digits-vit), 0.2187 instead of 0.2176 (molecules-gnn) and 1.695, as"
    " before (imagewoof-vit). On one processor the corrections change these by less than 0.03 %.",
)
