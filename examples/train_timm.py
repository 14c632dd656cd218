"""timm: register EShampoo, so that `--opt eshampoo` and `create_optimizer_v2` know it.

python examples/train_timm.py
"""

import timm  # pyright: ignore[reportMissingImports]
import torch
from timm.optim import (  # pyright: ignore[reportMissingImports]
    OptimInfo,
    create_optimizer_v2,
)
from timm.optim._optim_factory import (  # pyright: ignore[reportMissingImports]
    default_registry,  # timm's scripts look names up here
)
from torch import nn

from eshampoo import EShampoo, name_parameters


def main() -> None:
    default_registry.register(
        OptimInfo(
            name="eshampoo",
            opt_class=EShampoo,
            description="Adam in the eigenbasis of Shampoo's preconditioner",
            has_betas=True,
            defaults={"tau": 0.05},
        )
    )
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2,
        num_classes=4,
    )  # fmt: skip
    optimizer = create_optimizer_v2(model, opt="eshampoo", lr=3e-3, weight_decay=0.05)
    name_parameters(optimizer, model)  # timm passes groups of parameters without names

    # Images with a bright corner: which one?
    labels = torch.arange(64) % 4
    images = 0.5 * torch.randn(64, 3, 32, 32)
    for image, label in zip(images, labels.tolist(), strict=True):
        image[:, 16 * (label // 2) :, 16 * (label % 2) :][:, :16, :16] += 1
    criterion = nn.CrossEntropyLoss()
    losses: list[float] = []
    for _ in range(30):
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
