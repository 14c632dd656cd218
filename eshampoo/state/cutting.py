"""How a parameter is cut into blocks: drop dimensions of 1, merge small ones, split large ones."""

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod

from torch import Tensor

from ..options import Options
from .blocks import Block, Box, called, extent, local

# The dimensions of a parameter that each mode of its blocks joins, none if its state is
# element-wise; and the modes with a basis.
Sides = tuple[list[list[int]], tuple[int, ...]]

# Largest block for correction="optimal", which keeps a matrix of that size squared.
OPTIMAL_LIMIT = 4096


# A side whose factor has this many times the entries of its block, or more, gets no basis: LoRA's
# 8 × 4096 then needs AdamW's memory and time, and the tokens of a vocabulary (1024 × 128) are both
# cheaper and better off without one, while the inputs of a patch (64 × 432) need theirs.
SKINNY = 8

# -------------------------------------------------------------------- sides


def every_side(shape: Sequence[int], o: Options) -> Sides:
    """Every dimension above 1 is a mode with a basis, except skinny ones; `merge_dims` joins some.

    With `sides` other than "both", a block of several modes has a basis for one of them at most.
    """
    if plain(shape, o):
        return no_side(shape, o)
    large = [dim for dim, size in enumerate(shape) if size != 1]
    joined = [[dim] for dim in large]
    if o.merge_dims == "kernel":
        joined = [large[:1], large[1:]] if _fits(shape, large[2:], o.max_dim) else joined
    elif o.merge_dims:
        joined = merge(shape, o.max_dim)
    sizes = [prod(shape[dim] for dim in dims) for dims in joined]
    modes = tuple(range(len(joined)))
    if o.oversize == "identity":
        modes = tuple(i for i in modes if sizes[i] <= o.max_dim)
    if len(joined) > 1:
        rest = [prod(shape) // size for size in sizes]
        modes = tuple(i for i in modes if min(sizes[i], o.max_dim) < SKINNY * rest[i])
        if o.sides != "both":
            modes = tuple(i for i in modes if i == _chosen(o.sides, sizes))
    return (joined, modes) if modes else no_side(shape, o)


def _chosen(side: str, sizes: Sequence[int]) -> int:
    """The mode that has the only basis; of equally small modes, the last."""
    last = len(sizes) - 1
    smallest = min(range(len(sizes)), key=lambda i: (sizes[i], -i))
    return {"left": 0, "right": last, "smaller": smallest}[side]


def _fits(shape: Sequence[int], kernel: Sequence[int], max_dim: int) -> bool:
    """Whether there are kernel dimensions, small enough to be joined to some inputs."""
    return len(kernel) > 0 and prod(shape[dim] for dim in kernel) <= max_dim


def one_side(shape: Sequence[int], o: Options) -> Sides:
    """The whole parameter is one mode."""
    numel = prod(shape)
    if plain(shape, o):
        return no_side(shape, o)
    if numel > o.max_dim:
        raise ValueError(
            f"a parameter of shape {tuple(shape)} has {numel} elements; FullMatrixAdam keeps a "
            f"matrix of that size squared and takes at most max_dim={o.max_dim}. Raise max_dim, "
            f"give the parameter matrices='adam', or use EShampoo"
        )
    return [list(range(len(shape)))], (0,)


def whole(shape: Sequence[int], o: Options) -> Sides:
    """One uncut matrix without a basis: the first dimension above 1, and the others joined."""
    large = [dim for dim, size in enumerate(shape) if size != 1]
    return no_side(shape, o) if plain(shape, o) else ([large[:1], large[1:]], ())


def no_side(shape: Sequence[int], o: Options) -> Sides:
    """No modes and no bases: the state is element-wise."""
    return [], ()


def plain(shape: Sequence[int], o: Options) -> bool:
    """Whether a parameter of this shape has no basis at all."""
    large = sum(size != 1 for size in shape)
    return large == 0 or (o.vectors if large == 1 else o.matrices) == "adam"


# -------------------------------------------------------------------- cutting


def cut(p: Tensor, sides: Sides, o: Options, names: Mapping[Tensor, str]) -> list[Block]:
    """The blocks of a parameter; element-wise work is done on what this rank holds of it."""
    joined, modes = sides
    if not joined:
        held = local(p)  # it may be empty, but a checkpoint wants an entry on every rank
        return [Block(p, 0, 1, _whole(held.shape), (padded(held.numel()),))]
    pieces = [[span] for span in _whole(p.shape)]
    for i in modes:  # sides without a basis stay whole
        first, *rest = joined[i]
        pieces[first] = split(p.shape[first], o.max_dim // prod(p.shape[dim] for dim in rest))
    boxes = list(product(*pieces))
    shapes = [tuple(prod(extent(box)[dim] for dim in dims) for dims in joined) for box in boxes]
    for shape in shapes:
        if o.moment == "row" and len(shape) == 1:
            raise ValueError(
                f"moment='row' keeps one number per row, and {called(p, names)} has a block of one "
                f"mode, {shape}, without rows. Set merge_dims=False and vectors='adam', or "
                "moment='block'"
            )
        if o.correction == "optimal" and len(shape) > 1 and prod(shape) > OPTIMAL_LIMIT:
            raise ValueError(
                f"correction='optimal' keeps a full matrix per block and takes blocks of at "
                f"most {OPTIMAL_LIMIT} elements; {called(p, names)} has one of shape "
                f"{shape}. Lower max_dim, or use 'basis_aware'"
            )
    numbered = enumerate(zip(boxes, shapes, strict=True))
    return [Block(p, number, len(boxes), box, shape) for number, (box, shape) in numbered]


def _whole(shape: Sequence[int]) -> Box:
    return tuple(slice(0, size) for size in shape)


def padded(numel: int) -> int:
    """The row length of a vector's stack: short vectors of similar length share a stack.

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
    joined: list[list[int]] = []
    size = 0
    for dim in reversed(range(len(shape))):
        if shape[dim] == 1:
            continue
        if joined and size * shape[dim] <= max_dim:
            joined[0].insert(0, dim)
            size *= shape[dim]
        else:
            joined.insert(0, [dim])
            size = shape[dim]
    return joined


def split(size: int, max_dim: int) -> list[slice]:
    """Cut a dimension at multiples of max_dim, the last piece ragged.

    >>> split(40, 16)
    [slice(0, 16, None), slice(16, 32, None), slice(32, 40, None)]
    """
    return [slice(start, min(start + max_dim, size)) for start in range(0, size, max_dim)]
