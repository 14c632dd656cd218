"""LoRA with PEFT: only the adapters are trained.

    python examples/train_peft.py

The model is a tiny GPT-2 with random weights, so nothing is downloaded.
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

from eshampoo import EShampoo

TOKENS = 32


def main() -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=TOKENS, n_positions=16, n_embd=64, n_layer=1, n_head=2)
    model = get_peft_model(
        GPT2LMHeadModel(config),
        LoraConfig(r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True),
    )
    # An adapter has a long side and a short one. A basis of the long side would be far larger than
    # the adapter, so that side gets none where it is too long (docs/recipes/peft.md).
    adapters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = EShampoo(adapters, lr=2e-2)
    losses: list[float] = []
    for _ in range(60):
        start = torch.randint(TOKENS, (32, 1))
        tokens = (start + torch.arange(16)) % TOKENS
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all("lora" in str(report.name) for report in optimizer.basis_report())
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
