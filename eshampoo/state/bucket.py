"""Buckets: blocks of the same shape share one tensor per kind of state."""

from array import array
from collections import defaultdict, deque
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..options import Options
from ..sides import no_side
from .blocks import Kind, blocks_at_once, by_parameter
from .dtensor import extent
from .route import Part, Route
from .state import State

# How many checks of a factor are remembered with record=True.
HISTORY = 1000


# The counters of a factor, by their names in `state[p]`: whole numbers, and real ones.
COUNTED: dict[str, Any] = {
    "basis_checks": "q", "basis_computations": "q", "basis_failures": "q", "basis_waited": "q",
    "criterion": "d", "basis_work": "d", "basis_spent": "d",
}  # fmt: skip


class Counters:
    """What the host knows about each factor of N blocks.

    Plain arrays, quick to read and write one entry at a time at [block * modes + k]; `named` shows
    the same memory as tensors [N, modes].
    """

    def __init__(self, count: int, modes: int) -> None:
        self.shape = (count, modes)
        empty = bytes(8 * count * modes + 8)  # one entry too many: no tensor shares an empty array
        self.arrays = {name: array(kind, empty) for name, kind in COUNTED.items()}
        self.checks, self.computations, self.failures, self.waited = list(self.arrays.values())[:4]
        self.criterion, self.work, self.spent = list(self.arrays.values())[4:]
        # With record=True, (step, criterion, computed?) of the last checks of a factor.
        self.history: dict[int, Any] = defaultdict(lambda: deque(maxlen=HISTORY))

    def named(self) -> dict[str, Tensor]:
        """The counters under the names that they have in `state[p]`; none without factors."""
        dtypes = {"q": torch.int64, "d": torch.float64}
        return {
            name: torch.frombuffer(values, dtype=dtypes[values.typecode])[:-1].view(self.shape)
            for name, values in self.arrays.items()
            if self.shape[1] > 0
        }


class Bucket:
    """Blocks of one param group with the same row of the table, shape, modes, dtype and device.

    If ranks share the work, a bucket holds only the blocks that this rank owns, perhaps none.
    """

    def __init__(self, group: int, kind: Kind, options: Options, route: Route) -> None:
        self.group, self.method, self.shape, self.modes = group, *kind[:3]
        self.route = route
        # Whole parameters under element-wise Adam: their state has the layout of the parameter.
        self.elementwise = kind.row.sides is no_side
        self.blocks = [route.blocks[number] for number in route.mine]
        count = len(self.blocks)
        self.state = State.zeros(kind, options, count)
        self.memory = self.state.step.device, kind.dtype
        self.counters = Counters(count, len(kind.modes))
        # How many calls of step() and observe() each block has seen, as far as the host knows. The
        # device does not count skipped gradients, so the host may be ahead until it reads.
        self.clocks = {"step": [kind.row.start] * count, "observe": [0] * count}
        self.skipped = [0.0] * count  # as the host last read it
        # For each parameter: its blocks in the route, and the run of their positions in the stacks.
        self.numbers = by_parameter(route.blocks)
        self.positions = by_parameter(self.blocks)
        self.parameters = list(self.numbers)  # with blocks in this bucket, here or elsewhere
        self.several = any(block.total > 1 for block in route.blocks)  # blocks per parameter
        self.suffixes: Mapping[Tensor, str] = {}
        self.room = blocks_at_once(1, kind.device)  # bytes that are worked on at a time
        at_once = blocks_at_once(kind.dtype.itemsize * prod(kind.shape), kind.device)
        starts = range(0, count, at_once)
        self.parts = [Part(self.state, self.blocks, i, min(i + at_once, count)) for i in starts]

    def named(self) -> dict[str, Tensor]:
        """Everything that is kept about the blocks, by name."""
        return self.state.named() | self.counters.named()

    def named_as(self, name: str, p: Tensor) -> str:
        """The name of an entry in `state[p]`.

        A parameter with ragged blocks is in several buckets; the entries of its second, third, …
        bucket carry a number.
        """
        return name + self.suffixes.get(p, "")

    def reset_(self) -> None:
        """Take all blocks back to the state before their first gradient."""
        for stack in self.named().values():
            stack.zero_()
        self.state.start_at_(self.method.start)

    def set_clock(self) -> None:
        """After a write, tell the host t, and tell the state which bases have changed."""
        if self.state.step.is_meta:
            return  # nothing was written
        if self.modes:
            computed = self.counters.named()["basis_computations"].amax(1) > 0
            self.state.has_basis.copy_(computed)
        self.clocks["step"] = [int(t) for t in self.state.step.tolist()]
        if self.state.observations is not None:
            self.clocks["observe"] = [int(n) for n in self.state.observations.tolist()]
        self.skipped = self.state.skipped.tolist()
        self.counters.history.clear()


def entries(bucket: Bucket) -> dict[Tensor, dict[str, Tensor]]:
    """Per parameter, views of its state, under their names in `state[p]`.

    Without a basis, the views look like torch's state. A rank that owns no block of a parameter has
    empty views, so all ranks show the same names in the same order.
    """
    named, views = bucket.named(), {}
    for p in bucket.parameters:
        positions = bucket.positions.get(p)
        run = slice(positions[0], positions[-1] + 1) if positions else slice(0)
        own = {bucket.named_as(name, p): stack[run] for name, stack in named.items()}
        if bucket.elementwise:
            shape = extent(bucket.blocks[run.start].box)  # shorter than the padded row, perhaps
            for name, x in own.items():
                own[name] = x[0, : prod(shape)].view(shape) if x.dim() > 1 else x.view(())
        views[p] = own
    return views
