"""DDP with shared optimizer work: each rank owns a share of the blocks, as in ZeRO-1.

    torchrun --standalone --nproc-per-node 2 examples/train_ddp.py

Start it again with the same --folder, and it continues from the last checkpoint. Only the line that
builds the optimizer differs from AdamW.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from eshampoo import EShampoo


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Points and the function to learn; every rank draws its own."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(64, 16, generator=generator)
    return x, torch.sin(2 * x[:, :4]) + x[:, 4:8] * x[:, 8:12]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/ddp"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--stop-after", type=int, help="end early, as if interrupted")
    args = parser.parse_args()

    dist.init_process_group("gloo")  # "nccl" on GPUs
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4)
    )
    model = DistributedDataParallel(net)
    optimizer = EShampoo(model.parameters(), lr=1e-2, process_group=dist.group.WORLD)

    # Every rank gathers the whole state, so one file holds it and any number of ranks can read it.
    path, start = args.folder / "checkpoint.pt", 0
    if path.exists():
        saved = torch.load(path, weights_only=True)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]
        if rank == 0:
            print(f"resumed at step {start}")

    for step in range(start, min(args.steps, args.stop_after or args.steps)):
        x, y = batch(step, rank)
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % args.every == 0:
            state = optimizer.state_dict()  # on all ranks: they exchange their shares
            if rank == 0:
                args.folder.mkdir(parents=True, exist_ok=True)
                new = path.with_suffix(".new")
                torch.save({"model": net.state_dict(), "optimizer": state, "step": step + 1}, new)
                new.replace(path)  # so that the file is never half written
                print(f"step {step + 1} loss {loss.item():.4f}")
    dist.barrier()  # no rank closes its connections while another still reads from them
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
