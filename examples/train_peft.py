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
    # Frozen parameters have no state. The long side of an adapter has no basis, which would be far
    # larger than the adapter (docs/recipes.md).
    optimizer = EShampoo(model.named_parameters(), lr=2e-2)
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
