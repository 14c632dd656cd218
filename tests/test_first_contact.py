"""In AdamW's place, at its rate and untuned: after 100 steps no loss is above AdamW's."""

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
    """LoRA: a frozen layer and two thin matrices beside it."""
    base = nn.Linear(64, 48).requires_grad_(False)
    A, B = nn.Parameter(torch.randn(rank, 64) / 8), nn.Parameter(torch.zeros(48, rank))
    X, W = torch.randn(256, 64), torch.randn(48, 64) / 8
    Y = base(X) + X @ W.T
    return [A, B, *base.parameters()], lambda: mse_loss(base(X) + X @ A.T @ B.T, Y)


PROBLEMS = {
    "a classifier": classifier,
    "a regression": regression,
    "LoRA, r = 4": lambda: adapters(4),
    "LoRA, r = 16": lambda: adapters(16),
}


def loss_after(steps, optimizer_class, problem, lr, seed):
    torch.manual_seed(seed)
    params, loss = problem()
    optimizer = optimizer_class(params, lr=lr)
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
