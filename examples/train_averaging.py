"""An average of the weights, for evaluation and checkpoints, with `torch.optim.swa_utils`.

python examples/train_averaging.py
"""

from statistics import fmean

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from eshampoo import EShampoo


class Run:
    """A model, its average, and the optimizer, which knows nothing of the average."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 80), nn.GELU(), nn.Linear(80, 16))
        average = get_ema_multi_avg_fn(0.98)  # type: ignore[no-untyped-call]
        self.averaged = AveragedModel(self.model, multi_avg_fn=average)
        self.optimizer = EShampoo(self.model.named_parameters(), lr=1e-2)

    def train(self, start: int, stop: int) -> None:
        for step in range(start, stop):
            x, y = batch(step)
            loss = (self.model(x) - y).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.averaged.update_parameters(self.model)

    def state_dict(self) -> dict[str, dict[str, object]]:
        """What a checkpoint needs: weights, average (with its count of updates) and optimizer."""
        return {
            "model": self.model.state_dict(),
            "averaged": self.averaged.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, saved: dict[str, dict[str, object]]) -> None:
        self.model.load_state_dict(saved["model"])
        self.averaged.load_state_dict(saved["averaged"])
        self.optimizer.load_state_dict(saved["optimizer"])


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Points, and a function of them with noise, which an average of the weights smooths."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(64, 16, generator=generator)
    noise = 0.5 * torch.randn(64, 16, generator=generator)
    return x, torch.sin(x) + x.roll(1, dims=1) + noise


@torch.no_grad()
def evaluate(model: nn.Module) -> float:
    batches = [batch(10_000 + step) for step in range(10)]
    return fmean((model(x) - y).square().mean().item() for x, y in batches)


def main() -> None:
    run = Run()
    before = evaluate(run.model)
    run.train(0, 200)
    print(f"last weights: loss {before:.4f} -> {evaluate(run.model):.4f}")
    print(f"averaged weights: loss {before:.4f} -> {evaluate(run.averaged):.4f}")


if __name__ == "__main__":
    main()
