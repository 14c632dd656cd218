"""The loop of nanoGPT: a compiled model, accumulation, clipping, warm-up and cosine decay.

    python examples/train_nanogpt.py
    python examples/train_nanogpt.py --backend aot_eager   # without a compiler of C++

Only `configure_optimizer` differs from a loop with AdamW, and only by the name of the class.
"""

import argparse
import math

import torch
from torch import Tensor, nn

from eshampoo import EShampoo

TOKENS, LENGTH, WIDTH = 32, 16, 48
STEPS, WARMUP, PARTS, CLIP, RATE = 100, 10, 2, 1.0, 1e-2


class GPT(nn.Module):
    """Attention and a feed-forward network, with the head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.lm_head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.lm_head.weight = self.wte.weight
        nn.init.normal_(self.wte.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe.weight
        q, k, v = self.c_attn(self.ln_1(x)).chunk(3, dim=-1)
        x = x + self.c_proj(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        logits: Tensor = self.lm_head(x + self.mlp(self.ln_2(x)))
        return logits


def configure_optimizer(model: nn.Module) -> EShampoo:
    """As in nanoGPT: matrices decay, vectors do not; `fused` is accepted and ignored."""
    named = list(model.named_parameters())
    groups = [
        {"params": [(n, p) for n, p in named if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [(n, p) for n, p in named if p.dim() < 2], "weight_decay": 0.0},
    ]
    return EShampoo(groups, lr=RATE, betas=(0.9, 0.95), fused=True)  # type: ignore[call-arg]


def rate(step: int) -> float:
    if step < WARMUP:
        return RATE * (step + 1) / (WARMUP + 1)
    return 0.1 * RATE + 0.45 * RATE * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="inductor")
    torch.manual_seed(0)
    model = GPT()
    optimizer = configure_optimizer(model)
    compiled = torch.compile(model, backend=parser.parse_args().backend)
    criterion = nn.CrossEntropyLoss()
    losses: list[float] = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        total = 0.0
        for _ in range(PARTS):
            tokens = (torch.randint(TOKENS, (16, 1)) + 3 * torch.arange(LENGTH + 1)) % TOKENS
            logits = compiled(tokens[:, :-1])
            loss = criterion(logits.flatten(0, 1), tokens[:, 1:].flatten())
            (loss / PARTS).backward()
            total += loss.item() / PARTS
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
