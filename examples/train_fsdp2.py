"""FSDP2 with sharded checkpoints that any number of ranks can read.

    torchrun --standalone --nproc-per-node 2 examples/train_fsdp2.py

Start it again with the same --folder, on as many ranks as you like, and it continues from the last
checkpoint. You tell the optimizer nothing about sharding: the parameters are DTensors.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from eshampoo import EShampoo

TOKENS = 64


class Model(nn.Module):
    """Predicts the token that follows two tokens."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, width)
        self.up = nn.Linear(2 * width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.head = nn.Linear(width, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x).flatten(1)
        logits: Tensor = self.head(self.down(nn.functional.gelu(self.up(h))))
        return logits


def batch(step: int, part: int, parts: int) -> tuple[Tensor, Tensor]:
    """This rank's part of a batch of pairs of tokens, and the first plus one."""
    x = torch.randint(TOKENS, (192, 2), generator=torch.Generator().manual_seed(step))
    return x.chunk(parts)[part], (x[:, 0] + 1).remainder(TOKENS).chunk(parts)[part]


def resume(model: Model, optimizer: EShampoo, folder: Path) -> int:
    """Load the last checkpoint, if there is one; return the step to continue from."""
    # A checkpoint is complete when its metadata is written.
    done = sorted(path.parent for path in folder.glob("step-*/.metadata"))
    if not done:
        return 0
    weights, state = get_state_dict(model, optimizer)
    saved: dict[str, Any] = {"model": weights, "optimizer": state}
    load(saved, checkpoint_id=done[-1])
    set_state_dict(
        model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
    )
    return int(done[-1].name.removeprefix("step-"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/fsdp2"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--stop-after", type=int, help="end early, as if interrupted")
    args = parser.parse_args()

    dist.init_process_group("gloo")  # "nccl" and a mesh of "cuda" on GPUs
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    model = Model()
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = EShampoo(model.parameters(), lr=1e-2)

    start = resume(model, optimizer, args.folder)
    if start > 0 and rank == 0:
        print(f"resumed at step {start}")

    criterion = nn.CrossEntropyLoss()
    for step in range(start, min(args.steps, args.stop_after or args.steps)):
        x, y = batch(step, rank, ranks)
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % args.every == 0:
            weights, state = get_state_dict(model, optimizer)
            folder = args.folder / f"step-{step + 1:06}"
            save({"model": weights, "optimizer": state}, checkpoint_id=folder)
            if rank == 0:
                print(f"step {step + 1} loss {loss.item():.4f}")
    dist.barrier()  # no rank closes its connections while another still reads from them
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
