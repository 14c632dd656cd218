"""Gradient accumulation: small batches add up to a large one, and then the optimizer steps once.

python examples/train_accumulation.py
"""

import torch
from torch import Tensor, nn

from eshampoo import EShampoo

PARTS = 4  # small batches per step


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Points, and the function of them to learn."""
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(step))
    return x, torch.sin(x) + x.roll(1, dims=1)


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 80), nn.GELU(), nn.Linear(80, 16))
    optimizer = EShampoo(model.named_parameters(), lr=1e-2)
    totals: list[float] = []
    for step in range(100):
        x, y = batch(step)
        optimizer.zero_grad()
        total = 0.0
        for small_x, small_y in zip(x.chunk(PARTS), y.chunk(PARTS), strict=True):
            loss = (model(small_x) - small_y).square().mean() / PARTS  # gradients add up to a mean
            loss.backward()
            total += loss.item()
        optimizer.step()
        totals.append(total)
    # The optimizer counts its own steps, not small batches.
    assert {int(t) for state in optimizer.state.values() for t in state["step"].view(-1)} == {100}
    print(f"loss {totals[0]:.4f} -> {totals[-1]:.4f}")


if __name__ == "__main__":
    main()
