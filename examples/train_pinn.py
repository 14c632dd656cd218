"""A physics-informed network: u″ = −π² sin πx with u(0) = u(1) = 0, on points of an interval.

python examples/train_pinn.py
"""

import math

import torch
from torch import Tensor, nn

from eshampoo import EShampoo


def residual(model: nn.Module, x: Tensor) -> Tensor:
    """How far u″ is from −π² sin πx; gradients of gradients, in float64."""
    u = x * (1 - x) * model(x)  # zero at both ends
    (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    return second + math.pi**2 * torch.sin(math.pi * x)


def main() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)]
    model = nn.Sequential(*layers).double()
    x = torch.linspace(0, 1, 65, dtype=torch.float64).view(-1, 1).requires_grad_()
    # The gradients have no noise, so the default factors="gram" is the better one here.
    optimizer = EShampoo(model.named_parameters(), lr=1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)
    losses: list[float] = []
    for _ in range(300):
        loss = residual(model, x).square().mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    with torch.no_grad():
        error = (x * (1 - x) * model(x) - torch.sin(math.pi * x)).abs().max().item()
    assert error < 1e-2
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.6f}, largest error {error:.1e}")


if __name__ == "__main__":
    main()
