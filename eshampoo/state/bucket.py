"""Buckets: blocks of the same shape share one tensor per kind of state."""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..math.triangle import in_form
from ..methods import Method
from ..options import Options
from .blocks import Local, Part, Route, by_parameter, extent, is_sharded, together
from .cutting import no_side
from .state import Counters, State, moment_shape

# The most memory that small entries of a `state_dict` share: an entry that is kept or saved alone
# brings no more than this along.
SHARED_BYTES = 1 << 20


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
        count = len(self.blocks)
        observed = modes and options.statistics == "observe"
        keeps = method.keeps(options) + (("observations",) if observed else ())
        moment = shape if self.elementwise else moment_shape(shape, options.moment)
        home, start = method.home, method.start
        lean = options.state == "lean" and len(modes) > 0
        self.state = State.zeros(home, keeps, start, count, shape, moment, modes, like, lean)
        self.counters = Counters(count, len(modes))
        # The host's idea of t, and of the count of observations: never behind the device, which
        # does not count skipped gradients.
        self.clocks = {"step": [method.start] * count, "observe": [0] * count}
        self.skipped = [0] * count  # as the host last read it
        # For each parameter: its blocks in the route, and the run of their positions in the stacks.
        self.numbers = by_parameter(route.blocks)
        self.positions = by_parameter(self.blocks)
        self.several = any(block.total > 1 for block in route.blocks)  # blocks per parameter
        self.suffixes: Mapping[Tensor, str] = {}
        # Whether other ranks have a part in the state or in the parameters.
        self.spread = route.team is not None or any(map(is_sharded, self.numbers))

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters with blocks in this bucket, here or elsewhere."""
        return list(self.numbers)

    @property
    def nbytes(self) -> int:
        """The size of a block in bytes."""
        return self.state.step.element_size() * prod(self.shape)

    @property
    def memory(self) -> tuple[torch.device, torch.dtype]:
        """The device and the dtype of the state."""
        return self.state.step.device, self.state.step.dtype

    @cached_property
    def extents(self) -> list[tuple[int, ...]]:
        """The shape of each block in its parameter."""
        return [extent(block.box) for block in self.blocks]

    def parts(self) -> list[Part]:
        """The blocks, cut into parts."""
        count, blocks = together(self.nbytes, self.state.step.device), len(self.blocks)
        starts = range(0, blocks, count)
        return [Part(self.state, self.blocks, i, min(i + count, blocks)) for i in starts]

    # ---------------------------------------------------------------- what users see

    def named(self) -> dict[str, Tensor]:
        """Everything that is kept about the blocks, by name."""
        return self.state.named() | self.counters.named()

    def named_as(self, name: str, p: Tensor) -> str:
        """The name of an entry in `state[p]`.

        A parameter with ragged blocks is in several buckets; the entries of its second, third, …
        bucket carry a number.
        """
        return name + self.suffixes.get(p, "")

    def views(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Per parameter, its views of every stack; without a basis, they look like torch's state.

        A rank that owns no block of a parameter has empty views, so all ranks show the same names.
        """
        named = self.named()
        for p in self.parameters:
            positions = self.positions.get(p)
            run = slice(positions[0], positions[-1] + 1) if positions else slice(0)
            views = {name: stack[run] for name, stack in named.items()}
            if self.elementwise:
                block = self.blocks[run.start]
                views = {
                    name: block.unmerged(view[0]) if view.dim() > 1 else view.view(())
                    for name, view in views.items()
                }
            yield p, {self.named_as(name, p): view for name, view in views.items()}

    def copies(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Like `views`, but copies; no other rank has a part in this bucket."""
        named = self.named()
        counts = [len(positions) for positions in self.positions.values()]
        shapes = self.extents if self.elementwise else None
        columns = [_copies(stack, counts, shapes) for stack in named.values()]
        for p, values in zip(self.positions, zip(*columns, strict=True), strict=True):
            suffix = self.suffixes.get(p, "")
            names = [name + suffix for name in named] if suffix else named
            yield p, dict(zip(names, values, strict=True))

    # ---------------------------------------------------------------- state that was written

    def reset_(self) -> None:
        """Go back to the state before the first gradient."""
        for stack in self.named().values():
            stack.zero_()
        self.state.step.fill_(float(self.method.start))
        for by_mode in (self.state.bases, self.state.roots):
            for mode, stack in by_mode.items():
                eye = torch.eye(self.shape[mode], dtype=stack.dtype, device=stack.device)
                stack.copy_(in_form(eye.unsqueeze(0), stack))

    def set_clock(self) -> None:
        """After a write, tell the host t, and tell the state which bases have changed."""
        if self.state.step.is_meta:
            return  # nothing was written
        if self.modes:
            computed = self.counters.named()["basis_computations"].amax(1) > 0
            self.state.turned.copy_(computed)
        self.clocks["step"] = [int(t) for t in self.state.step.tolist()]
        if self.state.observations is not None:
            self.clocks["observe"] = [int(n) for n in self.state.observations.tolist()]
        self.skipped = [int(count) for count in self.state.skipped.tolist()]


def _copies(
    stack: Tensor, counts: list[int], shapes: Sequence[tuple[int, ...]] | None
) -> list[Tensor]:
    """Copies of runs of rows, as long as `counts` says, or of a row's first entries, in `shapes`.

    Small ones are copied together: copying each by itself takes four times as long.
    """
    nbytes = stack.numel() * stack.element_size() // len(counts)
    many = max(1, SHARED_BYTES // max(1, nbytes))
    found: list[Tensor] = []
    first = 0
    for start in range(0, len(counts), many):
        run = counts[start : start + many]
        rows = stack[first : first + sum(run)]
        first += sum(run)
        if shapes is None:
            found += torch.unsafe_split_with_sizes(rows.clone(), run)
        else:
            found += _first_entries(rows, shapes[start : start + many])
    return found


def _first_entries(rows: Tensor, shapes: Sequence[tuple[int, ...]]) -> Sequence[Tensor]:
    """Copies of the first entries of each row, in the shape of its parameter; or of numbers."""
    if rows.dim() == 1:
        return rows.clone().unbind(0)
    sizes, room = [prod(shape) for shape in shapes], rows[0].numel()
    if len(set(shapes)) == 1:
        kept = rows.flatten(1)[:, : sizes[0]].clone(memory_format=torch.contiguous_format)
        return kept.view(-1, *shapes[0]).unbind(0)
    # One operation for all: entries, padding, entries, padding, …
    lengths = [length for size in sizes for length in (size, room - size)]
    kept = torch.cat(torch.split(rows.reshape(-1), lengths)[::2])
    pieces = zip(torch.split(kept, sizes), shapes, strict=True)
    return [piece.view(shape) for piece, shape in pieces]


class Batch(NamedTuple):
    """Parts that are admitted to a step together: what is known per block is computed once.

    Small operations take as long on one block as on a thousand.
    """

    step: Tensor  # [N], of all their blocks
    skipped: Tensor  # [N]
    observations: Tensor | None  # [N], if the parts belong to one bucket that is observed
    parts: list[tuple[Bucket, Part]]

    def alone(self) -> "list[Batch]":
        """Every part as a batch of its own."""
        states = [part.state for _, part in self.parts]
        return [
            Batch(s.step, s.skipped, s.observations, [pair])
            for s, pair in zip(states, self.parts, strict=True)
        ]


Histories = dict[tuple[Tensor, int, int], deque[tuple[int, float, bool]]]


def remembered(buckets: Sequence[Bucket]) -> Histories:
    """The history of every factor, by parameter, block and mode."""
    found = {}
    for bucket in buckets:
        for entry, history in bucket.counters.history.items():
            position, k = divmod(entry, len(bucket.modes))
            block = bucket.blocks[position]
            found[block.parameter, block.number, k] = history
    return found


def remember_(
    buckets: Sequence[Bucket], histories: Histories, heir_of: Mapping[Tensor, Tensor]
) -> None:
    """Give factors the history of the factors that they replace."""
    for bucket in buckets if histories else ():
        for position, block in enumerate(bucket.blocks):
            for k in range(len(bucket.modes)):
                heir = heir_of.get(block.parameter)
                if heir is not None and (heir, block.number, k) in histories:
                    history = histories[heir, block.number, k]
                    bucket.counters.history[position * len(bucket.modes) + k] = history


def suffix_(buckets: Sequence[Bucket]) -> None:
    """Number the buckets of each parameter that has blocks in several."""
    seen: dict[Tensor, int] = defaultdict(int)
    for bucket in buckets:
        bucket.suffixes = {p: f".{seen[p]}" for p in bucket.parameters if seen[p]}
        for p in bucket.parameters:
            seen[p] += 1


def batches(buckets: Sequence[Bucket]) -> list[Batch]:
    """Cut the buckets of one param group into parts, and join the parts that are small."""
    joint: dict[tuple[Any, ...], list[Bucket]] = defaultdict(list)
    for bucket in buckets:
        # Coefficients depend on this key; gradients from other ranks arrive bucket by bucket.
        shares = isinstance(bucket.route, Local) and bucket.state.observations is None
        alone, row = None if shares else bucket, bucket.method
        key = row.moves, row.epsilon, bucket.memory, bucket.state.exp_avg_sq is None, alone
        joint[key].append(bucket)
    found: list[Batch] = []
    for same in joint.values():
        # From now on the counts of neighbours lie next to each other.
        step = torch.cat([bucket.state.step for bucket in same])
        skipped = torch.cat([bucket.state.skipped for bucket in same])
        sizes = [len(bucket.blocks) for bucket in same]
        counts = zip(same, torch.split(step, sizes), torch.split(skipped, sizes), strict=True)
        for bucket, its_step, its_skipped in counts:
            bucket.state.step, bucket.state.skipped = its_step, its_skipped
        found += _joined(same, step, skipped)
    return found


def _joined(same: Sequence[Bucket], step: Tensor, skipped: Tensor) -> list[Batch]:
    """Batches of parts that are next to each other and small enough to be admitted together."""
    room, sizes = together(1, step.device), [0]
    joined: list[list[tuple[Bucket, Part]]] = [[]]
    for bucket in same:
        for part in bucket.parts():
            nbytes = (part.stop - part.start) * bucket.nbytes
            if joined[-1] and sizes[-1] + nbytes > room:
                joined.append([])
                sizes.append(0)
            joined[-1].append((bucket, part))
            sizes[-1] += nbytes
    counts = [sum(part.stop - part.start for _, part in parts) for parts in joined]
    observations = same[0].state.observations
    seen = [None] * len(counts) if observations is None else torch.split(observations, counts)
    steps, skips = torch.split(step, counts), torch.split(skipped, counts)
    return [Batch(*views) for views in zip(steps, skips, seen, joined, strict=True)]
