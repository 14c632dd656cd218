"""A run under torchrun that one rank leaves by SIGKILL: `killed.py FOLDER STEP`.

After a restart it continues from the last checkpoint. Rank 0 writes the parameters at the end.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from one_process import sharded
from problems import make, optimizer, train
from saves import load_, state_of, values_of
from worlds import World

torch.set_num_threads(1)
folder = Path(sys.argv[1])
killed_at = int(sys.argv[2])
first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

dist.init_process_group("gloo")
world = World(dist.get_rank(), dist.get_world_size())
model = sharded(make(), world.mesh())
ours = optimizer("EShampoo", model.named_parameters())
start = 0
saved = sorted(folder.glob("step-*/.metadata"))
if saved:
    path = saved[-1].parent
    load_(model, ours, path)
    start = int(path.name.removeprefix("step-"))
for t in range(start, 20):
    if first_life and t == killed_at and world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    train(model, ours, range(t, t + 1), world.rank, world.size)
    if (t + 1) % 7 == 0:
        dcp.save(state_of(model, ours), checkpoint_id=folder / f"step-{t + 1:03}")
values = values_of(model)
if world.rank == 0:
    torch.save({"values": values, "start": start}, folder / "end.pt")
dist.destroy_process_group()
# After a restart, the interpreter's own way out sometimes aborts in a thread of torch.
os._exit(0)
