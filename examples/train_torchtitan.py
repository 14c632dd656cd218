"""torchtitan: a stand-in for its container of optimizers, which saves a flat state on FSDP2.

    torchrun --standalone --nproc-per-node 2 examples/train_torchtitan.py

torchtitan itself is not needed: `Container` makes the calls that torchtitan's container makes.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from eshampoo import EShampoo

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Points and the function to learn; every rank draws its own."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    x = torch.randn(32, 16, generator=generator)
    return x, torch.sin(x) + x.roll(1, dims=1)


class Container(Stateful):
    """An optimizer for each part of a model, and one flat state for all of them."""

    def __init__(self, parts: list[nn.Module], **keywords: Any) -> None:  # noqa: ANN401
        self.parts = parts
        self.optimizers = [
            # torchtitan writes into the groups how to run its kernels; here as "for-loop".
            EShampoo([_group(part) | {"fused": False, "foreach": False} | keywords])
            for part in parts
        ]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        flat: dict[str, Any] = {}
        for part, optimizer in zip(self.parts, self.optimizers, strict=True):
            flat.update(get_optimizer_state_dict(part, optimizer, options=FLAT))
        return flat

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, optimizer in zip(self.parts, self.optimizers, strict=True):
            set_optimizer_state_dict(part, optimizer, optim_state_dict=state_dict, options=FLAT)


def _group(part: nn.Module) -> dict[str, Any]:
    names, params = zip(*part.named_parameters(), strict=True)
    return {"params": list(params), "param_names": list(names)}


def make() -> tuple[nn.Module, Container]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 80), nn.GELU(), nn.Linear(80, 80), nn.GELU(), nn.Linear(80, 16)
    )
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, Container([model], lr=1e-2)


def train(model: nn.Module, optimizers: Container, start: int, stop: int) -> list[float]:
    losses: list[float] = []
    for step in range(start, stop):
        x, y = batch(step)
        loss = (model(x) - y).square().mean()
        optimizers.zero_grad()
        loss.backward()
        optimizers.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    dist.init_process_group("gloo")  # "nccl" and a mesh of "cuda" on GPUs
    where = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(where)
    folder = Path(where[0])

    model, optimizers = make()
    first = train(model, optimizers, 0, 50)
    save({"model": model.state_dict(), "optimizer": optimizers.state_dict()}, checkpoint_id=folder)
    expected = train(model, optimizers, 50, 100)

    model, optimizers = make()
    saved = {"model": model.state_dict(), "optimizer": optimizers.state_dict()}
    load(saved, checkpoint_id=folder)
    model.load_state_dict(saved["model"])
    optimizers.load_state_dict(saved["optimizer"])
    assert train(model, optimizers, 50, 100) == expected  # bit for bit
    if dist.get_rank() == 0:
        print(f"loss {first[0]:.4f} -> {expected[-1]:.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
