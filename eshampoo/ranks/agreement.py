"""What ranks that share work must agree on, before an optimizer is built."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..options import Options


def check_agreement(mine: Mapping[str, str], group: dist.ProcessGroup) -> None:
    """Refuse, on every rank, what is not the same on all ranks of a group."""
    if dist.get_rank(group) < 0:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the process_group that it was given; pass a group "
            "that it belongs to"
        )
    everyone: list[dict[str, str]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, dict(mine), group=group)
    for rank, theirs in enumerate(everyone):
        for fact in {**everyone[0], **theirs}:
            here, there = everyone[0].get(fact, "none"), theirs.get(fact, "none")
            if here != there:
                raise ValueError(
                    f"{fact} is ({there}) on rank {rank} of the process group and ({here}) on rank "
                    "0; they must agree: pass the same options on all ranks, and use the same seed "
                    "or broadcast the model, as DDP does, before building the optimizer"
                )


def facts(options: Options, params: Sequence[Tensor]) -> dict[str, str]:
    """What ranks that share the work on a param group must agree on, in words."""
    private = ("record", "process_group", "rate")  # may differ between ranks; is lr again
    values = {name: value for name, value in vars(options).items() if name not in private}
    if isinstance(values["lr"], Tensor):
        values["lr"] = values["lr"].item()
    if callable(values["tau"]):
        values["tau"] = "a schedule"  # is code, which cannot be compared
    found = {name: repr(value) for name, value in values.items()}
    return found | {f"parameter {number}": described(p) for number, p in enumerate(params)}


def described(p: Tensor) -> str:
    """Shape, dtype, and where a parameter lies or an exact checksum of its bits."""
    what = f"{tuple(p.shape)} {p.dtype}"
    if isinstance(p, DTensor):
        return f"{what} {p.placements} on a mesh of shape {tuple(p.device_mesh.shape)}"
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[p.element_size()]
    bits = p.detach().contiguous().view(integers).flatten().to(torch.int64)
    # Weighted by position, modulo 2⁶⁴: the same on all kinds of processors.
    position = torch.arange(1, 2 * len(bits), 2, device=p.device)
    return f"{what} checksum {int((bits * position).sum()) & (1 << 64) - 1:016x}"
