"""In AdamW's place, at its rate and untuned: no loss is above AdamW's after the first steps."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from eshampoo import EShampoo


def classifier():
    """README's net on random data."""
    net = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10))
    X, y = torch.randn(256, 64), torch.randint(10, (256,))
    return [*net.parameters()], lambda: cross_entropy(net(X), y)


def regression():
    net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
    net.append(nn.Linear(32, 4))
    X = torch.randn(256, 16)
    Y = torch.tanh(X @ torch.randn(16, 4) / 4)
    return [*net.parameters()], lambda: mse_loss(net(X), Y)


def adapters(rank):
    """LoRA with PEFT beside a frozen Llama, on sequences of a rule that each token has."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4))
    targets = ["q_proj", "v_proj", "up_proj", "down_proj"]
    model = get_peft_model(llama, LoraConfig(r=rank, target_modules=targets))
    jump, tokens = torch.randint(1, 4, (128,)), [torch.randint(128, (32, 1))]
    for _ in range(31):
        tokens.append((tokens[-1] + jump[tokens[-1]]) % 128)
    batch = torch.cat(tokens, 1)
    return [*model.parameters()], lambda: model(input_ids=batch, labels=batch).loss


PROBLEMS = {"a classifier": classifier, "a regression": regression}


def loss_after(steps, optimizer_class, problem, lr, seed):
    torch.manual_seed(seed)
    params, loss = problem()
    optimizer = optimizer_class(params, lr=lr)  # frozen parameters get no state
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    return loss().item()


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("lr", [3e-3, 1e-2])
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_at_adamws_rate_the_loss_is_not_above_adamws(problem, lr, seed):
    classes = (EShampoo, torch.optim.AdamW)
    ours, theirs = (loss_after(100, cls, problem, lr, seed) for cls in classes)
    assert ours <= theirs


@pytest.mark.slow  # for its imports
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("lr", [3e-3, 1e-2])
@pytest.mark.parametrize("rank", [4, 16])
def test_with_lora_on_a_llama_the_loss_is_not_above_adamws_after_40_steps(rank, lr, seed):
    classes = (EShampoo, torch.optim.AdamW)
    ours, theirs = (loss_after(40, cls, lambda: adapters(rank), lr, seed) for cls in classes)
    assert ours <= theirs
