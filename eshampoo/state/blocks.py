"""Blocks of parameters, and how many of them are worked on at a time."""

from collections.abc import Sequence
from itertools import zip_longest
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .dtensor import Box, extent, local, union

if TYPE_CHECKING:
    from ..methods import Method
    from ..ranks.team import Team

# Stacks are worked on in parts of about this size per thread, to stay in the cache of a CPU …
THREAD_BYTES = 1 << 21
# … or of this size on other devices, to bound the transient memory,
PART_BYTES = 1 << 28
# which on a GPU is a share of its memory. Not of what is free: results would depend on neighbours.
GPU_PARTS = 64


class Kind(NamedTuple):
    """What the blocks of a bucket share."""

    row: "Method"  # of the table
    shape: tuple[int, ...]
    modes: tuple[int, ...]  # those with a basis
    dtype: torch.dtype
    device: torch.device
    team: "Team | None"  # whose ranks share the work, or hold the shards of element-wise state


class Block(NamedTuple):
    """One block of one parameter."""

    parameter: Tensor
    number: int  # among the blocks of its parameter
    total: int  # number of blocks of its parameter
    box: Box
    shape: tuple[int, ...]  # with merged dimensions
    matrix: int = 0  # number of the matrix or piece that it is cut from, in its parameter
    check_offset: float = 0.0  # the share of the gap by which its checks come earlier
    counts: tuple[int, ...] = ()  # of several as one: how many along each dimension

    @property
    def view_shape(self) -> tuple[int, ...]:
        """The shape of what `of` returns."""
        pairs = zip_longest(extent(self.box), self.counts, fillvalue=1)
        return *self.counts, *(span // count for span, count in pairs)

    def of(self, tensor: Tensor) -> Tensor:
        """A view of this block in a tensor that is laid out like the parameter."""
        held = local(tensor)
        held = held if self.total == 1 else held[self.box]
        for dim, count in enumerate(self.counts):  # in front, in their order
            held = torch.unflatten(held, 2 * dim, (count, -1)).movedim(2 * dim, dim)
        return held


def runs(blocks: Sequence[Block]) -> list[Block]:
    """Blocks of one shape, joined where neighbours of one parameter fill a box.

    One operation then reaches them all, through a view with their `counts` in front.
    """
    joined: list[Block] = []
    while blocks:
        first, most, box, hull = blocks[0], 1, blocks[0].box, blocks[0].box
        for count, block in enumerate(blocks, 1):
            if block.parameter is not first.parameter:
                break
            hull = union(hull, block.box)
            if prod(extent(hull)) == count * prod(extent(first.box)):
                most, box = count, hull
        if most > 1:
            pairs = zip(extent(box), extent(first.box), strict=True)
            first = first._replace(box=box, counts=tuple(whole // one for whole, one in pairs))
        joined.append(first)
        blocks = blocks[most:]
    return joined


def by_parameter(blocks: Sequence[Block]) -> dict[Tensor, list[int]]:
    """The numbers of the blocks of each parameter, which are consecutive."""
    numbers: dict[Tensor, list[int]] = {}
    for number, block in enumerate(blocks):
        numbers.setdefault(block.parameter, []).append(number)
    return numbers


def blocks_at_once(size: int, device: torch.device) -> int:
    """How many blocks of `size` bytes are worked on at a time.

    On a CPU every thread gets the same number of blocks: a batch of products runs side by side, one
    product per thread.
    """
    if device.type == "cpu":
        return max(1, THREAD_BYTES // max(1, size)) * torch.get_num_threads()
    room = PART_BYTES
    if device.type == "cuda" and torch.cuda.is_available():
        room = torch.cuda.get_device_properties(device).total_memory // GPU_PARTS
    return max(1, room // max(1, size))
