"""What a lean state saves and costs: bytes per parameter, and a plain step against a full state's.

python -m benchmarks.lean [--shapes vit_192] [--repetitions 15]

The bytes are those of ViT-S, on the meta device. The steps alternate on one thread.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from eshampoo import EShampoo

from . import environment, shapes, timing
from .contenders import NEVER

STATES: dict[str, dict[str, Any]] = {
    "full": {},
    "lean": {"state": "lean"},
    'full, sides="right"': {"sides": "right"},
    'lean, sides="right"': {"state": "lean", "sides": "right"},
}


def bytes_per_parameter(model: str, options: dict[str, Any]) -> float:
    """What the state of EShampoo takes at these shapes."""
    params = shapes.without_memory(model)
    optimizer = EShampoo(params, **options)
    entries = [v for p in params for v in optimizer.state[p].values()]
    nbytes = sum(v.numel() * v.element_size() for v in entries)
    return float(nbytes / sum(p.numel() for p in params))


def plain_steps(model: str, repetitions: int) -> dict[str, float]:
    """CPU seconds of a plain step by form of the state, the median; values make no difference."""
    optimizers = {
        form: EShampoo(shapes.parameters(model), state=form, frequency=NEVER)
        for form in ("full", "lean")
    }
    for optimizer in optimizers.values():
        optimizer.step()
    steps = {form: optimizer.step for form, optimizer in optimizers.items()}
    found = timing.race(steps, repetitions, budget=120.0)
    return {form: times["cpu"] for form, times in found.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lean", description=__doc__)
    parser.add_argument("--shapes", default="vit_192", choices=shapes.MODELS)
    parser.add_argument("--repetitions", type=int, default=15)
    o = parser.parse_args(arguments)
    print("| state, vit_s | bytes per parameter |\n|---|--:|")
    for name, options in STATES.items():
        print(f"| {name} | {bytes_per_parameter('vit_s', options):.1f} |")
    timing.use_threads(1)
    timing.warm_up()
    seconds = plain_steps(o.shapes, o.repetitions)
    print(f"\n{o.shapes}, one thread, {environment.cpu_model()}, CPU seconds of a plain step:")
    ratio = seconds["lean"] / seconds["full"]
    print(f"lean {seconds['lean']:.4g} / full {seconds['full']:.4g} = {ratio:.2f}")


if __name__ == "__main__":
    main()
