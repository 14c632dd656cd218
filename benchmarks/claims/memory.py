"""What a lean state and a basis on one side save and cost, beside a full state of both sides.

    python -m benchmarks.claims.memory [--shapes vit_s] [--repetitions 7]

The steps are plain ones, in turn on one thread: medians of CPU seconds.
"""

from collections.abc import Sequence
from typing import Any

from eshampoo import EShampoo

from .. import environment, shapes, timing
from ..command import command_line
from ..contenders import NEVER
from ..states import state_bytes

STATES: dict[str, dict[str, Any]] = {
    "full": {},
    "lean": {"state": "lean"},
    'full, sides="right"': {"sides": "right"},
    'lean, sides="right"': {"state": "lean", "sides": "right"},
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row per state; ratios are to the first."""
    parser = command_line("claims.memory", __doc__)
    parser.add_argument("--shapes", default="vit_s", help="a model, or layers:WIDTH:COUNT")
    parser.add_argument("--repetitions", type=int, default=7)
    o = parser.parse_args(arguments)
    timing.use_threads(1)
    timing.warm_up()
    optimizers = {
        name: EShampoo(shapes.parameters(o.shapes), frequency=NEVER, **options)
        for name, options in STATES.items()
    }
    for optimizer in optimizers.values():
        optimizer.step()  # the first step has more to do
    steps = {name: optimizer.step for name, optimizer in optimizers.items()}
    seconds = {k: v["cpu"] for k, v in timing.race(steps, o.repetitions, budget=240.0).items()}
    sizes = {name: state_bytes(optimizer) for name, optimizer in optimizers.items()}
    parameters = sum(p.numel() for p in shapes.without_memory(o.shapes))
    print(f"{o.shapes}, one thread, {environment.cpu_model()}\n")
    print("| state | bytes per parameter | ratio | CPU s of a plain step | ratio |")
    print("|---|--:|--:|--:|--:|")
    for name in STATES:
        ratios = [f"{of[name] / of['full']:.2f}" for of in (sizes, seconds)]
        size = f"{sizes[name] / parameters:.1f}"
        print(f"| {name} | {size} | {ratios[0]} | {seconds[name]:.3g} | {ratios[1]} |")


if __name__ == "__main__":
    main()
