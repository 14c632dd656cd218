"""Stacked storage: blocks of the same shape share one tensor per kind of state."""

from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .blocks import Block, local
from .methods import Method
from .options import Options

if TYPE_CHECKING:
    from .layout import Exchange

HISTORY = 1000
"""How many checks of a factor are remembered with record=True."""

PART_BYTES = {"cpu": 1 << 21}
"""Stacks are worked on in parts of about this size, so that a part stays in the cache of a CPU …"""
PART_BYTES_DEFAULT = 1 << 28
"""… or bounds the transient memory on other devices."""


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

    def parts(self) -> Iterator[tuple[int, int]]:
        """Ranges of blocks that are worked on together."""
        stack = self.stacks.exp_avg
        budget = PART_BYTES.get(stack.device.type, PART_BYTES_DEFAULT)
        count = max(1, budget // (stack.element_size() * max(1, prod(self.shape))))
        for start in range(0, len(self.blocks), count):
            yield start, min(start + count, len(self.blocks))

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
                views = {
                    name: view.view(local(p).shape if name.startswith("exp_avg") else ())
                    for name, view in views.items()
                }
            yield p, {self.named_as(name, p): view for name, view in views.items()}

    def gather(self, start: int, stop: int, present: Sequence[bool]) -> Tensor:
        """The gradients of these blocks as one stack; zero where there is none."""
        G = torch.empty_like(self.stacks.exp_avg[start:stop])
        targets, sources = [], []
        for row, slot in zip(G.unbind(0), range(start, stop), strict=True):
            block = self.blocks[slot]
            grad = block.parameter.grad
            if present[slot] and grad is not None:
                targets.append(block.unmerged(row))
                sources.append(block.of(local(grad)))
            else:
                row.zero_()
        torch._foreach_copy_(targets, sources)
        return G

    def weights_and_rows(
        self, U: Tensor, start: int, present: Sequence[bool]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Of the blocks with a gradient: views in their parameters, and rows of a stack."""
        weights, rows = [], []
        for slot, row in enumerate(U.unbind(0), start):
            if present[slot]:
                block = self.blocks[slot]
                weights.append(block.of(local(block.parameter)))
                rows.append(block.unmerged(row))
        return weights, rows

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
