"""How long the figures would take at the paper's scale on one GPU: a model, nothing measured.

    python -m benchmarks.claims.paper_hours

Floating-point operations are counted on torch's meta device, where nothing is computed: those of
forward and backward pass by torch's own counter, those of a plain step as three units of products
(docs/internals.md), and those of a basis of size d as 10 d³. A GPU is taken to do `RATE` of them
per second in products and `EIGH_RATE` in decompositions. The second figure takes every check to
compute every basis, which a criterion avoids: the truth lies between the two.
"""

from collections.abc import Mapping

import torch
from torch.utils.flop_counter import FlopCounterMode

from eshampoo.lab.catalogue import workload
from eshampoo.lab.data import Batch
from eshampoo.lab.figures.figure import Figure
from eshampoo.lab.figures.ours import TIME
from eshampoo.lab.figures.paper import PAPER_FIGURES
from eshampoo.lab.figures.reproduce import plan
from eshampoo.lab.optimizers import build_optimizer
from eshampoo.lab.run.runs import Run

from ..states import factors

RATE = 8e12  # an A100 at 40 % of its 19.5e12 in float32
EIGH_RATE = 3e11  # our guess: decompositions are latency-bound
LLAMAS = ("text-llama", "text-llama-c4")
ONE_EXAMPLE: Mapping[str, tuple[int, ...]] = {
    "mri-unet": (1, 320, 320),
    **dict.fromkeys(LLAMAS, (2048,)),
}
OUTPUTS: Mapping[str, int] = {"mri-unet": 1, **dict.fromkeys(LLAMAS, 32_768)}
NOT_COUNTED = ("molecules-gnn",)  # a batch of graphs has no shape before it is there


def example(name: str) -> Batch:
    """Return one example on the meta device."""
    shape = ONE_EXAMPLE.get(name, (3, 224, 224))
    if name in LLAMAS:
        tokens = torch.zeros(1, *shape, dtype=torch.int64)
        return tokens, tokens
    image = torch.zeros(1, *shape)
    return (image, image) if name == "mri-unet" else (image, torch.zeros(1, dtype=torch.int64))


def work(run: Run) -> tuple[float, float]:
    """Return the seconds of a run without a basis, and those of all bases at all of its checks."""
    row = workload(run.workload)
    setting = row.settings["paper"]
    with torch.device("meta"):
        model = setting.model(OUTPUTS.get(run.workload, 10))
        with FlopCounterMode(display=False) as counter:
            row.loss(model, example(run.workload)).backward()  # type: ignore[no-untyped-call]
    step = counter.get_total_flops() * setting.batch / RATE
    optimizer = build_optimizer(run.optimizer, model, run.options)
    sides = list(factors(optimizer))  # none, if the optimizer has no bases
    products = 3 * sum(2 * size * elements for _, size, elements in sides) / RATE
    frequency = run.options.get("frequency", 1)
    checks = run.steps / (frequency if isinstance(frequency, int) else 10)  # SOAP has its own, 10
    bases = sum(10 * count * size**3 for count, size, _ in sides) / EIGH_RATE
    return run.steps * (step + products), checks * bases


def row_of(figure: Figure) -> str:
    """Return the row of a figure in the table of docs/reproduction.md."""
    points = plan(figure, "paper", None, None)
    runs = {run.place: run for point in points for run in point.runs}
    costs: dict[str, tuple[float, float]] = {}  # equal but for seed and learning rate: equal cost
    least = bases = 0.0
    for run in runs.values():
        if run.workload in NOT_COUNTED:
            continue
        options = {key: value for key, value in run.options.items() if key != "lr"}
        key = f"{run.workload} {run.optimizer} {options}"
        if key not in costs:
            costs[key] = work(run)
        least, bases = least + costs[key][0], bases + costs[key][1]
    steps = sum(run.steps for run in runs.values())
    hours = f"{least / 3600:,.0f} | {(least + bases) / 3600:,.0f}"
    return f"| `{figure.name}` | {len(runs)} | {steps:,} | {hours} |"


def main() -> None:
    """Print the table."""
    print("| figure | runs | steps of all | hours without bases | hours with every basis |")
    print("|---|---|---|---|---|")
    for figure in (*PAPER_FIGURES.values(), TIME):
        print(row_of(figure), flush=True)


if __name__ == "__main__":
    main()
