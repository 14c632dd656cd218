"""How a parameter is cut into blocks: drop dimensions of 1, merge small ones, split large ones."""

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

from torch import Tensor

from .methods import Method
from .options import Options


class Cut(NamedTuple):
    """The blocks of one parameter: regions of its merged shape, all with the same modes."""

    merged: tuple[int, ...]
    modes: tuple[int, ...]  # the modes that have a basis; none: plain Adam
    regions: list[tuple[slice, ...]]


class Block(NamedTuple):
    """One block of one parameter."""

    parameter: Tensor
    number: int  # among the blocks of its parameter,
    total: int  # of which there are so many
    merged: tuple[int, ...]
    region: tuple[slice, ...]

    def of(self, tensor: Tensor) -> Tensor:
        """The part of a tensor of the parameter's shape that belongs to this block.

        >>> import torch
        >>> p = torch.zeros(40, 24)
        >>> Block(p, 5, 6, (40, 24), (slice(32, 40), slice(16, 24))).of(p).shape
        torch.Size([8, 8])
        """
        return tensor.reshape(self.merged)[self.region]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(cut.stop - cut.start for cut in self.region)


def merge(shape: Sequence[int], max_dim: int) -> tuple[int, ...]:
    """Join neighbouring dimensions, from the last backwards, while the product stays ≤ max_dim.

    >>> merge((6, 4, 3, 3), 16)
    (6, 4, 9)
    >>> merge((20, 30), 1024)
    (600,)
    """
    merged: list[int] = []
    for size in reversed(shape):
        if merged and merged[0] * size <= max_dim:
            merged[0] *= size
        else:
            merged.insert(0, size)
    return tuple(merged)


def split(size: int, max_dim: int) -> list[slice]:
    """Cut a dimension at multiples of max_dim, the last piece ragged.

    >>> split(40, 16)
    [slice(0, 16, None), slice(16, 32, None), slice(32, 40, None)]
    """
    return [slice(start, min(start + max_dim, size)) for start in range(0, size, max_dim)]


def cut(shape: Sequence[int], options: Options, method: Method) -> Cut:
    """The blocks of a parameter of this shape."""
    numel = prod(shape)
    dims = tuple(size for size in shape if size != 1)
    flat = Cut((numel,), (), [(slice(0, numel),)])
    if not dims or (options.vectors if len(shape) == 1 else options.matrices) == "adam":
        return flat
    if method.one_mode:
        if numel > options.max_dim:
            raise ValueError(
                f"a parameter of shape {tuple(shape)} has {numel} elements; {method.name} keeps a "
                f"matrix of that size squared and takes at most max_dim={options.max_dim}. Raise "
                f"max_dim, give the parameter matrices='adam', or use EShampoo"
            )
        dims = (numel,)
    elif options.merge_dims:
        dims = merge(dims, options.max_dim)
    modes = tuple(range(len(dims)))
    if options.oversize == "identity":
        modes = tuple(mode for mode in modes if dims[mode] <= options.max_dim)
        pieces = [[slice(0, size)] for size in dims]
    else:
        pieces = [split(size, options.max_dim) for size in dims]
    return Cut(dims, modes, list(product(*pieces))) if modes else flat


def called(p: Tensor, names: Mapping[Tensor, str]) -> str:
    """What a message calls a parameter."""
    shape = f"shape {tuple(p.shape)}"
    return f"parameter {names[p]!r} ({shape})" if p in names else f"a parameter of {shape}"
