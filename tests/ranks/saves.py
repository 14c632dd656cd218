"""Checkpoints of runs on several ranks: made in one world, taken up in another."""

import json

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from one_process import METHODS, kind_for, sharded
from problems import STEPS, full, make, optimizer, train
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

HALF = STEPS // 2 + 2
SAVED = (*METHODS, "CASPR", "one side", "rows", "Muon", "observed")


def state_of(model, ours, **options):
    """What DCP saves and fills."""
    states = get_state_dict(model, ours, options=StateDictOptions(**options))
    return dict(zip(("model", "optimizer"), states, strict=True))


def values_of(model):
    """All of every parameter, on every rank."""
    return {name: full(p) for name, p in model.named_parameters()}


def fresh(world, method="EShampoo"):
    """A sharded model with other values, and its optimizer."""
    model = sharded(make(kind_for(method), seed=5), world.mesh())
    return model, optimizer(method, model.named_parameters())


def load_(model, ours, path):
    """Fill a model and its optimizer from a checkpoint."""
    state = state_of(model, ours)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model, ours, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


def loaded(world, path, method="EShampoo"):
    """A sharded model and its optimizer, taken up from a checkpoint."""
    model, ours = fresh(world, method)
    load_(model, ours, path)
    return model, ours


def train_to(world, model, ours, steps, path):
    """Take the steps of a range, then save."""
    train(model, ours, steps, world.rank, world.size)
    dcp.save(state_of(model, ours), checkpoint_id=path)


def start(world, method, steps, path):
    """A run from its beginning, which ends in a checkpoint."""
    model = sharded(make(kind_for(method)), world.mesh())
    ours = optimizer(method, model.named_parameters())
    train_to(world, model, ours, steps, path)
    return model, ours


# -------------------------------------------------------------------- what tests start from


def save_halfway(world, folder):
    """Runs of all rows saved at half; EShampoo's also as one plain file, and asynchronously
    while training goes on. Every rank writes down which entries it has saved."""
    for method in SAVED:
        model, ours = start(world, method, range(HALF), folder / f"half-{method}")
        entries = {
            f"{p}.{name}": f"{tuple(value.shape)} {value.dtype} {type(value).__name__}"
            for p, values in state_of(model, ours)["optimizer"]["state"].items()
            for name, value in values.items()
        }
        (folder / f"entries-{method}-{world.rank}.json").write_text(json.dumps(entries))
        if method == "EShampoo":
            gathered = state_of(model, ours, full_state_dict=True, cpu_offload=True)
            if world.rank == 0:
                torch.save(gathered, folder / "half.pt")
            # The saving thread talks to the other ranks meanwhile, so it has a group of its own.
            saving = dcp.async_save(
                state_of(model, ours),
                checkpoint_id=folder / "async",
                process_group=dist.new_group(),
            )
            train(model, ours, range(HALF, STEPS), world.rank, world.size)
            saving.result()
            values = values_of(model)
            if world.rank == 0:
                torch.save(values, folder / "end.pt")
    dist.barrier()


def first_third(world, folder):
    start(world, "EShampoo", range(11), folder / "third")


def second_third(world, folder):
    model, ours = loaded(world, folder / "third")
    train_to(world, model, ours, range(11, 20), folder / "two-thirds")


def save_lean(world, folder):
    start(world, "lean", range(HALF), folder / "lean")


def undisturbed(world, folder):
    """What `killed.py` must end with, whatever happens to it."""
    model = sharded(make(), world.mesh())
    train(model, optimizer("EShampoo", model.named_parameters()), range(20), world.rank, world.size)
    values = values_of(model)
    if world.rank == 0:
        torch.save({"values": values, "start": 0}, folder / "undisturbed.pt")
