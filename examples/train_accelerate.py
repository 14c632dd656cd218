"""Accelerate: one process, DDP or FSDP2.

python examples/train_accelerate.py
torchrun --standalone --nproc-per-node 2 examples/train_accelerate.py
torchrun --standalone --nproc-per-node 2 examples/train_accelerate.py --shard
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import (
    Accelerator,
    DistributedType,
    FullyShardedDataParallelPlugin,
    PartialState,
)
from torch import Tensor, nn

from eshampoo import EShampoo


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Points and the function to learn; every rank draws its own."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(32, 16, generator=generator)
    return x, torch.sin(x) + x.roll(1, dims=1)


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 80), nn.GELU(), nn.Linear(80, 80), nn.GELU(), nn.Linear(80, 16)
    )


def make_accelerator(shard: bool) -> Accelerator:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if shard else None
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), fsdp_plugin=plugin)
    if shard and accelerator.device.type == "cpu":
        # Accelerate accepts the plugin only on GPUs; on a CPU we tell its states ourselves.
        PartialState().distributed_type = DistributedType.FSDP
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    return accelerator


def train(
    accelerator: Accelerator, steps: int, start: int = 0, folder: Path | None = None
) -> tuple[nn.Module, list[float]]:
    """Train from the start, or from what the folder holds; return the model and the losses."""
    # With DDP, a group lets the ranks share the optimizer's work and state; FSDP2 needs none.
    alone = accelerator.num_processes == 1 or accelerator.is_fsdp2
    group = None if alone else dist.group.WORLD

    model = small_model()
    optimizer = EShampoo(model.named_parameters(), lr=1e-2, process_group=group)
    model, optimizer = accelerator.prepare(model, optimizer)
    if start > 0:
        accelerator.load_state(str(folder))

    losses: list[float] = []
    for step in range(start, steps):
        x, y = batch(step, accelerator.process_index)
        loss = (model(x.to(accelerator.device)) - y.to(accelerator.device)).square().mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())

    if folder is not None and start == 0:
        accelerator.save_state(str(folder))  # on every rank
    return model, losses


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shard", action="store_true", help="FSDP2 instead of DDP")
    accelerator = make_accelerator(parser.parse_args().shard)
    _, losses = train(accelerator, 100)
    accelerator.print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
