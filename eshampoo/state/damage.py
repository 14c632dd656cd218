"""Entries of a state that no run can have written: found before anything has changed."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .blocks import called, is_sharded

# Entries that are whole numbers.
COUNTERS = ("basis_checks", "basis_computations", "basis_failures", "basis_waited")


def check_values(
    saved: Mapping[Tensor, Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    params: Sequence[Tensor],
    names: Mapping[Tensor, str],
) -> None:
    """Refuse entries that no run can have written: damaged, or of another kind."""
    rules = [group.get("nonfinite") for group in groups for _ in group["params"]]
    watched: list[tuple[Tensor, str, Tensor]] = []
    for p, rule in zip(params, rules, strict=True):
        for name, value in saved.get(p, {}).items():
            if isinstance(value, Tensor) and is_sharded(value):
                continue  # ranks must not decide for themselves about their shards
            if isinstance(value, Tensor):
                if rule is not None and value.is_floating_point() == name.startswith(COUNTERS):
                    raise _damaged(p, name, f"has the dtype {value.dtype}", names)
                if rule != "propagate":
                    watched.append((p, name, value))
            elif name != "step" or not isinstance(value, int | float) or isinstance(value, bool):
                raise _damaged(p, name, f"is a {type(value).__name__}, not a tensor", names)
            elif not 0 <= value < math.inf:
                raise _damaged(p, name, f"is {value}, and no count", names)
    if not _finite([value for _, _, value in watched]):
        p, name = next((p, name) for p, name, value in watched if not _finite([value]))
        raise _damaged(p, name, "has NaN or Inf", names)


def _damaged(p: Tensor, name: str, fault: str, names: Mapping[Tensor, str]) -> ValueError:
    return ValueError(
        f"{name!r} in the state of {called(p, names)} {fault}; nothing was changed. "
        "The file is damaged or not from this library: load an older one"
    )


def _finite(values: Sequence[Tensor]) -> bool:
    """Whether all values are finite; small ones are looked at together, which is quicker."""
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for value in values:
        if value.is_floating_point() and not value.is_meta:
            alike[value.dtype, value.device].append(value.flatten())
    for same in alike.values():
        large = [value for value in same if value.numel() > 4096]
        small = torch.cat([same[0][:0], *(value for value in same if value.numel() <= 4096)])
        if not all(bool(torch.isfinite(value).all()) for value in (small, *large)):
            return False
    return True
