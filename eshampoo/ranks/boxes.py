"""Rectangles in parameters: which ranks hold what."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from ..state.blocks import Box
from .torch_names import StridedShard


def shard_box(
    shape: Sequence[int],
    sizes: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> Box:
    """The rectangle of a tensor that a rank of a mesh holds, as torch.chunk cuts it."""
    bounds = [(0, size) for size in shape]
    # FSDP shards what tensor parallelism left on a rank, so its strided placement applies last.
    last = sorted(range(len(placements)), key=lambda i: isinstance(placements[i], StridedShard))
    for i in last:
        placement = placements[i]
        if isinstance(placement, Shard | StridedShard):
            start, stop = bounds[placement.dim]
            size = -(-(stop - start) // sizes[i])
            first = min(start + size * coordinate[i], stop)
            bounds[placement.dim] = (first, min(first + size, stop))
    return tuple(slice(*bound) for bound in bounds)


def intersection(a: Box, b: Box) -> Box | None:
    """Where two rectangles overlap, if they do."""
    spans = [slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True)]
    return tuple(spans) if all(span.start < span.stop for span in spans) else None


def within(box: Box, outer: Box) -> Box:
    """A rectangle in the coordinates of one that contains it."""
    return tuple(
        slice(span.start - o.start, span.stop - o.start) for span, o in zip(box, outer, strict=True)
    )


def like_parameter(held: Tensor, p: Tensor) -> Tensor:
    """What this rank holds of an element-wise state, as a DTensor placed like its parameter."""
    assert isinstance(p, DTensor)
    return DTensor.from_local(
        held, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )


def held_piece(value: Tensor, p: Tensor) -> Tensor:
    """This rank's piece of a value that has the parameter's shape."""
    assert isinstance(p, DTensor)
    mesh = p.device_mesh
    if isinstance(value, DTensor):
        if value.device_mesh == mesh and value.placements == p.placements:
            return value.to_local()
        value = value.full_tensor()
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    return value[shard_box(p.shape, tuple(mesh.shape), coordinate, p.placements)]


def grad_dtype(p: Tensor) -> torch.dtype:
    """The dtype of a parameter's gradient; in newer versions of torch, None means any dtype."""
    return getattr(p, "grad_dtype", p.dtype) or torch.promote_types(p.dtype, torch.float32)
