"""Optimizer time over the first 280 steps of a small ViT on real images, beside a plain step."""

import io
import tarfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import timing
from .contenders import NEVER

WIDTH, DEPTH, PATCH, SIZE, BATCH, STEPS = 128, 4, 8, 48, 64, 280
ARCHIVE = "imagewoof2_s96.tar"


class Block(nn.Module):
    """Attention and MLP, each after a LayerNorm."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*qkv.unbind(0))
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Patches, blocks, mean, head."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(3 * PATCH**2, WIDTH)
        self.position = nn.Buffer(torch.randn((SIZE // PATCH) ** 2, WIDTH) * 0.02)
        self.blocks = nn.Sequential(*(Block(WIDTH) for _ in range(DEPTH)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = nn.functional.unfold(images, PATCH, stride=PATCH).transpose(1, 2)
        x = self.blocks(self.patches(x) + self.position)
        return self.head(self.norm(x).mean(1))  # type: ignore[no-any-return]


def images(directory: Path, count: int) -> tuple[Tensor, Tensor]:
    """Training images [count, 3, SIZE, SIZE] evenly from the archive, and their classes."""
    from PIL import Image

    with tarfile.open(directory / ARCHIVE) as tar:
        members = [m for m in tar.getmembers() if m.name.startswith("train/") and m.isfile()]
        classes = sorted({m.name.split("/")[1] for m in members})
        chosen = members[:: max(1, len(members) // count)][:count]
        pixels, labels = [], []
        for member in chosen:
            file = tar.extractfile(member)
            assert file is not None
            image = Image.open(io.BytesIO(file.read())).convert("RGB")
            side = min(image.size)
            left, top = (image.width - side) // 2, (image.height - side) // 2
            image = image.crop((left, top, left + side, top + side)).resize((SIZE, SIZE))
            flat = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
            pixels.append(flat.view(SIZE, SIZE, 3).permute(2, 0, 1))
            labels.append(classes.index(member.name.split("/")[1]))
    return torch.stack(pixels).float().div_(127.5).sub_(1.0), torch.tensor(labels)


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Train with F = 1, τ = 0.1, partial; a twin takes plain steps on the same gradients."""
    from eshampoo import EShampoo

    torch.manual_seed(0)
    model = ViT()
    params = list(model.parameters())
    twins = [p.detach().clone().requires_grad_() for p in params]
    optimizer = EShampoo(params, frequency=1, tau=0.1, solver="partial")
    plain = EShampoo(twins, frequency=NEVER)
    X, y = images(Path(spec["data"]), 4096)
    clocks = {"adaptive": timing.Clock(), "plain": timing.Clock()}
    losses = []
    for _ in range(spec.get("steps", STEPS)):
        batch = torch.randint(len(X), (BATCH,))
        loss = nn.functional.cross_entropy(model(X[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for p, twin in zip(params, twins, strict=True):
            twin.grad = None if p.grad is None else p.grad.clone()
        clocks["adaptive"].time(optimizer.step)
        clocks["plain"].time(plain.step)
        losses.append(loss.item())
    tail = losses[-30:]
    return {name: clock.summary() for name, clock in clocks.items()} | {
        "basis_computations": optimizer.basis_computations,
        "first_loss": losses[0],
        "last_loss": sum(tail) / len(tail),
        "steps": len(losses),
    }
