"""Param groups by kind: Adam for embeddings, no decay for vectors, another rate for the head.

python examples/train_groups.py
"""

import torch
from torch import nn

from eshampoo import EShampoo, parameter_groups

TOKENS = 64


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(TOKENS, 32), nn.Flatten(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, TOKENS)
    )
    groups = parameter_groups(
        model,
        {
            "embeddings": {"matrices": "adam", "weight_decay": 0.0},
            "vectors": {"weight_decay": 0.0},
            "head": {"lr": 5e-3},
        },
    )
    optimizer = EShampoo(groups, lr=1e-2, weight_decay=0.01)
    criterion = nn.CrossEntropyLoss()
    losses: list[float] = []
    for _ in range(100):
        x = torch.randint(TOKENS, (128, 2))
        loss = criterion(model(x), (x[:, 0] + 1) % TOKENS)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert {report.name for report in optimizer.basis_report()} == {"2.weight", "4.weight"}
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
