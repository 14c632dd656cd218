"""Bases from products alone: all Jacobi rotations of a factor at once. Do they replace `eigh`?

    python -m benchmarks.claims.jacobi [--workload digits-vit] [--data PATH] [--steps 60]
                                       [--ways eigh power 1 2 4] [--loss SEEDS] [--cost]

A sweep takes every angle at once, and makes a basis of them by Newton–Schulz:

    Θ_ij = ½ atan2(2Λ̂_ij, Λ̂_jj − Λ̂_ii),   V = Newton–Schulz(I + Θ + ½Θ²),   Λ̂ ← VᵀΛ̂V

with |Θ_ij| ≤ π/4 and ‖Θ‖ ≤ 1. Pairs inside the null space stay, and so do those with Λ̂_ij below a
tenth of ‖Λ̂‖/d, which hardly count but would fill ‖Θ‖. A sweep takes ten products d³.
The ways are `eigh`, SOAP's step ("power"), and numbers of sweeps. Without --loss: the median
criterion of the factors that a run solves, before and after. With --loss the final loss of EShampoo
for so many seeds; sweeps are charged as so many products. With --cost the time of each way on a
CPU, in products.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from eshampoo.lab.figures.ours import STEPS
from eshampoo.lab.optimizers import Option
from eshampoo.math import solvers
from eshampoo.math.linalg import criterion, orthonormalize

from ..command import command_line
from ..costs import factors, least_seconds
from ..overhead import trained
from ..timing import Action
from .level import final_loss

OPTIONS: dict[str, Option] = {"lr": 3e-3, "betas": (0.9, 0.95)}
# Entries of Λ̂ below this share of ‖Λ̂‖/d stay; ‖Θ‖; the products of a sweep: Θ², three steps of
# Newton–Schulz, VᵀΛ̂V, and the product of all V.
CUT, BOUND, PRODUCTS = 0.1, 1.0, 1 + 6 + 2 + 1


def angles(A: Tensor, u: float) -> Tensor:
    """The Jacobi angles Θ [K, d, d] of all pairs that count, between −π/4 and π/4."""
    values = torch.linalg.diagonal(A)
    gap = values.unsqueeze(1) - values.unsqueeze(2)
    theta = torch.atan2(2 * A * gap.sign(), gap.abs()) / 2
    null = solvers.vanishing(values, u)
    small = A.abs() < CUT / A.shape[1] * torch.linalg.vector_norm(A, dim=(1, 2), keepdim=True)
    theta = theta.masked_fill_(small | (null.unsqueeze(1) & null.unsqueeze(2)), 0.0).triu(1)
    return theta - theta.mT


def sweep(A: Tensor, u: float) -> Tensor:
    """V ≈ exp Θ, orthogonal. ‖Θ‖₂ is at most √‖Θ²‖_F, which is bounded."""
    theta = angles(A, u)
    square = torch.bmm(theta, theta)
    norm = torch.linalg.vector_norm(square, dim=(1, 2), keepdim=True).sqrt_()
    scale = (BOUND / norm).clamp_max_(1.0)
    V = torch.eye(A.shape[1], dtype=A.dtype) + scale * theta + scale**2 / 2 * square
    return orthonormalize(orthonormalize(orthonormalize(V)))


def jacobi(A: Tensor, u: float, descending: bool = False, sweeps: int = 1) -> solvers.Change:
    """Take so many sweeps, in the place of `eigh`."""
    d, V = A.shape[1], torch.eye(A.shape[1], dtype=A.dtype).expand_as(A)
    for _ in range(sweeps):
        V_k = sweep(A, u)
        V, B = torch.bmm(V, V_k), torch.bmm(torch.bmm(V_k.mT, A), V_k)
        A = (B + B.mT) / 2
    return solvers.Change(list(range(len(A))), V, A, [PRODUCTS * sweeps * d**3] * len(A))


@contextmanager
def recorded() -> Iterator[list[Tensor]]:
    """The factors that a run hands to `eigh`."""
    real, seen = solvers.eigh, list[Tensor]()

    def eigh(A: Tensor, *args: Any) -> solvers.Change:  # noqa: ANN401
        seen.extend(B.clone().unsqueeze(0) for B in A)
        return real(A, *args)

    with patch.object(solvers, "eigh", eigh):
        yield seen


def ways(names: Sequence[str]) -> dict[str, Callable[[Tensor, float], solvers.Change]]:
    """The solvers by name."""
    ours = {"eigh": solvers.eigh, "power": solvers.power}
    return {name: ours.get(name) or partial(jacobi, sweeps=int(name)) for name in names}


def compare(o: Namespace) -> None:
    """Print the median criterion before and after each solver."""
    with recorded() as seen:
        trained(o.workload, OPTIONS, o.data, 100, o.steps or 60)
    u = torch.finfo(torch.float32).eps
    before = [float(criterion(A)) for A in seen]
    print(f"{o.workload}: {len(seen)} factors, criterion {median(before):.2g}")
    for name, way in ways(o.ways).items():
        after = [float(criterion(way(A, u).factor)) for A in seen]
        print(f"{name}: criterion {median(after):.2g}", flush=True)


def losses(o: Namespace) -> None:
    """Print the final losses with each solver."""
    for name, way in ways(o.ways).items():
        found, bases = [], []
        for seed in range(100, 100 + o.loss):
            with patch.object(solvers, "eigh", lambda A, u, _, way=way: way(A, u)):
                log = trained(o.workload, OPTIONS, o.data, seed, o.steps or STEPS[o.workload])
            found.append(final_loss(log))
            bases.append(float(log.computations[-1]))
        spread = f" ± {stdev(found):.2g}" if len(found) > 1 else ""
        shown = ", ".join(f"{loss:.4g}" for loss in found)
        print(f"{name}: {fmean(found):.4g}{spread} ({shown}), {fmean(bases):.0f} bases", flush=True)


def cost(o: Namespace) -> None:
    """Print the time of each solver in products, for stacks of eight."""
    u = torch.finfo(torch.float32).eps
    for d in (64, 256, 1024):
        A = factors(d, 8, "cpu")
        actions: dict[str, Action] = {"product": partial(torch.bmm, A, A)}
        actions |= {name: partial(way, A, u) for name, way in ways(o.ways).items()}
        seconds = least_seconds(actions, "cpu", 5)
        units = [f"{name} {seconds[name] / seconds['product']:.1f}" for name in o.ways]
        print(f"d = {d}, in products: {', '.join(units)}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print criteria, losses or costs."""
    parser = command_line("claims.jacobi", __doc__)
    parser.add_argument("--workload", default="digits-vit", choices=STEPS)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--ways", nargs="+", default=["eigh", "power", "1", "2", "4"])
    parser.add_argument("--loss", type=int, help="how many seeds")
    parser.add_argument("--cost", action="store_true")
    o = parser.parse_args(arguments)
    torch.set_num_threads(1)
    (cost if o.cost else losses if o.loss else compare)(o)


if __name__ == "__main__":
    main()
