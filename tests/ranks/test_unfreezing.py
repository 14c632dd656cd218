"""Parameters that are frozen at first, on several ranks."""

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from one_process import EXACT, SOME, require, sharded
from problems import STEPS, make, optimizer, train
from saves import HALF, load_, state_of
from torch import nn

FROZEN = ("embedding", "down")


def freeze(model, frozen=True):
    for name in FROZEN:
        getattr(model, name).requires_grad_(not frozen)
    return model


def one_process(method):
    """The parameters of one process that unfreezes at half; only on rank 0, which compares."""
    if dist.get_rank() > 0:
        return {}
    model = freeze(make())
    one = optimizer(method, model.named_parameters())
    train(model, one, range(HALF))
    freeze(model, False)
    train(model, one, range(HALF, STEPS))
    return {name: p.detach() for name, p in model.named_parameters()}


def unfrozen(world, build, method, **more):
    """A run that unfreezes at half, and its distance from one process."""
    inner = freeze(make())
    model = build(inner)
    ours = optimizer(method, model.named_parameters(), **more)
    train(model, ours, range(HALF), world.rank, world.size, inner)
    assert [p in ours.state for p in inner.down.parameters()] == [False, False]
    freeze(inner, False)
    # Wrappers look at what requires a gradient only once.
    model = build(inner) if isinstance(model, nn.parallel.DistributedDataParallel) else model
    train(model, ours, range(HALF, STEPS), world.rank, world.size, inner)
    return require(model.named_parameters(), one_process(method), EXACT, method)


@pytest.mark.ranks(2)
def test_a_sharded_model_that_unfreezes_is_that_of_one_process(world):
    return [unfrozen(world, lambda m: sharded(m, world.mesh()), method) for method in SOME]


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_a_model_under_ddp_that_unfreezes_is_that_of_one_process(world):
    ddp, group = nn.parallel.DistributedDataParallel, dist.group.WORLD
    return [unfrozen(world, ddp, method, process_group=group) for method in SOME]


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_checkpoint_holds_what_was_trained_and_continues(world, tmp_path, when):
    model = freeze(sharded(make(), world.mesh()))
    ours = optimizer("EShampoo", model.named_parameters())
    train(model, ours, range(HALF), world.rank, world.size)
    middle = HALF if when == "before" else HALF + 4
    if when == "after":
        freeze(model, False)
        train(model, ours, range(HALF, middle), world.rank, world.size)
    saved = state_of(model, ours)
    names = {name for name in saved["optimizer"]["state"] if name.startswith(FROZEN)}
    assert bool(names) == (when == "after")
    dcp.save(saved, checkpoint_id=tmp_path)
    model = freeze(sharded(make(seed=5), world.mesh()), when == "before")
    ours = optimizer("EShampoo", model.named_parameters())
    load_(model, ours, tmp_path)
    freeze(model, False)
    train(model, ours, range(middle, STEPS), world.rank, world.size)
    return require(model.named_parameters(), one_process("EShampoo"), EXACT, when)
