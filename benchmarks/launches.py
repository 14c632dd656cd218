"""How many kernels a step launches: `python -m benchmarks.launches [llama-8b [80]]`.

The second word is the memory of a GPU in GB, on which the size of parts depends. Steps run on the
meta device, where tensors have shapes and no values; every operation that is no view is counted.
What a check would read is made up: that all criteria hold, or that none does.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from eshampoo import EShampoo
from eshampoo.state import blocks as sizes

from .contenders import NEVER
from .shapes import named, without_memory

# Operations that reserve memory, and launch nothing.
EMPTY = {"empty", "empty_like", "empty_strided", "new_empty"}


class Launches(NamedTuple):
    """What one step dispatched."""

    operations: int  # each counted once
    singly: int  # an operation on a list of tensors counted once for each
    products: int  # batches of matrix products
    decompositions: int
    reads: int  # by the host


class Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations by their names."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.once, self.singly = Counter[str](), Counter[str]()

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - an overload of an operation
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        name = str(func).split(".")[1]
        if not func.is_view and name not in EMPTY and str(func).startswith("aten"):
            self.once[name] += 1
            self.singly[name] += len(args[0]) if name.startswith("_foreach") else 1
        return func(*args, **(kwargs or {}))


@contextmanager
def parts_of_a_gpu(gigabytes: int) -> Iterator[None]:
    """Parts on the meta device are as large as on a GPU with so much memory."""
    before = sizes.PART_BYTES
    sizes.PART_BYTES = (gigabytes << 30) // sizes.GPU_PARTS
    try:
        yield
    finally:
        sizes.PART_BYTES = before


@contextmanager
def made_up(factors: int, blocks: int, criterion: float) -> Iterator[list[int]]:
    """Reads find this criterion for all factors, t = 1, nothing skipped, and solutions that work.

    The sizes of what was read.
    """
    real: Callable[[Tensor], Any] = Tensor.tolist
    sizes: list[int] = []

    def tolist(self: Tensor) -> Any:  # noqa: ANN401
        if not self.is_meta:
            return real(self)
        sizes.append(self.numel())
        if not self.is_floating_point():  # which matrices were solved, and their null spaces
            return [[1] * self.shape[1], [0] * self.shape[1]]
        return [criterion] * factors + [1.0] * blocks + [0.0] * (len(self) - factors - blocks)

    Tensor.tolist = tolist  # type: ignore[method-assign,assignment]
    try:
        yield sizes
    finally:
        Tensor.tolist = real  # type: ignore[method-assign,assignment]


def launches(model: str, frequency: int, criterion: float = 0.0) -> Launches:
    """Count the first step, at which with a `frequency` of 1 every factor is checked."""
    optimizer = EShampoo(without_memory(model, gradients=True), frequency=frequency, budget=None)
    based = [bucket for bucket in optimizer._buckets if bucket.modes]
    blocks = sum(len(bucket.blocks) for bucket in based)
    factors = sum(len(bucket.blocks) * len(bucket.modes) for bucket in based)
    with made_up(factors, blocks, criterion) as reads, Count() as count:
        optimizer.step()
    return Launches(
        count.once.total(),
        count.singly.total(),
        count.once["bmm"] + count.once["baddbmm"],
        count.once["_linalg_eigh"],
        len(reads),
    )


def main(model: str = "llama-8b", gigabytes: str = "80") -> None:
    """Print the table of a model's operations (docs/distributed.md has some of it)."""
    with parts_of_a_gpu(int(gigabytes)):
        steps = {
            "plain": launches(model, NEVER),
            "check, all criteria hold": launches(model, 1, 0.0),
            "check, every basis computed": launches(model, 1, 1.0),
        }
    print(f"{model}, {len(named(model))} parameters, {gigabytes} GB, torch {torch.__version__}\n")
    print("| step | operations | lists counted singly | products | eigh | reads by the host |")
    print("|---|--:|--:|--:|--:|--:|")
    for name, found in steps.items():
        print(f"| {name} | {' | '.join(f'{number:,}' for number in found)} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
