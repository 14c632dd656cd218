"""Find the fastest way to run `eigh` here: `python -m eshampoo.calibrate [--device cuda]`.

It takes a few seconds, and prints a table and the call of `use_eigh` that a program should make
once, before its first step.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor

from .math.ways import Way, decompose, use_eigh

__all__ = ["measure", "setting", "use_eigh"]

SIZES = (32, 64, 128, 256, 512, 1024)
COUNT = 8  # matrices of each size


def factors(count: int, size: int, device: str) -> Tensor:
    """Nearly diagonal matrices, like factors in their bases."""
    generator = torch.Generator().manual_seed(0)
    X = 0.05 * torch.randn(count, size, size, generator=generator)
    values = torch.logspace(-6, 0, size)
    return (torch.diag(values) + values * (X + X.mT) * values.unsqueeze(1)).to(device)


def measure(size: int, device: str, seconds: float, count: int = COUNT) -> dict[Way, float]:
    """The shortest time of each way for a stack of matrices of this size, in seconds.

    After a warm-up round, the ways take turns until the time is up.
    """
    A = factors(count, size, device)
    ways: list[Way] = [way for way in get_args(Way) if way != "host" or A.device.type != "cpu"]
    least = dict.fromkeys(ways, float("inf"))
    deadline = time.perf_counter() + seconds
    for turn in range(1_000):
        for way in ways:
            start = time.perf_counter()
            eigenvalues, V = decompose(A, way)
            float(V.sum() + eigenvalues.sum())  # the host waits for the device
            if turn > 0:
                least[way] = min(least[way], time.perf_counter() - start)
        if turn > 0 and time.perf_counter() > deadline:
            break
    return least


def setting(found: dict[int, dict[Way, float]]) -> dict[int, Way]:
    """The fastest way up to each size; equal neighbours share an entry, ties go to "batched".

    >>> setting({32: {"batched": 1.0, "single": 2.0}, 64: {"batched": 1.0, "single": 1.5}})
    {64: 'batched'}
    """
    ways: dict[int, Way] = {}
    for size, seconds in sorted(found.items()):
        fastest = min(seconds, key=lambda way: seconds[way])
        # A difference of a few percent does not count.
        way = "batched" if seconds["batched"] <= 1.05 * seconds[fastest] else fastest
        if ways and [*ways.values()][-1] == way:
            ways.popitem()
        ways[size] = way
    return ways


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every size, and print the table and the setting."""
    parser = argparse.ArgumentParser(prog="python -m eshampoo.calibrate", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds for every size")
    o = parser.parse_args(arguments)
    write = sys.stdout.write
    write(f"milliseconds for {COUNT} matrices on {o.device}\n")
    found = {}
    for size in o.sizes:
        found[size] = measure(size, o.device, o.seconds)
        each = "  ".join(f"{way} {1e3 * seconds:.3g}" for way, seconds in found[size].items())
        write(f"{size:>6}  {each}\n")
        sys.stdout.flush()
    kind = torch.device(o.device).type
    write("\nBefore the first step, in every process:\n\n")
    write("    from eshampoo.calibrate import use_eigh\n\n")
    write(f"    use_eigh({kind!r}, {setting(found)!r})\n")


if __name__ == "__main__":
    main()
