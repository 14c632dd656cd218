"""The private names of `torch.distributed`, in one place, as they are in torch 2.13."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import _StridedShard

# The placement of what FSDP shards after tensor parallelism.
StridedShard = _StridedShard


def default_group() -> dist.ProcessGroup:
    """The group of all ranks."""
    return dist.distributed_c10d._get_default_group()


def flattened(mesh: DeviceMesh) -> DeviceMesh:
    """A mesh of several dimensions, flattened to one dimension, with a group."""
    return mesh._flatten()


def root_ranks(mesh: DeviceMesh) -> list[int]:
    """The ranks of the mesh that this one is a slice of, or its own."""
    find = getattr(mesh, "_get_root_mesh", None)
    if find is None:  # older versions of torch have it elsewhere
        from torch.distributed.device_mesh import _mesh_resources

        return sorted(_mesh_resources.get_root_mesh(mesh).mesh.flatten().tolist())
    return sorted(find().mesh.flatten().tolist())
