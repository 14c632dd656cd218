"""Ways to decompose a stack of matrices: which one is fast depends on the machine and the size."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from .linalg import diagonal

# On a CPU, matrices from this size on are worth a thread of their own.
ALONE = 256

# LAPACK is slow if the columns of a matrix are a multiple of 512 numbers apart, because the
# entries of a row then evict each other from the cache: with 16 rows and columns more it takes 20 %
# less time at size 1024, and 25 % less at 2048.
STRIDE, MORE = 512, 16

# One call for the stack, one for each matrix, or one for the stack after a copy to the host. On a
# CPU, a stack of large matrices is spread over the threads.
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
        eigenvalues, V = _on_cpu(A.cpu())
        return eigenvalues.to(A.device), V.to(A.device)
    if way == "single":
        return _stacked([torch.linalg.eigh(matrix) for matrix in A])
    return _on_cpu(A) if A.device.type == "cpu" else _stack(A)


def _on_cpu(A: Tensor) -> tuple[Tensor, Tensor]:
    """`eigh` of a stack, with padded matrices and on all threads where that is faster."""
    d = A.shape[-1]
    if d % STRIDE != 0:
        return _spread(A)
    # −λ for the largest entry λ of a diagonal is below all eigenvalues of Λ̂ ⪰ 0, so what is added
    # comes first; and no entry is larger than before, so LAPACK scales the matrix as before.
    largest = diagonal(A).amax(1, keepdim=True)
    B = A.new_zeros(len(A), d + MORE, d + MORE)
    B[:, :d, :d] = A
    diagonal(B)[:, d:] = -torch.where(largest > 0, largest, 1.0)
    eigenvalues, V = _spread(B)
    return eigenvalues[:, MORE:], V[:, :d, MORE:]


def _spread(A: Tensor) -> tuple[Tensor, Tensor]:
    """`eigh` of a stack on a CPU, each large matrix on a thread of its own.

    LAPACK itself works on one matrix at a time, and its threads spend much time waiting.
    """
    threads = torch.get_num_threads()
    # Without OpenMP, torch has one number of threads for the whole process.
    own = torch.backends.openmp.is_available()  # type: ignore[no-untyped-call]
    if not own or threads == 1 or len(A) == 1 or A.shape[-1] < ALONE:
        return _stack(A)
    count, alone = min(threads, len(A)), partial(torch.set_num_threads, 1)
    try:
        with ThreadPoolExecutor(count, initializer=alone) as pool:
            return _stacked(list(pool.map(torch.linalg.eigh, A)))
    finally:  # `alone` holds for the threads of the pool, but also for threads that begin later
        torch.set_num_threads(threads)


def _stack(A: Tensor) -> tuple[Tensor, Tensor]:
    eigenvalues, V = torch.linalg.eigh(A)
    return eigenvalues, V


def _stacked(found: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    # Stacked by columns, in the order in which `eigh` leaves the entries of V.
    return torch.stack([w for w, _ in found]), torch.stack([V.mT for _, V in found]).mT
