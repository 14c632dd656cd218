"""The private names of torch, in one place, as they are in torch 2.13.

Those of `torch.distributed` are looked up when they are used: the import is slow.
"""

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# One operation on many tensors.
foreach_add_ = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage]
foreach_copy_ = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
foreach_norm = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage]

# `torch.compiler.disable` without the slow import at the time of decoration.
not_compiled = torch._disable_dynamo  # type: ignore[attr-defined]


def strided_shard() -> type[Any]:
    """The placement of what FSDP shards after tensor parallelism."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard


def flattened(mesh: "DeviceMesh") -> "DeviceMesh":
    """A mesh of several dimensions, flattened to one dimension, with a group."""
    return mesh._flatten()
