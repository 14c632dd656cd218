"""SimpleViT (Beyer et al., "Better plain ViT baselines"): no class token, fixed positions."""

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, unfold


class Attention(nn.Module):
    """Pre-norm multi-head self-attention without biases."""

    def __init__(self, width: int, heads: int, affine: bool) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width, elementwise_affine=affine)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class FeedForward(nn.Sequential):
    """Pre-norm two-layer perceptron."""

    def __init__(self, width: int, hidden: int, affine: bool) -> None:
        super().__init__(
            nn.LayerNorm(width, elementwise_affine=affine),
            nn.Linear(width, hidden),
            nn.GELU(),
            nn.Linear(hidden, width),
        )


class SimpleViT(nn.Module):
    """Patches, ``depth`` blocks of attention and perceptron, mean over the patches, linear head.

    Layer norms have a scale and a shift if ``affine``.
    """

    def __init__(
        self,
        classes: int,
        *,
        size: int,
        patch: int,
        width: int,
        depth: int,
        heads: int,
        hidden: int,
        channels: int = 3,
        affine: bool = True,
    ) -> None:
        super().__init__()
        self.patch = patch
        values = channels * patch * patch
        self.embed = nn.Linear(values, width)
        self.attention = nn.ModuleList(Attention(width, heads, affine) for _ in range(depth))
        self.feed_forward = nn.ModuleList(FeedForward(width, hidden, affine) for _ in range(depth))
        self.norm = nn.LayerNorm(width, elementwise_affine=affine)
        self.head = nn.Linear(width, classes)
        self.positions: Tensor
        self.register_buffer("positions", sine_positions(size // patch, width), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(unfold(images, self.patch, stride=self.patch).transpose(1, 2))
        x = x + self.positions
        for attention, feed_forward in zip(self.attention, self.feed_forward, strict=True):
            x = x + attention(x)
            x = x + feed_forward(x)
        logits: Tensor = self.head(self.norm(x).mean(1))
        return logits


def sine_positions(side: int, width: int) -> Tensor:
    """Return sines and cosines of row and column at width/4 frequencies from 1 to 1/10000."""
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    frequencies = 10000 ** -(torch.arange(width // 4) / (width // 4 - 1))
    angles = [where.reshape(-1, 1) * frequencies for where in (columns, rows)]
    return torch.cat([wave(angle) for angle in angles for wave in (torch.sin, torch.cos)], 1)
