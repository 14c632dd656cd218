"""Workloads that solve a differential equation: full batches, tiny matrices, long runs."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from eshampoo.lab import objectives
from eshampoo.lab.data import Batch, Dataset, pde
from eshampoo.lab.models.mlp import TanhMLP
from eshampoo.lab.run.runs import Scale
from eshampoo.lab.workloads import Setting, Workload, options


def equation(
    name: str,
    title: str,
    loss: Callable[[nn.Module, Batch], Tensor],
    settings: Mapping[Scale, Setting],
) -> Workload:
    """Return a workload that solves a differential equation, judged by its known solution."""
    return Workload(
        name=name,
        title=title,
        origin=pde.ORIGIN,
        locate=pde.locate_nothing,
        loss=loss,
        metric=objectives.relative_error,
        metric_name="relative L² error",
        trivial=objectives.error_of_zero,
        settings=settings,
        higher_is_better=False,
    )


def solved(widths: tuple[int, ...], data: Callable[[Path | None], Dataset], steps: int) -> Setting:
    """Return a setting in which every step sees all points."""
    return Setting(
        model=partial(TanhMLP, widths=widths),
        data=data,
        steps=steps,
        batch=1,
        options=options(3e-3, 0.0),
        # one iteration of L-BFGS with its line search is a step; no tolerance ends it early
        tuned={
            "lbfgs": {
                "lr": 1.0,
                "max_iter": 1,
                "max_eval": 25,
                "history_size": 50,
                "line_search_fn": "strong_wolfe",
                "tolerance_grad": 0.0,
                "tolerance_change": 0.0,
            }
        },
        clip=None,
        threads=1,
    )


poisson = partial(pde.load_poisson, interior=900, boundary=120, test=9000)
few_poisson = partial(pde.load_poisson, interior=30, boundary=12, test=50)
PINN_POISSON = equation(
    name="pinn-poisson",
    title="A network that solves the Poisson equation",
    loss=objectives.poisson_loss,
    settings={
        "tiny": solved((8, 8), few_poisson, 10),
        "small": solved((64, 64, 48, 48), poisson, 2000),
        "paper": solved((64, 64, 48, 48), poisson, 20_000),
    },
)

convection = partial(pde.load_convection, interior=1000, boundary=100, initial=160, test=9000)
few_convection = partial(pde.load_convection, interior=30, boundary=12, initial=12, test=50)
PINN_CONVECTION = equation(
    name="pinn-convection",
    title="A network that solves a convection equation",
    loss=objectives.convection_loss,
    settings={
        "tiny": solved((8, 8), few_convection, 10),
        "small": solved((50, 50, 50, 50), convection, 3000),
        "paper": solved((50, 50, 50, 50), convection, 40_000),
    },
)
