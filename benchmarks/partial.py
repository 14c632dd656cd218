"""A step at which every factor is refreshed: `solver="partial"` against `eigh`."""

from typing import Any

import torch
from torch import Tensor

from . import shapes, timing

TAU = 0.05
CRITERION = 0.15
SCALE = 1e3
"""Factors are so much larger than G̃G̃ᵀ that one step does not move the energy elsewhere."""


def quarter(d: int, generator: torch.Generator) -> Tensor:
    """A factor whose off-diagonal energy sits evenly in a quarter of the coordinates.

    Its criterion is about 0.15. The shortest prefix that brings it to τ/2 = 0.025 holds √(1 − 1/36)
    = 98.6 % of that quarter.
    """
    size = max(2, d // 4)
    diagonal = torch.linspace(1.0, 2.0, d)[torch.randperm(d, generator=generator)]
    noise = torch.randn(size, size, generator=generator)
    noise = (noise + noise.t()).fill_diagonal_(0.0)
    noise *= CRITERION / (1 - CRITERION**2) ** 0.5 * diagonal.norm() / noise.norm()
    A = torch.diag(diagonal)
    where = torch.randperm(d, generator=generator)[:size]
    A[where.unsqueeze(1), where] += noise
    return A * SCALE


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Both solvers in turn on the same factors, which are written anew before each step."""
    from eshampoo import EShampoo

    optimizers, before = {}, {}
    for solver in ("eigh", "partial"):
        params = shapes.parameters(spec["shapes"])
        optimizer = EShampoo(params, frequency=1, tau=TAU, solver=solver, budget=None)
        optimizers[solver] = optimizer
        before[solver] = _writer(optimizer)
    times = timing.race(
        {solver: optimizer.step for solver, optimizer in optimizers.items()},
        spec["repetitions"],
        spec["budget"],
        before=before,
        least=2,
    )
    counts = {solver: o.basis_computations for solver, o in optimizers.items()}
    factors = len(optimizers["eigh"].basis_report())
    runs = times["eigh"]["runs"]
    return times | {
        # 1 means that every factor was refreshed at every timed step, by both solvers.
        "refreshed": {solver: count / (factors * runs) for solver, count in counts.items()},
        "factors": factors,
    }


def _writer(optimizer: Any) -> Any:  # noqa: ANN401
    """A function that writes the same factors into the state again."""
    generator = torch.Generator().manual_seed(2)
    kept: dict[int, Tensor] = {}
    views: list[Tensor] = []
    for state in optimizer.state.values():
        views += [value for name, value in state.items() if name.startswith("factor_")]
    for view in views:
        if view.shape[-1] not in kept:
            kept[view.shape[-1]] = quarter(view.shape[-1], generator)

    def write() -> None:
        for view in views:
            view.copy_(kept[view.shape[-1]].expand_as(view))

    return write
