"""Blocks of parameters, the parts in which they are worked on, and the route of their gradients."""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import compress
from math import prod, sqrt
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import Tensor

from ..math.at_once import at_once, call
from ..math.foreach import foreach_add_, foreach_copy_, foreach_norm
from ..math.linalg import BITS
from .state import State

# A rectangle in a parameter: one slice per dimension, with start and stop.
Box = tuple[slice, ...]

# Parameter, mode, and how often in a row no basis could be computed for this factor.
Failure = tuple[Tensor, int, int]

# Stacks are worked on in parts of about this size per thread, to stay in the cache of a CPU …
THREAD_BYTES = 1 << 20
# … or of this size on other devices, to bound the transient memory.
PART_BYTES = 1 << 28


class Block(NamedTuple):
    """One block of one parameter."""

    parameter: Tensor
    number: int  # among the blocks of its parameter
    total: int  # number of blocks of its parameter
    box: Box
    shape: tuple[int, ...]  # with merged dimensions
    phase: float = 0.0  # the share of the gap by which its checks come earlier, with stagger

    def of(self, tensor: Tensor) -> Tensor:
        """A view of this block in a tensor that is laid out like the parameter."""
        held = local(tensor)
        return held if self.total == 1 else held[self.box]

    def unmerged(self, row: Tensor) -> Tensor:
        """The entries of this block in a row of a stack, with the dimensions of the parameter."""
        shape = extent(self.box)
        if row.shape == shape:
            return row
        size = prod(shape)
        return (row if row.numel() == size else row[:size]).view(shape)


def extent(box: Box) -> tuple[int, ...]:
    """The shape of a rectangle."""
    return tuple(span.stop - span.start for span in box)


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a DTensor; none exists until their module, slow to import, is loaded."""
    if type(tensor) is Tensor:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor; for a DTensor, all ranks must call this."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def held_sizes(params: Sequence[Tensor]) -> Tensor:
    """‖G‖ of what this rank holds of each gradient, in units of √max [P].

    From 1 on, squares overflow. It is 0 without a gradient, and NaN or Inf for one that is not
    finite.
    """
    held = [local(p).new_zeros(1) if p.grad is None else local(p.grad) for p in params]
    # In the precision of the state.
    held = [g.to(torch.promote_types(g.dtype, torch.float32)) for g in held]
    norms = foreach_norm([g if g.numel() > 0 else g.new_zeros(1) for g in held])
    place = held[0].device
    return torch.stack([n.to(place, torch.float64) / sqrt(torch.finfo(n.dtype).max) for n in norms])


def called(p: Tensor, names: Mapping[Tensor, str]) -> str:
    """What a message calls a parameter."""
    shape = f"shape {tuple(p.shape)}"
    return f"parameter {names[p]!r} ({shape})" if p in names else f"a parameter of {shape}"


def by_parameter(blocks: Sequence[Block]) -> dict[Tensor, list[int]]:
    """The numbers of the blocks of each parameter, which are consecutive."""
    found: dict[Tensor, list[int]] = {}
    for number, block in enumerate(blocks):
        found.setdefault(block.parameter, []).append(number)
    return found


# -------------------------------------------------------------------- parts


def together(size: int, device: torch.device) -> int:
    """How many blocks of `size` bytes are worked on at a time.

    On a CPU every thread gets the same number of blocks: a batch of products runs side by side, one
    product per thread.
    """
    if device.type == "cpu":
        return max(1, THREAD_BYTES // max(1, size)) * torch.get_num_threads()
    return max(1, PART_BYTES // max(1, size))


class Part:
    """Blocks of a bucket that are worked on together, and views of their state, made once."""

    def __init__(self, state: State, blocks: Sequence[Block], start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self.state = state.narrow(start, stop)
        self.blocks = blocks[start:stop]
        self.parameters = [block.parameter for block in self.blocks]
        self.shapes = [extent(block.box) for block in self.blocks]
        # Whether every block is a whole parameter, as nearly all are: then nothing is cut.
        self.whole = all(block.total == 1 for block in self.blocks)
        self.whole = self.whole and not any(map(is_sharded, self.parameters))
        sizes, room = [prod(shape) for shape in self.shapes], prod(state.exp_avg.shape[1:])
        # Vectors that are shorter than the rows of their stack are padded with zeros.
        self.padded = any(size < room for size in sizes)
        self.lengths = [length for size in sizes for length in (size, room - size)]
        # Whether the blocks have the shape of their rows, as nearly all have.
        block = state.exp_avg.shape[1:]
        self.alike = self.shapes == [(size,) if self.padded else block for size in sizes]
        self._buffer: Tensor | None = None

    def buffer(self, stays: bool) -> Tensor:
        """Memory for the gradients; allocating it at every step costs a CPU 3 % of the step."""
        s, found = self.state, self._buffer
        found = torch.empty_like(s.exp_avg, dtype=s.step.dtype) if found is None else found
        self._buffer = found if stays else None
        return found

    def rows(self, X: Tensor) -> list[Tensor]:
        """The entries of each block in a stack, in the shape that they have in the parameter."""
        # One operation for all: vector, padding, vector, padding, …
        rows = torch.split(X.view(-1), self.lengths)[::2] if self.padded else X.unbind(0)
        if self.alike:
            return list(rows)
        return [row.view(shape) for row, shape in zip(rows, self.shapes, strict=True)]

    def cut(self, tensors: list[Tensor], here: list[bool]) -> list[Tensor]:
        """The blocks `here`, cut from tensors that are laid out like their parameters."""
        pairs = zip(compress(self.blocks, here), tensors, strict=True)
        return tensors if self.whole else [block.of(tensor) for block, tensor in pairs]


def scale_(U: Tensor, pace: Tensor, moving: Tensor) -> None:
    """U ← pace · U; for blocks that stand still −0.0, which changes no bit of what it is added to.

    Their `pace` [N, 1] is −0.0.
    """
    bits, U = BITS[U.dtype], U.view(len(U), -1)
    U.view(bits).mul_(moving.to(bits))
    U.mul_(pace)


class Move(NamedTuple):
    """How the parameters of a part take its updates: W ← W + pace (U + λW)."""

    pace: Tensor  # [N, 1]
    moving: Tensor  # [N, 1], the blocks that move
    here: list[bool]  # the blocks that have a gradient
    decay: float  # λ
    note: partial[Any]  # called right after the last write, to note that the part has moved


class Route(Protocol):
    """How gradients reach the blocks of a bucket, and how updates reach the parameters."""

    # All blocks of the bucket, whichever rank works on them.
    @property
    def blocks(self) -> list[Block]: ...
    # Which of the blocks are worked on here.
    @property
    def mine(self) -> Sequence[int]: ...
    # The ranks that share the work; None: this process alone.
    @property
    def team(self) -> object: ...
    # Which of the blocks here may have a gradient.
    def present(self) -> list[bool]: ...
    # Gradients leave.
    def start(self) -> None: ...
    # The gradients of a part, and which of its blocks have one; None: all.
    def gather(self, part: Part, here: list[bool], stays: bool) -> tuple[Tensor, Tensor | None]: ...
    # Take the updates of a part.
    def deliver_(self, part: Part, U: Tensor, move: Move) -> None: ...
    # Updates leave if all of them are finished, or if `unfinished`; returns whether they have left.
    def depart(self, unfinished: bool) -> bool: ...
    # Updates arrive at the parameters, which shrink by `decay`.
    def arrive_(self, decay: float | Tensor) -> None: ...
    # No update leaves: the gradients were only observed.
    def rest(self) -> None: ...
    # Sum over the ranks that share the work.
    def add_up_(self, totals: Tensor) -> None: ...
    # What a checkpoint holds of a stack, per parameter; small state goes to every rank.
    def collect(self, stack: Tensor, small: bool) -> dict[Tensor, Tensor]: ...


@final
class Local:
    """The route in one process: gradients and parameters are at hand."""

    def __init__(self, blocks: list[Block]) -> None:
        self.blocks, self.mine = blocks, range(len(blocks))
        self.team = None

    def present(self) -> list[bool]:
        """Which of the blocks have a gradient."""
        return [block.parameter.grad is not None for block in self.blocks]

    def start(self) -> None:
        """Gradients stay."""

    def gather(self, part: Part, here: list[bool], stays: bool) -> tuple[Tensor, Tensor | None]:
        """Write the gradients of the blocks that have one into a stack; zero elsewhere."""
        G, whole = part.buffer(stays), all(here)
        if part.padded or not whole:
            G.zero_()
        grads = [g for p in part.parameters if (g := p.grad) is not None]
        foreach_copy_(list(compress(part.rows(G), here)), part.cut(grads, here))
        # If all blocks have a gradient, nothing is copied to the device.
        return G, None if whole else torch.tensor(here, device=G.device)

    def deliver_(self, part: Part, U: Tensor, move: Move) -> None:
        """Move the parameters at once."""
        updates = list(compress(part.rows(U), move.here))
        weights = part.cut(list(compress(part.parameters, move.here)), move.here)
        if move.decay != 0:
            foreach_add_(updates, weights, alpha=move.decay)
        scale_(U, move.pace, move.moving)
        at_once(map(call, [partial(foreach_add_, weights, updates), move.note]))

    def depart(self, unfinished: bool) -> bool:
        """Updates are where they belong."""
        return True

    def arrive_(self, decay: float | Tensor) -> None:
        """Updates have arrived."""

    def rest(self) -> None:
        """Nothing was under way."""

    def add_up_(self, totals: Tensor) -> None:
        """Nobody else has anything to add."""

    def collect(self, stack: Tensor, small: bool) -> dict[Tensor, Tensor]:
        """Copies for each parameter, without the rest of the stack."""
        return {p: stack[n[0] : n[-1] + 1].clone() for p, n in by_parameter(self.blocks).items()}
