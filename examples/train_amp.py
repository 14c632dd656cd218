"""Mixed precision: bfloat16 autocast, and float16 with a GradScaler.

python examples/train_amp.py
"""

import torch
from torch import Tensor, nn

from eshampoo import EShampoo

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Points, and the function of them to learn."""
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(step)).to(DEVICE)
    return x, torch.sin(x) + x.roll(1, dims=1)


def train(dtype: torch.dtype) -> None:
    """Train with products in one dtype; weights and the optimizer's state stay float32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 80), nn.GELU(), nn.Linear(80, 16)).to(DEVICE)
    optimizer = EShampoo(model.named_parameters(), lr=1e-2)
    # float16 needs a scale; bfloat16 has the range of float32.
    scaler = torch.amp.GradScaler(DEVICE, enabled=dtype == torch.float16)
    losses: list[float] = []
    for step in range(100):
        x, y = batch(step)
        with torch.autocast(DEVICE, dtype=dtype):
            loss = (model(x).float() - y).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        scaler.step(optimizer)  # skips the whole step if a gradient is not finite
        scaler.update()
        losses.append(loss.item())
    print(f"{dtype}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")


def main() -> None:
    train(torch.bfloat16)
    train(torch.float16)


if __name__ == "__main__":
    main()
