"""DTensors: what this rank holds of a tensor, and rectangles that say which ranks hold what.

The classes of `torch.distributed.tensor` are imported where they are used: the import is slow, and
no DTensor exists before it.
"""

import sys
from collections.abc import Sequence
from math import sqrt
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..torch_names import foreach_norm, strided_shard

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

# A rectangle in a parameter: one slice per dimension, with start and stop.
Box = tuple[slice, ...]


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a DTensor."""
    if type(tensor) is Tensor:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def gathered(tensor: Tensor) -> Tensor:
    """All of a tensor; for a DTensor, all ranks must call this."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def lay_out_gradient(p: Tensor) -> None:
    """Place a gradient like its parameter; tensor parallelism may leave it as a partial sum.

    This communicates, so the order of the parameters must be the same on all ranks.
    """
    grad: Any = p.grad
    if grad is not None and is_sharded(p) and grad.placements != p.placements:  # type: ignore[attr-defined]
        p.grad = grad.redistribute(p.device_mesh, p.placements)  # type: ignore[attr-defined]


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


def grad_dtype(p: Tensor) -> torch.dtype:
    """The dtype of a parameter's gradient; in newer versions of torch, None means any dtype."""
    return getattr(p, "grad_dtype", p.dtype) or torch.promote_types(p.dtype, torch.float32)


# -------------------------------------------------------------------- rectangles


def whole_box(shape: Sequence[int]) -> Box:
    """The rectangle that is all of a tensor."""
    return tuple(slice(0, size) for size in shape)


def extent(box: Box) -> tuple[int, ...]:
    """The shape of a rectangle."""
    return tuple(span.stop - span.start for span in box)


def intersection(a: Box, b: Box) -> Box | None:
    """Where two rectangles overlap, if they do."""
    spans = [slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True)]
    return tuple(spans) if all(span.start < span.stop for span in spans) else None


def union(a: Box, b: Box) -> Box:
    """The smallest rectangle that contains two."""
    pairs = zip(a, b, strict=True)
    return tuple(slice(min(x.start, y.start), max(x.stop, y.stop)) for x, y in pairs)


def within(box: Box, outer: Box) -> Box:
    """A rectangle in the coordinates of one that contains it."""
    return tuple(
        slice(span.start - o.start, span.stop - o.start) for span, o in zip(box, outer, strict=True)
    )


def shard_box(
    shape: Sequence[int],
    sizes: Sequence[int],
    coordinate: Sequence[int],
    placements: "Sequence[Placement]",
) -> Box:
    """The rectangle of a tensor that a rank of a mesh holds, as torch.chunk cuts it."""
    from torch.distributed.tensor import Shard

    strided = strided_shard()
    bounds = [(0, size) for size in shape]
    # FSDP shards what tensor parallelism left on a rank, so its strided placement applies last.
    last = sorted(range(len(placements)), key=lambda i: isinstance(placements[i], strided))
    for i in last:
        placement: Any = placements[i]
        if isinstance(placement, Shard | strided):
            start, stop = bounds[placement.dim]
            size = -(-(stop - start) // sizes[i])
            first = min(start + size * coordinate[i], stop)
            bounds[placement.dim] = (first, min(first + size, stop))
    return tuple(slice(*bound) for bound in bounds)


# -------------------------------------------------------------------- element-wise state


def like_parameter(held: Tensor, p: Tensor) -> Tensor:
    """Element-wise state, as a DTensor placed like its parameter if that is one; no single number.

    `held` is what this rank holds.
    """
    if not is_sharded(p) or held.dim() == 0:
        return held
    from torch.distributed.tensor import DTensor

    assert isinstance(p, DTensor)
    return DTensor.from_local(
        held, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )


def held_piece(value: Tensor, p: Tensor) -> Tensor:
    """This rank's piece of a value that has the parameter's shape; all of a single number."""
    if not is_sharded(p) or value.dim() == 0:
        return gathered(value)
    mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
    if is_sharded(value) and (value.device_mesh, value.placements) == (mesh, placements):  # type: ignore[attr-defined]
        return local(value)
    return gathered(value)[shard_box(p.shape, mesh.shape, mesh.get_coordinate(), placements)]
