"""Run scenarios in real processes, world after world: `launch.py FOLDER 4:first,second 2:third`.

The modules are imported once and the ranks are forked, which costs a fraction of starting each
rank anew. A scenario is a function of `World` in `scenarios.py`; the ranks of a world run its
scenarios in order and stop at the first that fails.
"""

import multiprocessing
import os
import sys
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ["OMP_NUM_THREADS"] = "1"

import scenarios
import torch
import torch._dynamo  # FSDP2 imports it, which takes seconds: here once for all ranks
import torch.distributed as dist

PATIENCE = 240.0  # seconds for all scenarios of a world
GRACE = 15.0  # seconds for the others once one rank has failed


def work(rank, size, folder, number, names):
    """The life of one rank."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store-{number}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    world = scenarios.World(rank, size, folder)
    for name in names:
        start = time.monotonic()
        try:
            torch.manual_seed(0)
            found = getattr(scenarios, name)(world)
        except BaseException:
            print(f"rank {rank} of {size}, {name}:\n{traceback.format_exc()}", flush=True)
            os._exit(1)
        if rank == 0:
            seconds = time.monotonic() - start
            print(f"{size}:{name} {seconds:.1f} s {found or ''}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


def run(size, folder, number, names):
    """One world; whether all ranks came through."""
    fork = multiprocessing.get_context("fork")
    (folder / f"store-{number}").unlink(missing_ok=True)
    ranks = [
        fork.Process(target=work, args=(rank, size, folder, number, names)) for rank in range(size)
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + PATIENCE
    while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
        wait([process.sentinel for process in ranks if process.is_alive()], timeout=1.0)
        if any(process.exitcode for process in ranks):
            deadline = min(deadline, time.monotonic() + GRACE)
    for rank, process in enumerate(ranks):
        if process.is_alive():
            print(f"rank {rank} of {size} hangs in {', '.join(names)}", flush=True)
            process.kill()
        process.join()
    return all(process.exitcode == 0 for process in ranks)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for number, plan in enumerate(sys.argv[2:]):
        size, _, names = plan.partition(":")
        if not run(int(size), folder, number, names.split(",")):
            sys.exit(1)
