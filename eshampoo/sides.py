"""Which sides of a parameter have a basis: the first column of the table in `methods.py`."""

from collections.abc import Sequence
from math import prod

from .options import Options
from .validate import check_one_mode

# The dimensions of a parameter that each mode of its blocks joins, none if its state is
# element-wise; and the modes with a basis.
Modes = tuple[list[list[int]], tuple[int, ...]]

# A side whose factor has this many times the entries of its block, or more, gets no basis: LoRA's
# 8 × 4096 then needs AdamW's memory and time, and the tokens of a vocabulary (1024 × 128) are both
# cheaper and better off without one, while the inputs of a patch (64 × 432) need theirs.
MAX_ASPECT = 8


def every_side(shape: Sequence[int], o: Options) -> Modes:
    """Every dimension above 1 is a mode with a basis, if not too long; `merge_dims` joins some.

    With `sides` other than "both", a block of several modes has a basis for one of them at most.
    """
    if is_elementwise(shape, o):
        return no_side(shape, o)
    large = [dim for dim, size in enumerate(shape) if size != 1]
    joined = [[dim] for dim in large]
    if o.merge_dims == "kernel":
        kernel = prod(shape[dim] for dim in large[2:])
        if len(large) > 2 and kernel <= o.max_dim:  # small enough to be joined to some inputs
            joined = [large[:1], large[1:]]
    elif o.merge_dims:
        joined = merge(shape, o.max_dim)
    sizes = [prod(shape[dim] for dim in dims) for dims in joined]
    modes = tuple(range(len(joined)))
    if o.oversize == "identity":
        modes = tuple(i for i in modes if sizes[i] <= o.max_dim)
    if len(joined) > 1:
        rest = [prod(shape) // size for size in sizes]
        modes = tuple(i for i in modes if sizes[i] < MAX_ASPECT * rest[i])
        if o.sides != "both":
            last = len(sizes) - 1
            smallest = min(range(last, -1, -1), key=sizes.__getitem__)  # of equal ones, the last
            chosen = {"left": 0, "right": last, "smaller": smallest}[o.sides]
            modes = tuple(i for i in modes if i == chosen)
    return (joined, modes) if modes else no_side(shape, o)


def one_side(shape: Sequence[int], o: Options) -> Modes:
    """The whole parameter is one mode."""
    if is_elementwise(shape, o):
        return no_side(shape, o)
    check_one_mode(shape, o.max_dim)
    return [list(range(len(shape)))], (0,)


def one_matrix(shape: Sequence[int], o: Options) -> Modes:
    """One uncut matrix without a basis: the first dimension above 1, and the others joined."""
    large = [dim for dim, size in enumerate(shape) if size != 1]
    return no_side(shape, o) if is_elementwise(shape, o) else ([large[:1], large[1:]], ())


def no_side(shape: Sequence[int], o: Options) -> Modes:
    """No modes and no bases: the state is element-wise."""
    return [], ()


def is_elementwise(shape: Sequence[int], o: Options) -> bool:
    """Whether a parameter of this shape has no basis at all."""
    large = sum(size != 1 for size in shape)
    return large == 0 or (o.vectors if large == 1 else o.matrices) == "adam"


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
