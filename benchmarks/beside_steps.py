"""Blocks of steps on request: what `benchmarks.beside` runs in a process of each source tree.

It is run as a file and imports torch and eshampoo alone: the measuring code is the same for every
tree, the library comes from the tree that PYTHONPATH names. The first line of its input describes
the work, every further line asks for a block of steps; each is answered by a line of JSON.
"""

import json
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import eshampoo

NEVER = 10**9
KINDS: dict[str, dict[str, float | None]] = {
    "plain": {"frequency": NEVER},
    "check": {"frequency": 1, "tau": 0.999},  # every factor is checked, none is due
    "refresh": {"frequency": 1, "tau": 0.0, "budget": None},  # every factor is due
}


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that compute something: all but views."""

    count = 0

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


class Worker:
    """EShampoo on random parameters; equal requests find equal numbers in every tree."""

    def __init__(self, shapes: list[list[int]], threads: int) -> None:
        torch.set_num_threads(threads)
        self.generator = torch.Generator().manual_seed(0)
        self.params: list[Tensor] = []
        for shape in shapes:
            p = torch.randn(shape, generator=self.generator).mul_(0.02).requires_grad_()
            p.grad = torch.empty_like(p)
            self.params.append(p)
        self.optimizer = eshampoo.EShampoo(self.params, frequency=NEVER)

    def set(self, kind: str) -> None:
        """Write into the param groups, which are read at every step."""
        for group in self.optimizer.param_groups:
            group.update(KINDS[kind])

    def count(self, kind: str) -> dict[str, Any]:
        """The operations of one step of a kind."""
        self.set(kind)
        with Counter() as counter:  # type: ignore[no-untyped-call]
            self.optimizer.step()
        return {"operations": counter.count}

    def block(self, kind: str, steps: int) -> dict[str, Any]:
        """Seconds of some steps of one kind on new gradients, and the bases that they computed.

        A plain step comes first and is not timed: it fills the caches again and outlasts threads
        of the other process that still wait for work.
        """
        for p in self.params:
            assert p.grad is not None
            p.grad.normal_(std=1e-2, generator=self.generator)
        self.set("plain")
        self.optimizer.step()
        self.set(kind)
        before = self.optimizer.basis_computations
        wall, cpu = [], []
        for _ in range(steps):
            begin, busy = time.perf_counter(), time.process_time()
            self.optimizer.step()
            wall.append(time.perf_counter() - begin)
            cpu.append(time.process_time() - busy)
        return {"wall": wall, "cpu": cpu, "bases": self.optimizer.basis_computations - before}


def answer(value: Mapping[str, object]) -> None:
    """One line to the parent."""
    print(json.dumps(value), flush=True)


def main() -> None:
    worker = Worker(**json.loads(sys.stdin.readline()))
    answer({"source": eshampoo.__file__})
    for line in sys.stdin:
        request = json.loads(line)
        answer(worker.block(**request) if "steps" in request else worker.count(**request))


if __name__ == "__main__":
    main()
