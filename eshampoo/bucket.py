"""Stacked storage: blocks of the same shape share one tensor per kind of state."""

from array import array
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .blocks import Block, extent, local
from .linalg import off_diagonal
from .methods import Method
from .options import Options

if TYPE_CHECKING:
    from .layout import Exchange

HISTORY = 1000
"""How many checks of a factor are remembered with record=True."""

THREAD_BYTES = 1 << 20
"""Stacks are worked on in parts of about this size per thread, to stay in the cache of a CPU …"""
PART_BYTES = 1 << 28
"""… or of this size on other devices, to bound the transient memory."""


def together(size: int, device: torch.device) -> int:
    """How many blocks of `size` bytes are worked on at a time.

    On a CPU as many for each thread: a batch of products runs side by side, one product per thread.
    """
    if device.type == "cpu":
        return max(1, THREAD_BYTES // max(1, size)) * torch.get_num_threads()
    return max(1, PART_BYTES // max(1, size))


@dataclass
class Stacks:
    """The state of N blocks of shape (d_1, …, d_k); dictionaries are keyed by mode."""

    step: Tensor  # [N]: t
    skipped: Tensor  # [N]: gradients that were not finite
    exp_avg: Tensor  # [N, d_1, …, d_k]: M̃, in the eigenbasis if the method is rotated
    exp_avg_sq: Tensor | None  # [N, d_1, …, d_k]: D, or the second moment of the grafting method
    factors: dict[int, Tensor]  # [N, d_i, d_i]: Λ̂_i = Q_iᵀ L_i Q_i if rotated, else L_i
    bases: dict[int, Tensor]  # [N, d_i, d_i]: Q_i
    roots: dict[int, Tensor]  # [N, d_i, d_i]: L_i^{-p}, if not rotated
    full: Tensor | None  # [N, ∏d, ∏d]: QᵀAQ, for correction="optimal"

    @classmethod
    def zeros(
        cls,
        count: int,
        shape: tuple[int, ...],
        modes: tuple[int, ...],
        method: Method,
        options: Options,
        like: Tensor,
    ) -> "Stacks":
        """State before the first gradient: everything zero, Q = I."""
        optimal = options.correction == "optimal" and len(modes) > 0
        moment = (method.second_moment and not optimal) or (
            not method.rotated and options.graft_moment
        )
        numel = prod(shape)

        def eyes() -> dict[int, Tensor]:
            return {
                i: torch.eye(shape[i], dtype=like.dtype, device=like.device).repeat(count, 1, 1)
                for i in modes
            }

        return cls(
            step=like.new_full((count,), -1.0 if method.delayed else 0.0),
            skipped=like.new_zeros(count),
            exp_avg=like.new_zeros(count, *shape),
            exp_avg_sq=like.new_zeros(count, *shape) if moment else None,
            factors={i: like.new_zeros(count, shape[i], shape[i]) for i in modes},
            bases=eyes(),
            roots={} if method.rotated else eyes(),
            # With one mode, A is the factor itself.
            full=like.new_zeros(count, numel, numel) if optimal and len(shape) > 1 else None,
        )

    @cached_property
    def transposed(self) -> dict[int, Tensor]:
        """Views Q_iᵀ."""
        return {mode: Q.transpose(1, 2) for mode, Q in self.bases.items()}

    @cached_property
    def diagonals(self) -> dict[int, Tensor]:
        """Views diag Λ̂_i [N, d_i]."""
        return {mode: A.diagonal(dim1=1, dim2=2) for mode, A in self.factors.items()}

    @cached_property
    def off_diagonals(self) -> dict[int, Tensor]:
        """Views of the rest of Λ̂_i [N, d_i − 1, d_i]."""
        return {mode: off_diagonal(A) for mode, A in self.factors.items()}

    def named(self) -> dict[str, Tensor]:
        """Every stack under the name that it has in `state[p]`."""
        named = {"step": self.step, "skipped": self.skipped, "exp_avg": self.exp_avg}
        if self.exp_avg_sq is not None:
            named["exp_avg_sq"] = self.exp_avg_sq
        for name, by_mode in (
            ("factor", self.factors),
            ("basis", self.bases),
            ("root", self.roots),
        ):
            named |= {f"{name}_{mode}": stack for mode, stack in by_mode.items()}
        if self.full is not None:
            named["full_matrix"] = self.full
        return named

    def narrow(self, start: int, stop: int) -> "Stacks":
        """Views of the blocks from `start` to `stop`."""
        part = slice(start, stop)

        def each(by_mode: dict[int, Tensor]) -> dict[int, Tensor]:
            return {mode: stack[part] for mode, stack in by_mode.items()}

        return replace(
            self,
            step=self.step[part],
            skipped=self.skipped[part],
            exp_avg=self.exp_avg[part],
            exp_avg_sq=None if self.exp_avg_sq is None else self.exp_avg_sq[part],
            factors=each(self.factors),
            bases=each(self.bases),
            roots=each(self.roots),
            full=None if self.full is None else self.full[part],
        )


class Books:
    """What the host knows of each factor of N blocks.

    Plain arrays, quick to read and write one entry at a time at [block * modes + k]; `named` shows
    the same memory as tensors [N, modes].
    """

    def __init__(self, count: int, modes: int) -> None:
        self.shape = (count, modes)
        self.checks, self.computations, self.failures = (
            array("q", bytes(8 * count * modes + 8)) for _ in range(3)
        )  # one entry too many, because a tensor cannot share an empty array
        self.criterion, self.work = (array("d", bytes(8 * count * modes + 8)) for _ in range(2))

    def named(self) -> dict[str, Tensor]:
        """The books under the names that they have in `state[p]`."""
        arrays: dict[str, array[int] | array[float]] = {
            "basis_checks": self.checks,
            "basis_computations": self.computations,
            "basis_failures": self.failures,
            "criterion": self.criterion,
            "basis_work": self.work,
        }
        dtypes = {"q": torch.int64, "d": torch.float64}
        return {
            name: torch.frombuffer(values, dtype=dtypes[values.typecode])[:-1].view(self.shape)
            for name, values in arrays.items()
        }


class Part:
    """Blocks of a bucket that are worked on together, and views of their state, made once."""

    def __init__(self, bucket: "Bucket", start: int, stop: int) -> None:
        self.bucket, self.start, self.stop = bucket, start, stop
        self.stacks = bucket.stacks.narrow(start, stop)
        self.blocks = bucket.blocks[start:stop]
        self.shapes = [extent(block.box) for block in self.blocks]
        sizes, room = [prod(shape) for shape in self.shapes], prod(bucket.shape)
        # Vectors that are shorter than the rows of their stack have zeros behind them.
        self.padded = any(size < room for size in sizes)
        self.cuts = [length for size in sizes for length in (size, room - size)]

    def alone(self) -> "Wave":
        """This part as a wave of its own."""
        return Wave(self.stacks.step, self.stacks.skipped, [self])

    def rows(self, X: Tensor) -> list[Tensor]:
        """What belongs to each block in a stack, as it lies in the parameter."""
        # One operation for all: vector, rest, vector, rest, …
        rows = torch.split(X.view(-1), self.cuts)[::2] if self.padded else X.unbind(0)
        pairs = zip(rows, self.shapes, strict=True)
        return [row if row.shape == shape else row.view(shape) for row, shape in pairs]

    def cut(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """Of tensors that lie like the parameters, what belongs to each block."""
        pairs = zip(self.blocks, tensors, strict=True)
        return [block.of(local(X)) for block, X in pairs if X is not None]

    def gather_(self, G: Tensor, present: Sequence[bool]) -> None:
        """Write the gradients into a stack; zero where there is none."""
        if self.padded or not all(present):
            G.zero_()
        grads = [block.parameter.grad for block in self.blocks]
        torch._foreach_copy_(list(compress(self.rows(G), present)), self.cut(grads))


class Wave(NamedTuple):
    """Parts that are admitted to a step together: what is known per block is computed once.

    Small operations take as long on one block as on a thousand.
    """

    step: Tensor  # [N], of all their blocks
    skipped: Tensor  # [N]
    parts: list[Part]
    arriving: "Bucket | None" = None  # its gradients come from other ranks, and must be there


class Bucket:
    """Blocks of one param group with the same shape, modes, state dtype and device.

    With an exchange, those that this rank owns; there may be none.
    """

    def __init__(
        self,
        group: int,
        blocks: Sequence[Block],
        shape: tuple[int, ...],
        modes: tuple[int, ...],
        kinds: Mapping[Tensor, int],
        method: Method,
        options: Options,
        like: Tensor,
        exchange: "Exchange | None" = None,
    ) -> None:
        self.group = group
        self.blocks = list(blocks)
        self.shape, self.modes = shape, modes
        self.kinds = kinds  # per parameter, which of its kinds of block these are
        self.method = method if modes else method.without_basis()
        self.exchange = exchange
        # Whether any parameter has further blocks, here or elsewhere.
        self.several = any(block.total > 1 for block in self.every)
        self.stacks = Stacks.zeros(len(blocks), shape, modes, self.method, options, like)
        self.books = Books(len(blocks), len(modes))
        self.history: dict[int, deque[tuple[int, float, bool]]] = {}
        self.buffers: dict[int, Tensor] = {}  # for gradients, by the first block of a part
        # The host's idea of t: never behind the device, which does not count skipped gradients.
        self.clock = [-1 if method.delayed else 0] * len(blocks)
        self.skipped = [0] * len(blocks)  # as of the last time that the host read anything

    @property
    def every(self) -> list[Block]:
        """The blocks of all ranks."""
        return self.blocks if self.exchange is None else self.exchange.blocks

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters with blocks of this kind, owned or not."""
        return list(self.kinds)

    def entry(self, slot: int, mode: int) -> int:
        """Where the books write about this factor."""
        return slot * len(self.modes) + self.modes.index(mode)

    def checked(self, slot: int) -> bool:
        """Whether the block has a basis: before its first check, Shampoo's graft works alone."""
        return self.books.checks[slot * len(self.modes)] > 0

    @property
    def nbytes(self) -> int:
        """The size of a block."""
        return self.stacks.exp_avg.element_size() * prod(self.shape)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Buckets that agree in this can be admitted together."""
        s = self.stacks
        return self.method, s.step.device, s.step.dtype, s.exp_avg_sq is None, self.exchange

    def parts(self) -> list[Part]:
        """The blocks, some at a time."""
        count, blocks = together(self.nbytes, self.stacks.step.device), len(self.blocks)
        return [Part(self, i, min(i + count, blocks)) for i in range(0, blocks, count)]

    def named(self) -> dict[str, Tensor]:
        """Everything that is kept about the blocks, by name."""
        return self.stacks.named() | (self.books.named() if self.modes else {})

    def slots(self, p: Tensor) -> list[int]:
        """Where the blocks of a parameter stand: a run."""
        return [slot for slot, block in enumerate(self.blocks) if block.parameter is p]

    def named_as(self, name: str, p: Tensor) -> str:
        """The name of an entry in `state[p]`.

        A parameter with ragged blocks is in several buckets; the entries of its second, third, …
        kind of block carry a number.
        """
        return f"{name}.{self.kinds[p]}" if self.kinds[p] else name

    def views(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Per parameter, its views of every stack; plain Adam's look like those of torch."""
        named = self.named()
        for p in self.parameters:
            slots = self.slots(p)
            views = {
                n: stack[slots[0] : slots[-1] + 1] if slots else stack[:0]
                for n, stack in named.items()
            }
            if not self.modes:
                block = self.blocks[slots[0]]
                views = {
                    name: block.unmerged(view[0]) if name.startswith("exp_avg") else view.view(())
                    for name, view in views.items()
                }
            yield p, {self.named_as(name, p): view for name, view in views.items()}

    def remember(self, entry: int, check: tuple[int, float, bool]) -> None:
        """Add (step, criterion, computed?) to the bounded history of a factor."""
        self.history.setdefault(entry, deque(maxlen=HISTORY)).append(check)

    def reset_(self) -> None:
        """Back to the state before the first gradient."""
        for stack in self.named().values():
            stack.zero_()
        self.stacks.step.fill_(-1.0 if self.method.delayed else 0.0)
        for by_mode in (self.stacks.bases, self.stacks.roots):
            for stack in by_mode.values():
                stack.copy_(torch.eye(stack.shape[1], dtype=stack.dtype, device=stack.device))

    def set_clock(self) -> None:
        """Let the host know t after the state was written."""
        self.clock = [int(t) for t in self.stacks.step.tolist()]
        self.skipped = [int(count) for count in self.stacks.skipped.tolist()]
        self.history.clear()


def waves(buckets: Sequence[Bucket]) -> list[Wave]:
    """Cut the buckets of one param group into parts, and join the parts that are small."""
    alike: dict[tuple[Any, ...], list[Bucket]] = defaultdict(list)
    for bucket in buckets:
        alike[bucket.kind].append(bucket)
    found: list[Wave] = []
    for same in alike.values():
        # From now on the counts of neighbours lie next to each other.
        step = torch.cat([bucket.stacks.step for bucket in same])
        skipped = torch.cat([bucket.stacks.skipped for bucket in same])
        sizes = [len(bucket.blocks) for bucket in same]
        counts = zip(same, torch.split(step, sizes), torch.split(skipped, sizes), strict=True)
        for bucket, its_step, its_skipped in counts:
            bucket.stacks.step, bucket.stacks.skipped = its_step, its_skipped
        found += _joined(same, step, skipped)
    return found


def _joined(same: Sequence[Bucket], step: Tensor, skipped: Tensor) -> Iterator[Wave]:
    arriving = same[0] if same[0].exchange is not None else None
    room = together(1, step.device)
    parts: list[Part] = []
    done = size = 0
    for part in [part for bucket in same for part in bucket.parts()]:
        nbytes = (part.stop - part.start) * part.bucket.nbytes
        if parts and size + nbytes > room:
            stop = done + sum(p.stop - p.start for p in parts)
            yield Wave(step[done:stop], skipped[done:stop], parts, arriving)
            parts, done, size, arriving = [], stop, 0, None
        parts.append(part)
        size += nbytes
    yield Wave(step[done:], skipped[done:], parts, arriving)
