"""Buckets: blocks of the same shape share one tensor per kind of state."""

from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from math import prod

import torch
from torch import Tensor

from ..math.lean import like_storage
from ..methods import Method
from ..options import Options
from ..sides import no_side
from .blocks import blocks_at_once, by_parameter
from .route import Part, Route
from .state import RootedState, RotatedState

# How many checks of a factor are remembered with record=True.
HISTORY = 1000


class Counters:
    """What the host knows about each factor of N blocks.

    Plain arrays, quick to read and write one entry at a time at [block * modes + k]; `named` shows
    the same memory as tensors [N, modes].
    """

    def __init__(self, count: int, modes: int) -> None:
        self.shape = (count, modes)
        empty = bytes(8 * count * modes + 8)  # one entry too many: no tensor shares an empty array
        self.checks, self.computations, self.failures, self.waited = (
            array("q", empty) for _ in range(4)
        )
        self.criterion, self.work, self.spent = (array("d", empty) for _ in range(3))
        self.history: dict[int, deque[tuple[int, float, bool]]] = {}

    def named(self) -> dict[str, Tensor]:
        """The counters under the names that they have in `state[p]`; none without factors."""
        arrays: dict[str, array[int] | array[float]] = {
            "basis_checks": self.checks,
            "basis_computations": self.computations,
            "basis_failures": self.failures,
            "basis_waited": self.waited,
            "criterion": self.criterion,
            "basis_work": self.work,
            "basis_spent": self.spent,
        }
        dtypes = {"q": torch.int64, "d": torch.float64}
        return {
            name: torch.frombuffer(values, dtype=dtypes[values.typecode])[:-1].view(self.shape)
            for name, values in arrays.items()
            if self.shape[1] > 0
        }

    def checked(self, position: int) -> bool:
        """Whether the block has a basis: before its first check, Shampoo's graft works alone."""
        return self.checks[position * self.shape[1]] > 0

    def remember(self, entry: int, check: tuple[int, float, bool]) -> None:
        """Add (step, criterion, computed?) to the bounded history of a factor."""
        self.history.setdefault(entry, deque(maxlen=HISTORY)).append(check)


class Bucket:
    """Blocks of one param group with the same row of the table, shape, modes, dtype and device.

    If ranks share the work, a bucket holds only the blocks that this rank owns, perhaps none.
    """

    def __init__(
        self,
        group: int,
        method: Method,
        options: Options,
        shape: tuple[int, ...],
        modes: tuple[int, ...],
        route: Route,
        like: Tensor,
    ) -> None:
        self.group, self.method, self.shape, self.modes = group, method, shape, modes
        self.route = route
        # Whole parameters under element-wise Adam: their state has the layout of the parameter.
        self.elementwise = method.sides is no_side
        self.blocks = [route.blocks[number] for number in route.mine]
        count, kind = len(self.blocks), RotatedState if method.rotated else RootedState
        self.state = kind.zeros(method, options, count, shape, modes, like)
        self.counters = Counters(count, len(modes))
        # How many calls of step() and observe() each block has seen, as far as the host knows. The
        # device does not count skipped gradients, so the host may be ahead until it reads.
        self.clocks = {"step": [method.start] * count, "observe": [0] * count}
        self.skipped = [0] * count  # as the host last read it
        # For each parameter: its blocks in the route, and the run of their positions in the stacks.
        self.numbers = by_parameter(route.blocks)
        self.positions = by_parameter(self.blocks)
        self.several = any(block.total > 1 for block in route.blocks)  # blocks per parameter
        self.suffixes: Mapping[Tensor, str] = {}
        self.memory = like.device, like.dtype
        self.room = blocks_at_once(1, like.device)  # bytes that are worked on at a time
        at_once = blocks_at_once(like.element_size() * prod(shape), like.device)
        starts = range(0, count, at_once)
        self.parts = [Part(self.state, self.blocks, i, min(i + at_once, count)) for i in starts]

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters with blocks in this bucket, here or elsewhere."""
        return list(self.numbers)

    def named(self) -> dict[str, Tensor]:
        """Everything that is kept about the blocks, by name."""
        return self.state.named() | self.counters.named()

    def named_as(self, name: str, p: Tensor) -> str:
        """The name of an entry in `state[p]`.

        A parameter with ragged blocks is in several buckets; the entries of its second, third, …
        bucket carry a number.
        """
        return name + self.suffixes.get(p, "")

    def reset_(self, run: slice = slice(None)) -> None:
        """Take some blocks back to the state before their first gradient."""
        for stack in self.named().values():
            stack[run].zero_()
        self.state.step[run] = float(self.method.start)
        for by_mode in (self.state.bases, self.state.roots):
            for mode, stack in by_mode.items():
                eye = torch.eye(self.shape[mode], dtype=stack.dtype, device=stack.device)
                stack[run] = like_storage(eye.unsqueeze(0), stack)

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
        self.skipped = [int(count) for count in self.state.skipped.tolist()]
        self.counters.history.clear()


def entries(bucket: Bucket) -> Iterator[tuple[Tensor, str, Tensor]]:
    """Per parameter and kind of state: the parameter, the name in `state[p]`, and the view.

    Without a basis, the views look like torch's state. A rank that owns no block of a parameter has
    empty views, so all ranks show the same names in the same order.
    """
    named = bucket.named()
    for p in bucket.parameters:
        positions = bucket.positions.get(p)
        run = slice(positions[0], positions[-1] + 1) if positions else slice(0)
        for name, stack in named.items():
            view = stack[run]
            if bucket.elementwise:
                block = bucket.blocks[run.start]
                view = block.unmerged(view[0]) if view.dim() > 1 else view.view(())
            yield p, bucket.named_as(name, p), view
