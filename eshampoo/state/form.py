"""The two forms of a stored state, and the way from one to the other.

A full state keeps symmetric matrices whole; a lean one keeps triangles, and bases in fewer bits.
"""

import torch
from torch import Tensor

from ..math.linalg import orthonormalize
from ..math.triangle import in_form, triangle_size

Shapes = dict[str, tuple[int, ...]]  # by name of an entry

# Entries that are symmetric matrices.
SYMMETRIC = ("factor_", "root_")


def formless(name: str, shapes: Shapes) -> tuple[int, ...] | None:
    """The shape of an entry; for a symmetric matrix, in either form, that of its triangle."""
    match shapes.get(name):
        case (blocks, d, e) if d == e and name.startswith(SYMMETRIC):
            return blocks, triangle_size(d)
        case shape:
            return shape


def as_kept(name: str, value: Tensor, like: Tensor) -> Tensor:
    """A stored entry in the form of the state that loads it.

    The basis of a lean state is made orthonormal before a full state keeps it.
    """
    if name.startswith(SYMMETRIC):
        return in_form(value, like)
    matrices = name.startswith("basis_") and value.dim() == 3  # a counter has two dimensions
    if matrices and value.dtype == torch.float16 != like.dtype:
        return orthonormalize(value.to(like.dtype))
    return value
