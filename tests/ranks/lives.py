"""Lives of a run on several ranks, each ended by a fault or by the end of the run; see soak.py."""

import os
import signal
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from problems import feed, full, optimizer, placed
from torch import nn
from torch.distributed.tensor import Shard

SHAPES = [(9, 8), (7,), (6, 5), (4, 3, 5), (8, 8), (1, 6)]
STEPS, EVERY = 40, 4
FAULTS = ("none", "killed", "out of memory", "other options", "refused state")


def values_at(t):
    """Parameters (t = 0) or the gradients of step t; some have a NaN."""
    generator = torch.Generator().manual_seed(t)
    found = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    if t % 11 == 7:
        found[t % len(SHAPES)].view(-1)[t % 5] = float("nan")
    return found


def begin(method, params, group=None):
    return optimizer(method, params, process_group=group)


def alone(method):
    """Where one process ends that nothing happens to."""
    params = [nn.Parameter(value) for value in values_at(0)]
    ours = begin(method, params)
    for t in range(1, STEPS + 1):
        feed(params, values_at(t))
        ours.step()
    return [p.detach() for p in params]


def newest(folder):
    """The step of the newest complete checkpoint; 0 if there is none."""
    return max((int(path.parent.name) for path in folder.glob("*/.metadata")), default=0)


def live(world, folder, method, sharded, fault, victim, at):
    """Continue from the newest checkpoint until the fault strikes or the run ends.

    What it returns is, on rank 0, the largest difference from `alone`; None before the end.
    """
    warnings.filterwarnings("ignore", ".*had NaN or Inf")
    way, group = ((Shard(0),), None) if sharded else (None, dist.group.WORLD)
    params = placed(values_at(0), [way] * len(SHAPES), world.mesh())
    ours = begin(method, params, group)
    start = newest(folder)
    if start:
        load_(ours, params, folder / f"{start:04}", fault, world.rank == victim)
    for t in range(start + 1, STEPS + 1):
        feed(params, values_at(t))
        if t == at and world.rank == victim:
            strike(fault, ours)
        ours.step()
        if t % EVERY == 0:
            dcp.save(state_of(ours, params), checkpoint_id=folder / f"{t:04}")
    found, expected = [full(p) for p in params], alone(method)
    gaps = [(a - b).abs().max().item() for a, b in zip(found, expected, strict=True)]
    return max(gaps)


def state_of(ours, params):
    values = {str(i): p.detach() for i, p in enumerate(params)}
    return {"params": values, "optimizer": ours.state_dict()}


def load_(ours, params, path, fault, mine):
    """Fill parameters and optimizer; a state that is damaged on one rank is refused by all."""
    state = state_of(ours, params)
    dcp.load(state, checkpoint_id=path)
    if fault == "refused state" and mine:
        value = state["optimizer"]["state"][1]["exp_avg_sq"]
        (value.to_local() if hasattr(value, "to_local") else value).sub_(1e3)
    ours.load_state_dict(state["optimizer"])


def strike(fault, ours):
    """What happens to the victim."""
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "other options":
        ours.param_groups[0]["lr"] = 0.5
    if fault == "out of memory":
        real, torch.bmm = torch.bmm, fails
        try:
            ours.step()
        finally:
            torch.bmm = real


def fails(*args, **kwargs):
    raise MemoryError("out of memory")
