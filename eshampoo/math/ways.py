"""Ways to decompose a stack of matrices: which one is fast depends on the machine and the size."""

from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

# One call for the stack, one for each matrix, or one for the stack after a copy to the host.
Way = Literal["batched", "single", "host"]

# By type of device, the way for matrices up to each size, the smallest first.
CHOSEN: dict[str, dict[int, Way]] = {}


def use_eigh(device: str, ways: Mapping[int, Way]) -> None:
    """Choose how `eigh` runs on a type of device: up to size d as ways[d] says; {} means batched.

    The way of the largest d also holds for all larger sizes. Ways differ in the last bits of their
    results, so all processes of a run must choose the same. `python -m eshampoo.calibrate` measures
    them.
    """
    for size, way in ways.items():
        if way not in get_args(Way):
            known = ", ".join(map(repr, get_args(Way)))
            raise ValueError(
                f"the way of eigh for size {size} is {way!r}; it must be one of {known}"
            )
        if type(size) is not int or size < 1:
            raise ValueError(f"eigh has a way for the size {size!r}; a size is an int from 1 on")
    CHOSEN[torch.device(device).type] = dict(sorted(ways.items()))


def way_of_eigh(size: int, device: torch.device) -> Way:
    """The way that was chosen for matrices of this size."""
    way: Way = "batched"
    for largest, chosen in CHOSEN.get(device.type, {}).items():
        way = chosen
        if size <= largest:
            break
    return way


def decompose(A: Tensor, way: Way | None = None) -> tuple[Tensor, Tensor]:
    """Eigenvalues, ascending, and eigenvectors of a stack [K, d, d], in the way that was chosen."""
    way = way_of_eigh(A.shape[-1], A.device) if way is None else way
    if way == "host":
        eigenvalues, V = torch.linalg.eigh(A.cpu())
        return eigenvalues.to(A.device), V.to(A.device)
    if way == "single":
        found = [torch.linalg.eigh(matrix) for matrix in A]
        return torch.stack([w for w, _ in found]), torch.stack([V for _, V in found])
    eigenvalues, V = torch.linalg.eigh(A)
    return eigenvalues, V
