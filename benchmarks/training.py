"""Optimizer time over the first 280 steps of a small ViT on real images, beside a plain step."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from eshampoo.lab.data import batch_indices, seeded
from eshampoo.lab.data.images import load_imagewoof
from eshampoo.lab.models.vit import SimpleViT

from . import timing
from .contenders import NEVER

WIDTH, DEPTH, PATCH, SIZE, BATCH, STEPS = 128, 4, 8, 48, 64, 280
STORED = 56
"""Side of an image before the random crop to SIZE; the lab's small run has the same cache."""


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Train with F = 1, τ = 0.1, partial; a twin takes plain steps on the same gradients."""
    from eshampoo import EShampoo

    torch.manual_seed(0)
    data = load_imagewoof(Path(spec["data"]), size=SIZE, stored=STORED)
    model = SimpleViT(
        data.outputs,
        size=SIZE,
        patch=PATCH,
        width=WIDTH,
        depth=DEPTH,
        heads=4,
        hidden=4 * WIDTH,
    )
    params = list(model.parameters())
    twins = [p.detach().clone().requires_grad_() for p in params]
    optimizer = EShampoo(params, frequency=1, tau=0.1, solver="partial", budget=None)
    plain = EShampoo(twins, frequency=NEVER)
    clocks = {"adaptive": timing.Clock(), "plain": timing.Clock()}
    losses = []
    for step in range(spec.get("steps", STEPS)):
        images, labels = data.batch(batch_indices(len(data), BATCH, 0, step), seeded(0, step))
        loss = nn.CrossEntropyLoss()(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
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
