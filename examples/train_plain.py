"""Plain PyTorch: only the line that builds the optimizer differs from AdamW.

python examples/train_plain.py
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eshampoo import EShampoo


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Points, and the function of them to learn."""
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(step))
    return x, torch.sin(x) + x.roll(1, dims=1)


def train(path: Path, steps: int, stop: int | None = None) -> list[float]:
    """Train from the start or from a checkpoint, to the end or to `stop`; return the losses."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 80), nn.GELU(), nn.Linear(80, 80), nn.GELU(), nn.Linear(80, 16)
    )
    optimizer = EShampoo(model.named_parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    losses: list[float] = []
    if path.exists():
        saved = torch.load(path, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        losses = saved["losses"]

    for step in range(len(losses), stop or steps):
        x, y = batch(step)
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())

    states = {name: part.state_dict() for name, part in parts.items()}
    torch.save({**states, "losses": losses}, path)
    return losses


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder, "stopped.pt"), steps=100, stop=50)
        resumed = train(Path(folder, "stopped.pt"), steps=100)
        assert resumed == train(Path(folder, "through.pt"), steps=100)  # bit for bit
    print(f"loss {resumed[0]:.4f} -> {resumed[-1]:.4f}")


if __name__ == "__main__":
    main()
