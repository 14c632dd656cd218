"""The rank tests in a short form, for `make check`: everything that two ranks send each other."""

import pytest
import torch.distributed as dist
from one_process import EXACT, SOME, follow, require, sharded
from problems import STEPS, feed, optimizer, placed, reference, tensors, train
from refusals import alike, expect
from saves import HALF, loaded, start
from torch import nn
from torch.distributed.tensor import Shard


@pytest.mark.ranks(2)
def test_fsdp_equals_one_process(world):
    return follow(lambda model: sharded(model, world.mesh()), (world.rank, world.size), SOME)


@pytest.mark.ranks(2)
def test_ddp_with_a_group_equals_one_process(world):
    part, group = (world.rank, world.size), dist.group.WORLD
    return follow(nn.parallel.DistributedDataParallel, part, SOME, process_group=group)


@pytest.mark.ranks(2)
def test_a_run_that_was_saved_continues(world, tmp_path):
    start(world, "EShampoo", range(HALF), tmp_path)
    model, ours = loaded(world, tmp_path)
    train(model, ours, range(HALF, STEPS), world.rank, world.size)
    return require(model.named_parameters(), reference("EShampoo"), EXACT)


@pytest.mark.ranks(2)
def test_options_that_differ_are_refused_on_all_ranks(world):
    values, grads = tensors([(6, 5), (7,)], 1)
    params = placed(values, [(Shard(0),)] * 2, world.mesh())
    ours = optimizer("EShampoo", params, lr=0.5 if world.rank else 0.25)
    feed(params, grads[0])
    with expect(ValueError) as error:
        ours.step()
    alike(str(error))
    assert "rank 1 of the process group has (param group 0: lr=0.5)" in str(error), error
