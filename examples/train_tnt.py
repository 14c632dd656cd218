"""Tensor Normal Training: Shampoo whose factors approximate the Fisher information.

Its statistics come from gradients with labels sampled from the model, and its exponent is 1.

python examples/train_tnt.py
"""

import torch
from torch import Tensor, nn

from eshampoo import Shampoo

OBSERVE_EVERY = 2  # the Fisher changes slowly, and an observation costs a backward pass


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Points, and which of eight directions each is nearest to."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(64, 16, generator=generator)
    directions = torch.randn(16, 8, generator=torch.Generator().manual_seed(-1))
    return x, (x @ directions).argmax(1)


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 80), nn.GELU(), nn.Linear(80, 8))
    cross_entropy = nn.CrossEntropyLoss()
    optimizer = Shampoo(
        model.named_parameters(),
        lr=3e-2,
        statistics="observe",
        exponent=1.0,
        variant="shampoo2",
        trace_scaling=True,
        eps=1e-3,  # damping of the Fisher
        frequency=5,
        graft=None,
    )
    losses: list[float] = []
    for step in range(100):
        x, y = batch(step)
        if step % OBSERVE_EVERY == 0:
            logits = model(x)
            sampled = torch.multinomial(logits.detach().softmax(1), 1).squeeze(1)
            # Times √B, the gradient's outer product is on average the Fisher of one example.
            optimizer.zero_grad()
            (cross_entropy(logits, sampled) * len(x) ** 0.5).backward()
            optimizer.observe()
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    assert losses[-1] < losses[0] / 2


if __name__ == "__main__":
    main()
