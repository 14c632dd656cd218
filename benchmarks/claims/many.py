"""Many small parameters: how long building, saving and loading take beside AdamW.

    python -m benchmarks.claims.many [--counts 2500 5000 10000]

Times are CPU seconds, the best of three; all come from one process, so that their ratios mean
something.
"""

import copy
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

from eshampoo import EShampoo

from ..command import command_line

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "EShampoo": EShampoo,
}
# AdamW makes its state at the first step, EShampoo in its constructor. The next step changes what
# AdamW's `state_dict` returned, so a state that stays as it is has to be copied; ours is a copy.
ACTIONS = ("build and first step", "step", "state_dict", "a state that stays", "load")


def best(action: Callable[[], object], repeats: int = 3) -> float:
    """The least number of CPU seconds."""
    found = []
    for _ in range(repeats):
        start = time.process_time()
        action()
        found.append(time.process_time() - start)
    return min(found)


def measure(make: Callable[..., torch.optim.Optimizer], count: int) -> dict[str, float]:
    """CPU seconds for each action, with matrices 8 × 8 and vectors of 8 in turn."""
    shapes: list[tuple[int, ...]] = [(8, 8), (8,)]
    params = [nn.Parameter(torch.randn(shapes[i % 2])) for i in range(count)]
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer = make(params)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    actions: Sequence[Callable[[], object]] = (
        lambda: make(params).step(),
        optimizer.step,
        optimizer.state_dict,
        optimizer.state_dict
        if isinstance(optimizer, EShampoo)
        else lambda: copy.deepcopy(optimizer.state_dict()),
        lambda: optimizer.load_state_dict(saved),
    )
    return {name: best(action) for name, action in zip(ACTIONS, actions, strict=True)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = command_line("claims.many", __doc__)
    parser.add_argument("--counts", type=int, nargs="+", default=[2500, 5000, 10000])
    counts = parser.parse_args(arguments).counts
    print("| parameters | | " + " | ".join(ACTIONS) + " |")
    print("|---|---|" + "---|" * len(ACTIONS))
    for count in counts:
        seconds = {name: measure(make, count) for name, make in OPTIMIZERS.items()}
        for name, its in seconds.items():
            print(f"| {count} | {name} | " + " | ".join(f"{its[a]:.3g}" for a in ACTIONS) + " |")
        ratios = [seconds["EShampoo"][a] / seconds["AdamW"][a] for a in ACTIONS]
        print(f"| {count} | ratio | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")


if __name__ == "__main__":
    main()
