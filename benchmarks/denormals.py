"""Time of a step with denormal numbers against the same step with ordinary ones.

    python -m benchmarks.denormals [--size 256]

Processors may take a hundred times longer for an operation on denormal numbers. They come from
gradients that small, and from parameters whose gradients stop: every average then halves its way
down into them. Times of all kinds are taken in turns, the median of each is compared with "normal".
"""

import argparse
import time
from collections.abc import Iterator
from statistics import median

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from eshampoo import CASPR, SOAP, EShampoo, KLShampoo, Shampoo

STEPS = 64
"""Steps in which an optimizer has to clear denormal numbers away; it looks now and then."""

KINDS = {
    "normal": (1.0, 1.0),  # size of the gradients, and what the state is scaled to
    "denormal gradients": (1e-40, 1.0),
    "denormal gradients for ever": (1e-40, 1e-40),
    "gradients of 1e-22": (1e-22, 1e-22),  # their squares are denormal
    "gradients stopped": (0.0, 1e-40),
}
# Muon has no basis; FullMatrixAdam would need a factor of size² × size² for this matrix.
METHODS = {method.__name__: method for method in (EShampoo, Shampoo, SOAP, KLShampoo, CASPR)}


def prepared(name: str, size: int, kind: str) -> tuple[Optimizer, Tensor]:
    """An optimizer whose averages have come to what such gradients make of them."""
    gradient, state = KINDS[kind]
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(size, size))
    optimizer = (
        AdamW([p]) if name == "AdamW" else METHODS[name]([p], frequency=10**6, merge_dims=False)
    )
    p.grad = torch.randn(size, size)
    for _ in range(3):
        optimizer.step()
    G = torch.randn(size, size)
    for key, value in optimizer.state[p].items():
        if key == "exp_avg":
            value.mul_(state)
        elif key == "exp_avg_sq" or key.startswith("factor"):
            value.mul_(min(state, max(state**2, 1e-40)))
    p.grad = G * gradient
    for _ in range(STEPS):
        optimizer.step()
    return optimizer, p


def times(name: str, size: int, repeats: int) -> Iterator[tuple[str, float]]:
    """The median time of a step of every kind, in milliseconds."""
    ready = {kind: prepared(name, size, kind)[0] for kind in KINDS}
    taken: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(repeats):
        for kind, optimizer in ready.items():
            begin = time.perf_counter()
            optimizer.step()
            taken[kind].append(1e3 * (time.perf_counter() - begin))
    for kind, values in taken.items():
        yield kind, median(values)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| " + " | ".join(["optimizer", "normal", *list(KINDS)[1:]]) + " |")
    print("|---" * (len(KINDS) + 1) + "|")
    for name in ("AdamW", *METHODS):
        found = dict(times(name, arguments.size, arguments.repeats))
        base = found["normal"]
        ratios = [f"× {found[kind] / base:.2f}" for kind in list(KINDS)[1:]]
        print("| " + " | ".join([name, f"{base:.2f} ms", *ratios]) + " |", flush=True)


if __name__ == "__main__":
    main()
