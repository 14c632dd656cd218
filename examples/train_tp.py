"""Tensor parallelism: layers are cut over the ranks, and the optimizer needs no setting.

torchrun --standalone --nproc-per-node 2 examples/train_tp.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from eshampoo import EShampoo


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Points, the same on all ranks, and the function of them to learn."""
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(step))
    return x, torch.sin(x) + x.roll(1, dims=1)


def main() -> None:
    dist.init_process_group("gloo")  # "nccl" and a mesh of "cuda" on GPUs
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 80), nn.GELU(), nn.Linear(80, 16))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = EShampoo(model.named_parameters(), lr=1e-2)
    losses: list[float] = []
    for step in range(100):
        x, y = batch(step)
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    dist.barrier()  # no rank closes its connections while another still reads from them
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
