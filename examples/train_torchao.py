"""torchao's CPU offload: the host keeps the optimizer's state and takes its steps.

    python examples/train_torchao.py

torchao offloads only from CUDA and XPU. Without such a device, this trains without offload.
"""

import torch
from torch import Tensor, nn
from torchao.optim import CPUOffloadOptimizer

from eshampoo import EShampoo

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Points, and the function of them to learn."""
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(step)).to(DEVICE)
    return x, torch.sin(x) + x.roll(1, dims=1)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    if DEVICE == "cpu":
        print("there is no device to offload from")
        return EShampoo(model.parameters(), lr=1e-2)
    # One EShampoo for each parameter of at least `minimal_size` elements, and one for the rest.
    offloaded: torch.optim.Optimizer = CPUOffloadOptimizer(model.parameters(), EShampoo, lr=1e-2)
    return offloaded


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 80), nn.GELU(), nn.Linear(80, 80), nn.GELU(), nn.Linear(80, 16)
    )
    optimizer = make_optimizer(model.to(DEVICE))
    losses: list[float] = []
    for step in range(100):
        x, y = batch(step)
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
