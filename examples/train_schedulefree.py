"""Schedule-free training: the wrapper of the package `schedulefree` around EShampoo.

python examples/train_schedulefree.py
"""

from collections import defaultdict
from typing import Any

import torch
from schedulefree import ScheduleFreeWrapper  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn

from eshampoo import EShampoo


class ScheduleFree(ScheduleFreeWrapper):  # type: ignore[misc]
    """The wrapper with a state of its own; EShampoo refuses entries that it does not know."""

    def __init__(self, base: torch.optim.Optimizer, momentum: float = 0.9) -> None:
        super().__init__(base, momentum=momentum)
        self.own: defaultdict[Tensor, dict[str, Tensor]] = defaultdict(dict)

    @property
    def state(self) -> defaultdict[Tensor, dict[str, Tensor]]:
        return self.own

    def state_dict(self) -> dict[str, Any]:
        z = [self.own[p].get("z") for group in self.param_groups for p in group["params"]]
        return {"base": self.base.state_dict(), "z": z, "train_mode": self.train_mode}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict["base"])
        params = [p for group in self.param_groups for p in group["params"]]
        pairs = zip(params, state_dict["z"], strict=True)
        self.own = defaultdict(dict, {p: {"z": z.clone()} for p, z in pairs if z is not None})
        self.train_mode = state_dict["train_mode"]


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Points, and the function of them to learn."""
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(step))
    return x, torch.sin(x) + x.roll(1, dims=1)


def make() -> tuple[nn.Module, ScheduleFree]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 80), nn.GELU(), nn.Linear(80, 16))
    # The wrapper has the momentum, so β1 is 0; there is no schedule, and the rate can be larger.
    return model, ScheduleFree(EShampoo(model.named_parameters(), lr=3e-2, betas=(0.0, 0.95)))


def train(model: nn.Module, optimizer: ScheduleFree, start: int, stop: int) -> list[float]:
    losses = []
    optimizer.train()
    for step in range(start, stop):
        x, y = batch(step)
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    model, optimizer = make()
    losses = train(model, optimizer, 0, 400)
    optimizer.eval()  # the averaged weights, for evaluation and for the checkpoint of the model
    x, y = batch(10_000)
    print(f"loss {losses[0]:.4f} -> {(model(x) - y).square().mean().item():.4f}")


if __name__ == "__main__":
    main()
