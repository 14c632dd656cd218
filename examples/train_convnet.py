"""A convolutional network with channels last in memory.

python examples/train_convnet.py
"""

import torch
from torch import nn

from eshampoo import EShampoo

LAST = torch.channels_last


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 4),
    ).to(memory_format=LAST)  # type: ignore[call-overload]
    # "kernel" joins the kernel to the inputs, [out, in·3·3]: two bases per layer instead of four.
    optimizer = EShampoo(model.named_parameters(), lr=3e-3, merge_dims="kernel")
    criterion = nn.CrossEntropyLoss()
    losses: list[float] = []
    for _ in range(60):
        y = torch.randint(4, (32,))
        x = torch.randn(32, 3, 12, 12)
        x[torch.arange(32), :, 3 * y, :] += 2  # a bright row, which says the class
        loss = criterion(model(x.to(memory_format=LAST)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(p.is_contiguous(memory_format=LAST) for p in model.parameters() if p.dim() == 4)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
