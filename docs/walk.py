"""Follow one gradient: print every function of the package that a step calls, in order.

    python docs/walk.py          # a plain step and a check step of EShampoo, on one 48 × 40 matrix

docs/internals.md tells the same story in words.
"""

import sys
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import eshampoo

PACKAGE = Path(eshampoo.__file__).parent
FREQUENCY = 4


def walk(optimizer: eshampoo.EShampoo, weight: torch.Tensor) -> list[tuple[str, str]]:
    """The file and the name of every function that one step calls."""
    calls = []

    def see(frame: FrameType, event: str, _: Any) -> None:  # noqa: ANN401 - as Python calls it
        file, name = Path(frame.f_code.co_filename), frame.f_code.co_name
        # A comprehension, whose name begins with "<", belongs to its function.
        if event == "call" and file.is_relative_to(PACKAGE) and not name.startswith("<"):
            calls.append((file.relative_to(PACKAGE).as_posix(), name))

    weight.grad = torch.randn_like(weight)
    sys.setprofile(see)
    try:
        optimizer.step()
    finally:
        sys.setprofile(None)
    return calls


def walks() -> dict[str, list[tuple[str, str]]]:
    """The walk of a plain step, and of a step that checks and computes the bases."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(48, 40))
    optimizer = eshampoo.EShampoo([weight], frequency=FREQUENCY)
    taken = [walk(optimizer, weight) for _ in range(2 * FREQUENCY)]
    return {"plain": taken[-2], "check": taken[-1]}


def counts(calls: list[tuple[str, str]]) -> tuple[int, int, int]:
    """Functions, files, and how often the walk goes from one file to another."""
    files = [file for file, _ in calls]
    return len({*calls}), len({*files}), sum(a != b for a, b in pairwise(files))


def main() -> None:
    for kind, calls in walks().items():
        functions, files, crossings = counts(calls)
        print(f"{kind} step: {functions} functions in {files} files, {crossings} crossings")
        for file, name in calls:
            print(f"    {file:22} {name}")


if __name__ == "__main__":
    main()
