"""Blocks of parameters, and how many of them are worked on at a time."""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from .dtensor import Box, extent, local

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
    matrix: int = 0  # number of the matrix or piece that it is cut from, in its parameter
    check_offset: float = 0.0  # the share of the gap by which its checks come earlier

    @property
    def origin(self) -> tuple[Tensor, int]:
        """The matrix that it is cut from."""
        return self.parameter, self.matrix

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
    return max(1, PART_BYTES // max(1, size))
