"""A multilayer perceptron with tanh, in double precision, for differential equations."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


class TanhMLP(nn.Module):
    """Linear layers with tanh between them, from points in the plane to ``outputs`` numbers.

    The loss contains second derivatives with respect to the points, and its residuals are small.
    Both need double precision.
    """

    def __init__(self, outputs: int, *, widths: Sequence[int]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in pairwise([2, *widths]):
            layers += [nn.Linear(before, after, dtype=torch.float64), nn.Tanh()]
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], outputs, dtype=torch.float64))

    def forward(self, points: Tensor) -> Tensor:
        out: Tensor = self.layers(points)
        return out
