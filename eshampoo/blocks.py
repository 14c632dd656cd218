"""How a parameter is cut into blocks: drop dimensions of 1, merge small ones, split large ones."""

import sys
from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

from torch import Tensor

from .methods import Method
from .options import Options

Box = tuple[slice, ...]
"""A rectangle in a parameter: one slice per dimension, with start and stop."""


class Cut(NamedTuple):
    """The blocks of one parameter, as rectangles in it and as they are worked on."""

    modes: tuple[int, ...]  # the modes that have a basis; none: plain Adam
    boxes: list[Box]
    shapes: list[tuple[int, ...]]  # of the blocks, with merged dimensions


class Block(NamedTuple):
    """One block of one parameter."""

    parameter: Tensor
    number: int  # among the blocks of its parameter,
    total: int  # of which there are so many
    box: Box
    shape: tuple[int, ...]

    def of(self, tensor: Tensor) -> Tensor:
        """A view of this block in a tensor of the parameter's shape."""
        return tensor if self.total == 1 else tensor[self.box]

    def unmerged(self, row: Tensor) -> Tensor:
        """A row of a stack, with the dimensions of the parameter."""
        shape = extent(self.box)
        if row.shape == shape:
            return row
        size = prod(shape)
        return (row if row.numel() == size else row[:size]).view(shape)


def extent(box: Box) -> tuple[int, ...]:
    """The shape of a rectangle."""
    return tuple(cut.stop - cut.start for cut in box)


def padded(numel: int) -> int:
    """The length of the stack that a vector is in: short ones of similar length share one.

    >>> [padded(numel) for numel in (10, 192, 256, 384, 5000)]
    [256, 256, 256, 512, 5000]
    """
    return numel if numel > 4096 else max(256, 1 << (numel - 1).bit_length())


def merge(shape: Sequence[int], max_dim: int) -> list[list[int]]:
    """Neighbouring dimensions to join, from the last backwards, while the product is ≤ max_dim.

    >>> merge((6, 4, 3, 3), 16)  # becomes (6, 4, 9)
    [[0], [1], [2, 3]]
    >>> merge((20, 1, 30), 1024)  # becomes (600,)
    [[0, 2]]
    """
    groups: list[list[int]] = []
    size = 0
    for dim in reversed(range(len(shape))):
        if shape[dim] == 1:
            continue
        if groups and size * shape[dim] <= max_dim:
            groups[0].insert(0, dim)
            size *= shape[dim]
        else:
            groups.insert(0, [dim])
            size = shape[dim]
    return groups


def split(size: int, max_dim: int) -> list[slice]:
    """Cut a dimension at multiples of max_dim, the last piece ragged.

    >>> split(40, 16)
    [slice(0, 16, None), slice(16, 32, None), slice(32, 40, None)]
    """
    return [slice(start, min(start + max_dim, size)) for start in range(0, size, max_dim)]


def cut(shape: Sequence[int], options: Options, method: Method) -> Cut:
    """The blocks of a parameter of this shape."""
    numel = prod(shape)
    whole = tuple(slice(0, size) for size in shape)
    flat = Cut((), [whole], [(numel,)])
    large = [dim for dim, size in enumerate(shape) if size != 1]
    if not large or (options.vectors if len(shape) == 1 else options.matrices) == "adam":
        return flat
    if method.one_mode:
        if numel > options.max_dim:
            raise ValueError(
                f"a parameter of shape {tuple(shape)} has {numel} elements; {method.name} keeps a "
                f"matrix of that size squared and takes at most max_dim={options.max_dim}. Raise "
                f"max_dim, give the parameter matrices='adam', or use EShampoo"
            )
        return Cut((0,), [whole], [(numel,)])
    groups = merge(shape, options.max_dim) if options.merge_dims else [[dim] for dim in large]
    sizes = [prod(shape[dim] for dim in group) for group in groups]
    modes = tuple(range(len(groups)))
    pieces = [[cut] for cut in whole]
    if options.oversize == "identity":
        modes = tuple(mode for mode in modes if sizes[mode] <= options.max_dim)
        if not modes:
            return flat
    else:
        # What was merged is not larger than max_dim, so only dimensions that stand alone are split.
        pieces = [split(size, options.max_dim) for size in shape]
        for group in groups:
            if len(group) > 1:
                for dim in group:
                    pieces[dim] = [whole[dim]]
    boxes = list(product(*pieces))
    shapes = [tuple(prod(extent(box)[dim] for dim in group) for group in groups) for box in boxes]
    return Cut(modes, boxes, shapes)


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a DTensor. None exists where their module, slow to import, was not needed."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def called(p: Tensor, names: Mapping[Tensor, str]) -> str:
    """What a message calls a parameter."""
    shape = f"shape {tuple(p.shape)}"
    return f"parameter {names[p]!r} ({shape})" if p in names else f"a parameter of {shape}"
