"""What ranks that share work must agree on: when an optimizer is built, and at every call."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..options import Options, offered


def check_agreement(mine: Mapping[str, str], group: dist.ProcessGroup) -> None:
    """Refuse, on every rank, what is not the same on all ranks of a group."""
    if dist.get_rank(group) < 0:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the process_group that it was given; pass a group "
            "that it belongs to"
        )
    if differs := difference(mine, group):
        raise ValueError(
            f"{differs}; they must agree: pass the same options on all ranks, and use the same "
            "seed or broadcast the model, as DDP does, before building the optimizer"
        )


def difference(mine: Mapping[str, str], group: dist.ProcessGroup) -> str:
    """The first difference between ranks, in words, or ""; every rank gets the same words."""
    everyone: list[dict[str, str]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, dict(mine), group=group)
    for rank, theirs in enumerate(everyone):
        for fact in {**everyone[0], **theirs}:
            here, there = everyone[0].get(fact, "none"), theirs.get(fact, "none")
            if here != there:
                return (
                    f"{fact} is ({there}) on rank {rank} of the process group and ({here}) on rank "
                    "0"
                )
    return ""


def facts_of_call(call: str, options: Mapping[int, Options]) -> dict[str, str]:
    """What ranks must agree on at a call, for the param groups that they share."""
    found = {"the call": call}
    for index, o in options.items():
        found |= {f"{name} of param group {index}": value for name, value in facts(o, ()).items()}
    return found


def facts(options: Options, params: Sequence[Tensor]) -> dict[str, str]:
    """What ranks that share the work on a param group must agree on, in words."""
    private = ("record", "process_group")  # may differ between ranks
    values = {n: getattr(options, n) for n in offered(type(options)) if n not in private}
    if isinstance(lr := values["lr"], Tensor):
        values["lr"] = lr.item() if params or lr.device.type == "cpu" else "a tensor"
    if callable(values.get("tau")):
        values["tau"] = "a schedule"  # code cannot be compared
    found = {name: repr(value) for name, value in values.items()}
    return found | {f"parameter {number}": described(p) for number, p in enumerate(params)}


def described(p: Tensor) -> str:
    """A parameter's shape and dtype, and its placements or an exact checksum of its bits."""
    what = f"{tuple(p.shape)} {p.dtype}"
    if isinstance(p, DTensor):
        return f"{what} {p.placements} on a mesh of shape {tuple(p.device_mesh.shape)}"
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[p.element_size()]
    bits = p.detach().contiguous().view(integers).flatten().to(torch.int64)
    # Weighted by position, modulo 2⁶⁴: the same on all kinds of processors.
    position = torch.arange(1, 2 * len(bits), 2, device=p.device)
    return f"{what} checksum {int((bits * position).sum()) & (1 << 64) - 1:016x}"
