"""How even steps are: the longest step over the median, with and without stagger=True.

python -m benchmarks.even [--shapes vit_192] [--steps 120] [--way spread]

CPU seconds on one thread, the two in turn, with random gradients, after the first 20 steps. It
prints what it has found so far every 100 steps.
"""

import argparse
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from eshampoo import EShampoo
from eshampoo.checks import AT_ONCE

from . import environment, shapes, timing

WAYS = {"together": False, "spread": True}

Found = dict[str, dict[str, float]]  # by way


def measure(spec: dict[str, Any], watch: Callable[[int, Found], None] | None = None) -> Found:
    """CPU seconds of the steps after those at which all blocks are checked at once, both ways.

    A spec with a "way" measures that one alone. `watch` is told what was found every 100 steps.
    """
    model, steps = spec["shapes"], spec["steps"]
    ways = {way: WAYS[way] for way in ([spec["way"]] if spec.get("way") else WAYS)}
    clocks = {stagger: timing.Clock() for stagger in ways.values()}
    sets = {stagger: shapes.parameters(model) for stagger in clocks}
    optimizers = {stagger: EShampoo(sets[stagger], stagger=stagger) for stagger in clocks}

    def found() -> Found:
        return {
            way: {
                "largest": max(clocks[stagger].cpu),
                "median": median(clocks[stagger].cpu),
                "sum": sum(clocks[stagger].cpu),
                "bases": optimizers[stagger].basis_computations,
            }
            for way, stagger in ways.items()
        }

    for t in range(1, AT_ONCE + steps + 1):
        for stagger, optimizer in optimizers.items():
            generator = torch.Generator().manual_seed(t)
            for p in sets[stagger]:
                p.grad = torch.randn(p.shape, generator=generator)
            if t <= AT_ONCE:
                optimizer.step()
            else:
                clocks[stagger].time(optimizer.step)
        if watch is not None and t > AT_ONCE and (t - AT_ONCE) % 100 == 0:
            watch(t - AT_ONCE, found())
    return found()


def show(steps: int, found: Found) -> None:
    """Print the ratio and the sum of each way."""
    for way, values in found.items():
        ratio = values["largest"] / values["median"]
        line = f"{steps} steps, stagger={WAYS[way]}: largest / median {ratio:.2f}, "
        line += f"sum {values['sum']:.3g} CPU s, {values['bases']:.0f} bases computed"
        print(line, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what was found, also on the way."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.even", description=__doc__)
    parser.add_argument("--shapes", default="vit_192", choices=shapes.MODELS)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--way", choices=WAYS, help="only this one")
    o = parser.parse_args(arguments)
    timing.use_threads(1)
    timing.warm_up()
    print(f"{o.shapes}, one thread, {environment.cpu_model()}", flush=True)
    found = measure(vars(o), show)
    if o.steps % 100 != 0:
        show(o.steps, found)


if __name__ == "__main__":
    main()
