"""What a step would cost a GPU, counted on a CPU: operations, reads by the host, float64.

    counts = count(optimizer.step)
    counts.reads, counts.times("bmm"), counts.products

`of_a_step` does so for a plain step of any method, or for one with a check.
"""

from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from keyword_table import METHODS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from training import feed, parameters, problem, run

# Methods by which Python waits for a device; on a CPU some of them dispatch nothing.
READS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "numpy")
PRODUCTS = ("bmm", "mm", "baddbmm", "addmm", "matmul")


@dataclass
class Counts:
    """What an action did."""

    reads: list[str] = field(default_factory=list)  # by the host, in order
    uploads: list[str] = field(default_factory=list)  # tensors made from Python's numbers
    operations: list[str] = field(default_factory=list)  # dispatched, in order, without views
    doubles: list[str] = field(default_factory=list)  # operations that made a float64 tensor

    def times(self, name):
        """How often an operation was dispatched."""
        return sum(operation.split(".")[1] == name for operation in self.operations)

    @property
    def products(self):
        """Products of matrices, a batch of them counted once."""
        return sum(map(self.times, PRODUCTS))


class Watch(TorchDispatchMode):
    """Sees every operation that is dispatched."""

    def __init__(self, counts):
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = str(func)  # aten.bmm.default
        if name.startswith("aten._local_scalar_dense"):
            self.counts.reads.append(name)
        elif name.startswith("aten.lift_fresh"):
            self.counts.uploads.append(name)
        elif not func.is_view:
            self.counts.operations.append(name)
        made = out if isinstance(out, list | tuple) else [out]
        if any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in made):
            self.counts.doubles.append(name)
        return out


@contextmanager
def reads_noted(counts):
    """Count the outermost call of every method that reads a tensor."""
    originals = {name: getattr(Tensor, name) for name in READS}
    depth = 0

    def noting(name, original):
        def read(self, *args):
            nonlocal depth
            depth += 1
            before = len(counts.reads)
            try:
                value = original(self, *args)
            finally:
                depth -= 1
            # `item` also dispatches: one read, counted once.
            del counts.reads[before:]
            if depth == 0:
                counts.reads.append(name)
            return value

        return read

    for name, original in originals.items():
        setattr(Tensor, name, noting(name, original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(Tensor, name, original)


def count(action):
    """Do it, and count."""
    counts = Counts()
    with reads_noted(counts), Watch(counts):
        action()
    return counts


def flops(action):
    """Do it, and count its floating-point operations."""
    with FlopCounterMode(display=False) as counter:
        action()
    return counter.get_total_flops()


def of_a_step(measure, method, check, tau=1.0, shape=(12, 20), **options):
    """Measure a plain step, or one with a check; `measure` is one of the two above."""
    tensors, grads = problem([shape], 9)
    params = parameters(tensors)
    common = {"merge_dims": False, "lr": 1e-2, "betas": (0.9, 0.9)}
    optimizer = METHODS[method](params, frequency=4, tau=tau, **{**common, **options})
    observing = method == "SOAP"  # its first gradient is not counted
    run(optimizer, params, grads[: (7 if check else 5) + observing])
    feed(params, grads[8])
    found = measure(optimizer.step)
    assert optimizer.basis_report()[0].checks == (2 if check else 1) + observing
    return found
