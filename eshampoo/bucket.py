"""Stacked storage: blocks of the same shape share one tensor per kind of state."""

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod

import torch
from torch import Tensor

from .blocks import Block
from .methods import Method
from .options import Options

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
            array("q", bytes(8 * count * modes)) for _ in range(3)
        )
        self.criterion = array("d", bytes(8 * count * modes))

    def named(self) -> dict[str, Tensor]:
        """The books under the names that they have in `state[p]`."""
        arrays: dict[str, array[int] | array[float]] = {
            "basis_checks": self.checks,
            "basis_computations": self.computations,
            "basis_failures": self.failures,
            "criterion": self.criterion,
        }
        dtypes = {"q": torch.int64, "d": torch.float64}
        return {
            name: torch.frombuffer(values, dtype=dtypes[values.typecode]).view(self.shape)
            for name, values in arrays.items()
        }


class Bucket:
    """Blocks of one param group with the same shape, modes, state dtype and device."""

    def __init__(
        self,
        group: int,
        blocks: Sequence[Block],
        modes: tuple[int, ...],
        method: Method,
        options: Options,
        like: Tensor,
    ) -> None:
        self.group = group
        self.options = options  # as they were when the state was laid out
        self.blocks = list(blocks)
        self.shape = blocks[0].shape
        self.modes = modes
        self.method = method if modes else method.without_basis()
        self.stacks = Stacks.zeros(len(blocks), self.shape, modes, self.method, options, like)
        self.books = Books(len(blocks), len(modes))
        self.history: dict[int, deque[tuple[int, float, bool]]] = {}
        # The host's idea of t: never behind the device, which does not count skipped gradients.
        self.clock = [int(self.stacks.step[0])] * len(blocks)

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

    def views(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Per parameter, its views of every stack; plain Adam's look like those of torch."""
        named = self.stacks.named() | (self.books.named() if self.modes else {})
        for p, run in groupby(range(len(self.blocks)), lambda slot: self.blocks[slot].parameter):
            slots = list(run)
            part = slice(slots[0], slots[-1] + 1)
            views = {name: stack[part] for name, stack in named.items()}
            if not self.modes:
                views = {
                    name: view.view(p.shape if name.startswith("exp_avg") else ())
                    for name, view in views.items()
                }
            yield p, views

    def gather(self, start: int, stop: int, present: Sequence[bool]) -> Tensor:
        """The gradients of these blocks as one stack; zero where there is none."""
        G = torch.empty_like(self.stacks.exp_avg[start:stop])
        targets, sources = [], []
        for row, slot in zip(G.unbind(0), range(start, stop), strict=True):
            grad = self.blocks[slot].parameter.grad
            if present[slot] and grad is not None:
                targets.append(row)
                sources.append(self.blocks[slot].of(grad))
            else:
                row.zero_()
        torch._foreach_copy_(targets, sources)
        return G

    def apply_(
        self, U: Tensor, moving: Tensor, start: int, stop: int, present: Sequence[bool], o: Options
    ) -> None:
        """W ← W − α (U + λW) for the blocks that move (decay after the update if bias_in_step)."""
        slots = [slot for slot in range(start, stop) if present[slot]]
        blocks = [self.blocks[slot] for slot in slots]
        rows = U.unbind(0)
        updates = [rows[slot - start] for slot in slots]
        if o.weight_decay != 0:
            if self.method.bias_in_step:
                U.mul_(1 - o.lr * o.weight_decay)
            weights = [block.of(block.parameter) for block in blocks]
            torch._foreach_add_(updates, weights, alpha=o.weight_decay)
        # Not a product with 0: a block that stands still may hold anything.
        still = ~moving.view(-1, *[1] * len(self.shape))
        U.mul_(-o.lr).masked_fill_(still, 0.0)
        whole = [_contiguous(block.parameter) for block in blocks]
        torch._foreach_add_([b.of(w) for b, w in zip(blocks, whole, strict=True)], updates)
        for block, weight in zip(blocks, whole, strict=True):
            if weight is not block.parameter:
                block.parameter.copy_(weight)

    def remember(self, entry: int, check: tuple[int, float, bool]) -> None:
        """Add (step, criterion, computed?) to the bounded history of a factor."""
        self.history.setdefault(entry, deque(maxlen=HISTORY)).append(check)

    def fresh(self) -> "Bucket":
        """An empty bucket for the same blocks."""
        return Bucket(
            self.group, self.blocks, self.modes, self.method, self.options, self.stacks.step[:0]
        )


def _contiguous(p: Tensor) -> Tensor:
    """The parameter itself if its blocks are views of it, else a copy to be written back."""
    return p if p.is_contiguous() else p.contiguous()


def named_views(buckets: Sequence[Bucket]) -> dict[Tensor, dict[str, Tensor]]:
    """Per parameter, its part of every stack, as `state[p]` shows it.

    A parameter with ragged blocks is in several buckets; the entries of its second, third, … kind
    of block carry a number.
    """
    state: dict[Tensor, dict[str, Tensor]] = {}
    kinds: dict[Tensor, int] = {}
    for bucket in buckets:
        for p, views in bucket.views():
            kind = kinds[p] = kinds.get(p, -1) + 1
            suffix = f".{kind}" if kind else ""
            state.setdefault(p, {}).update({name + suffix: v for name, v in views.items()})
    return state
