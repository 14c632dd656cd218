"""Differential equations with a known solution: points for training, points for the metric.

Every step sees all points, and every run has the same points. Nothing is read from a file.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eshampoo.lab.data import Batch, seeded

ORIGIN = "in closed form, without data"
SPEED = 40  # of the convection: how far u moves in a unit of time


@dataclass(frozen=True)
class Points:
    """One training example: all points, with the conditions that must hold there."""

    train: Batch
    test: Batch  # points and the solution there
    outputs: int = 1

    def __len__(self) -> int:
        return 1

    def batch(self, indices: Tensor, generator: torch.Generator) -> Batch:
        return self.train

    def validation(self) -> Iterator[Batch]:
        yield self.test


def locate_nothing(path: Path | None) -> None:
    """Find nothing, because there is nothing to read."""


def uniform(number: int, seed: int) -> Tensor:
    """Return random points of the unit square."""
    return torch.rand(number, 2, generator=seeded(seed), dtype=torch.float64)


def load_poisson(path: Path | None, *, interior: int, boundary: int, test: int) -> Points:
    """−Δu = 2π² sin πx sin πy on the unit square, u = 0 on its boundary: u = sin πx sin πy."""
    inside, edge, where = uniform(interior, 0), uniform(boundary, 1), uniform(test, 2)
    side = torch.arange(boundary) % 4
    edge[side == 0, 0], edge[side == 1, 0] = 0.0, 1.0
    edge[side == 2, 1], edge[side == 3, 1] = 0.0, 1.0
    source = 2 * math.pi**2 * torch.sin(math.pi * inside).prod(1)
    solution = torch.sin(math.pi * where).prod(1)
    return Points(
        (inside, source, edge, torch.zeros(boundary, dtype=edge.dtype)), (where, solution)
    )


def load_convection(
    path: Path | None, *, interior: int, boundary: int, initial: int, test: int
) -> Points:
    """u_t + 40 u_x = 0 for x in [0, 2π], t in [0, 1], periodic in x, u(x, 0) = sin x.

    The solution is sin(x − 40 t). Points are (x, t).
    """
    size = torch.tensor([2 * math.pi, 1.0], dtype=torch.float64)
    inside, where = uniform(interior, 0) * size, uniform(test, 2) * size
    left, start = uniform(boundary, 1) * size, uniform(initial, 3) * size
    left[:, 0], start[:, 1] = 0.0, 0.0
    right = left + size * torch.tensor([1.0, 0.0])
    solution = torch.sin(where[:, 0] - SPEED * where[:, 1])
    return Points((inside, left, right, start, torch.sin(start[:, 0])), (where, solution))
