"""How even steps are: the longest step over the median, with the default and with a number F.

    python -m benchmarks.even [--shapes vit_192] [--steps 120]

CPU seconds on one thread, the two in turn, with random gradients, after the first 20 steps, at
which the default too checks all blocks together.
"""

from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from eshampoo import EShampoo

from . import environment, shapes, timing
from .command import command_line

FIRST = 20  # steps that do not count
WAYS: dict[str, dict[str, Any]] = {"default": {}, "frequency=10": {"frequency": 10}}


def measure(spec: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Largest, median and sum of the steps, and the bases that they computed, by way."""
    clocks = {way: timing.Clock() for way in WAYS}
    sets = {way: shapes.parameters(spec["shapes"]) for way in WAYS}
    optimizers = {way: EShampoo(sets[way], **options) for way, options in WAYS.items()}
    for t in range(FIRST + spec["steps"]):
        for way, optimizer in optimizers.items():
            generator = torch.Generator().manual_seed(t)
            for p in sets[way]:
                p.grad = torch.randn(p.shape, generator=generator)
            if t < FIRST:
                optimizer.step()
            else:
                clocks[way].time(optimizer.step)
    return {
        way: {
            "largest": max(clock.cpu),
            "median": median(clock.cpu),
            "sum": sum(clock.cpu),
            "bases": optimizers[way].basis_computations,
        }
        for way, clock in clocks.items()
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row per way."""
    parser = command_line("even", __doc__)
    parser.add_argument("--shapes", default="vit_192", help="a model, or layers:WIDTH:COUNT")
    parser.add_argument("--steps", type=int, default=120)
    o = parser.parse_args(arguments)
    timing.use_threads(1)
    timing.warm_up()
    print(f"{o.shapes}, {o.steps} steps, one thread, {environment.cpu_model()}\n")
    print("| | largest / median step | sum, CPU s | bases |\n|---|--:|--:|--:|")
    for way, found in measure(vars(o)).items():
        ratio = found["largest"] / found["median"]
        print(f"| {way} | {ratio:.1f} | {found['sum']:.3g} | {found['bases']:.0f} |")


if __name__ == "__main__":
    main()
