"""The Llama 3 architecture: RMS norm, rotary positions, SwiGLU, grouped-query attention."""

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu


def rotary_angles(length: int, width: int) -> Tensor:
    """Return angles t · 500000^(-2i/width) of position t, pair i, as complex numbers."""
    frequencies = 500_000.0 ** -(torch.arange(0, width, 2) / width)
    angles = torch.arange(length)[:, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()], -1)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn consecutive pairs of the last dimension by the angle of their position."""
    first, second = torch.unflatten(x, -1, (-1, 2)).unbind(-1)
    cos, sin = angles[: x.shape[-2]].unbind(-1)
    return torch.stack([first * cos - second * sin, first * sin + second * cos], -1).flatten(-2)


class Attention(nn.Module):
    """Causal attention in which groups of query heads share a key and value head."""

    def __init__(self, width: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, key_heads * self.size, bias=False)
        self.value = nn.Linear(width, key_heads * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        def heads(projected: Tensor) -> Tensor:
            return projected.view(*x.shape[:2], -1, self.size).transpose(1, 2)

        q, k = rotate(heads(self.query(x)), angles), rotate(heads(self.key(x)), angles)
        v = heads(self.value(x))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(x.shape))
        return out


class SwiGLU(nn.Module):
    """W₂ (silu(W₁ x) ⊙ W₃ x)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """Attention and SwiGLU, each behind an RMS norm and around a skip connection."""

    def __init__(self, width: int, heads: int, key_heads: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=1e-5)
        self.attention = Attention(width, heads, key_heads)
        self.feed_forward_norm = nn.RMSNorm(width, eps=1e-5)
        self.feed_forward = SwiGLU(width, hidden)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class Llama(nn.Module):
    """Token embedding, ``depth`` blocks, norm, and a head that is not tied to the embedding."""

    def __init__(
        self,
        vocabulary: int,
        *,
        width: int,
        depth: int,
        heads: int,
        key_heads: int,
        hidden: int,
        length: int,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, key_heads, hidden) for _ in range(depth))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.angles: Tensor
        self.register_buffer("angles", rotary_angles(length, width // heads), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # layers that add to the residual stream start smaller, the more of them there are
                writes = name.endswith(("out.weight", "down.weight"))
                std = 0.02 / (2 * depth) ** 0.5 if writes else 0.02
                nn.init.normal_(parameter, std=std)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.angles)
        logits: Tensor = self.head(self.norm(x))
        return logits
