"""From AdamW to EShampoo in the middle of a run; moments, step and learning rate carry over.

python examples/train_switch.py
"""

import torch
from torch import Tensor, nn

from eshampoo import EShampoo


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Points, and the function of them to learn."""
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(step))
    return x, torch.sin(x) + x.roll(1, dims=1)


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 80), nn.GELU(), nn.Linear(80, 16))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    for step in range(100):
        if step == 30:
            adamw = optimizer.state_dict()  # or torch.load(…) of a checkpoint
            optimizer = EShampoo(model.named_parameters())
            optimizer.load_state_dict(adamw)  # and its lr, betas, eps and weight_decay
        x, y = batch(step)
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert optimizer.param_groups[0]["lr"] == 1e-2
    print(f"AdamW: loss {losses[0]:.4f} -> {losses[29]:.4f}")
    print(f"EShampoo: loss {losses[30]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
