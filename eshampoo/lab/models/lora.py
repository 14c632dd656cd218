"""Low-rank adapters (LoRA): the weights stay, and a product of two thin matrices is added."""

import torch
from torch import Tensor, nn

SCALE = 2.0  # of the product; LoRA's α over its rank


class LowRank(nn.Module):
    """W x + 2 B A x with W frozen; B starts at zero, so that the model starts as it was."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear
        self.down = nn.Parameter(torch.randn(rank, linear.in_features) / linear.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) + SCALE * (x @ self.down.T @ self.up.T)
        return out


def adapt_(model: nn.Module, layers: nn.Module, rank: int) -> None:
    """Freeze a model, and give every linear layer inside ``layers`` an adapter."""
    model.requires_grad_(False)
    for parent in [*layers.modules()]:
        for name, child in [*parent.named_children()]:
            if isinstance(child, nn.Linear):
                setattr(parent, name, LowRank(child, rank))
