"""What the state and a plain step would take on a GPU, computed: `python -m benchmarks.predicted`.

Nothing is measured. A step runs on the meta device, and every operation is charged

    max(flops / peak, bytes / bandwidth),

with the tensors that it reads and writes counted once each, as if none stayed in a cache. The host
meanwhile needs LAUNCH seconds per kernel, and the step takes the longer of the two. Real products
stay below the peak, so these are lower bounds. Blocks of a model that needs several GPUs are shared
out between them; the time is that of all the work, so divide it by their number.
"""

import sys
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eshampoo import EShampoo
from eshampoo.math.solvers import eigh_cost

from .contenders import NEVER
from .large import STATES
from .launches import EMPTY, parts_of_a_gpu
from .shapes import named, without_memory

# Seconds that the host needs to launch a kernel from Python.
LAUNCH = 5e-6

# Bytes per parameter that a fused AdamW reads and writes: W, M and D twice, and G.
ADAMW_BYTES = 28


class Gpu(NamedTuple):
    """The peaks that a vendor prints."""

    float32: float  # flops per second
    tf32: float
    bandwidth: float  # bytes per second
    gigabytes: int


GPUS = {
    "A100 80 GB": Gpu(19.5e12, 156e12, 2.039e12, 80),
    "H100 SXM": Gpu(66.9e12, 494.7e12, 3.35e12, 80),
}


class Work(NamedTuple):
    """One kernel, or a list of them."""

    flops: float
    bytes: float
    launches: int


class Record(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the work of every operation that is no view."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work: list[Work] = []

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - an overload of an operation
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        out = func(*args, **(kwargs or {}))
        name = str(func).split(".")[1]
        if not func.is_view and name not in EMPTY and str(func).startswith("aten"):
            leaves = tree_leaves((args, kwargs, out))
            tensors = {id(x): x for x in leaves if isinstance(x, Tensor)}
            touched = sum(x.numel() * x.element_size() for x in tensors.values())
            factors = {"bmm": args[:2], "baddbmm": args[1:3]}.get(name)
            flops = 0 if factors is None else 2 * factors[0].numel() * factors[1].shape[2]
            count = len(args[0]) if name.startswith("_foreach") else 1
            self.work.append(Work(flops, touched, count))
        return out


def plain_step(model: str, gigabytes: int) -> list[Work]:
    """The work of a step in which no basis is checked."""
    with parts_of_a_gpu(gigabytes):
        optimizer = EShampoo(without_memory(model, gradients=True), frequency=NEVER, budget=None)
    record = Record()
    with record:
        optimizer.step()
    return record.work


def seconds(work: Sequence[Work], peak: float, bandwidth: float) -> float:
    """What a device and its host take, side by side."""
    device = sum(max(w.flops / peak, w.bytes / bandwidth) for w in work)
    return max(device, LAUNCH * sum(w.launches for w in work))


def all_bases(model: str) -> float:
    """Flops that take as long as `eigh` of every factor once, at the cost that `budget` charges."""
    optimizer = EShampoo(without_memory(model))
    return sum(
        2 * eigh_cost(bucket.shape[mode], "cuda") * len(bucket.blocks)
        for bucket in optimizer._buckets
        for mode in bucket.modes
    )


def rows(model: str) -> list[str]:
    """A row of the table for every GPU, in milliseconds."""
    found = []
    for name, gpu in GPUS.items():
        work = plain_step(model, gpu.gigabytes)
        adamw = ADAMW_BYTES * sum(map(prod, named(model))) / gpu.bandwidth
        times = [
            adamw,
            seconds(work, gpu.float32, gpu.bandwidth),
            seconds(work, gpu.tf32, gpu.bandwidth),
            LAUNCH * sum(w.launches for w in work),
            all_bases(model) / gpu.float32,
        ]
        cells = [f"{1e3 * time:,.{1 if time < 0.1 else 0}f}" for time in times]
        found.append(f"| {model} | {name} | {' | '.join(cells)} |")
    return found


def memory(model: str) -> str:
    """A row with the state of AdamW and of EShampoo, in GB and in bytes per parameter."""
    count = sum(map(prod, named(model)))
    sizes = [8 * count]
    for options in STATES.values():
        buckets = EShampoo(without_memory(model), **options)._buckets
        stacks = [stack for bucket in buckets for stack in bucket.named().values()]
        sizes.append(sum(stack.numel() * stack.element_size() for stack in stacks))
    cells = [f"{size / 1e9:.1f} | {size / count:.1f}" for size in sizes]
    return f"| {model} | {count / 1e6:,.0f} | {' | '.join(cells)} |"


def main(*models: str) -> None:
    """Print the tables of docs/distributed.md."""
    models = models or ("vit_s", "llama-1b", "llama-8b")
    print("state: GB, and bytes per parameter\n")
    print("| model | million parameters | AdamW | | full | | lean | |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    print(*map(memory, models), sep="\n")
    print(f"\nmilliseconds, computed, not measured; torch {torch.__version__}\n")
    print("| model | GPU | AdamW, fused | plain step | plain step, TF32 | launches | all bases |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for model in models:
        print(*rows(model), sep="\n", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
