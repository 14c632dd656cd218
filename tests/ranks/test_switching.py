"""Parameters that are replaced by sharded ones after the optimizer was built."""

import os

import pytest
import torch
import torch.distributed as dist
from one_process import METHODS, SHAPES, sharded
from problems import Net, feed, full, make, optimizer, placed, tensors, train
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

pytestmark = pytest.mark.slow


def same_bits(ours, theirs):
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert isinstance(p, DTensor)
        assert torch.equal(full(p), full(q)), name


@pytest.mark.ranks(2)
def test_accelerate_that_shards_after_construction_follows_the_run_that_was_sharded_first(world):
    """Accelerate's own `prepare`, which switches the parameters of the optimizer."""
    accelerate = pytest.importorskip("accelerate")
    said = {"RANK": world.rank, "WORLD_SIZE": world.size, "LOCAL_RANK": world.rank}
    said |= {"MASTER_ADDR": "localhost", "MASTER_PORT": 29500, "LOCAL_WORLD_SIZE": world.size}
    os.environ.update({name: str(value) for name, value in said.items()})  # as torchrun does
    plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin)
    # It takes FSDP2 for a matter of GPUs, and asks this; all that follows is its own code.
    for state in (accelerator.state, accelerate.PartialState()):
        state.distributed_type = accelerate.DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    try:
        for method in METHODS:
            model, first_model = make(Net, torch.float32), make(Net, torch.float32)
            late = optimizer(method, model.parameters())
            plain = list(model.parameters())
            model, prepared = accelerator.prepare(model, late)
            switched = late.param_groups[0]["params"]
            assert all(isinstance(p, DTensor) for p in switched)
            assert not {*switched} & {*plain}
            fully_shard(first_model, mesh=world.mesh())
            first = optimizer(method, first_model.parameters())
            start = [full(p).clone() for p in model.parameters()]
            train(model, prepared, range(14), world.rank, world.size)
            train(first_model, first, range(14), world.rank, world.size)
            same_bits(model, first_model)
            moved = zip(model.parameters(), start, strict=True)
            assert not any(torch.equal(full(p), W) for p, W in moved)
            assert late.basis_computations == first.basis_computations
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()
        for name in said:
            del os.environ[name]


@pytest.mark.ranks(2)
def test_a_run_that_is_sharded_in_the_middle_goes_on_as_one_that_was_sharded_before(world):
    """State that is there already is taken along, from plain tensors to DTensors and back."""
    values, grads = tensors(SHAPES, 14)
    plain = [nn.Parameter(v.clone()) for v in values]
    one = [nn.Parameter(v.clone()) for v in values]
    for method in METHODS:
        ours, alone = optimizer(method, plain), optimizer(method, one)

        def go(params, steps, ours=ours, alone=alone):
            for step in steps:
                feed(params, step)
                feed(one, step)
                ours.step()
                alone.step()

        go(plain, grads[:5])
        ways = [(Shard(0),), (Shard(1),), (Shard(0),), (Shard(2),), (Replicate(),)]
        ways += [(Shard(0),), (Shard(1),), (Shard(0),)]
        mesh = world.mesh()
        now = placed([p.detach() for p in plain], ways, mesh)
        ours.param_groups[0]["params"] = now
        go(now, grads[5:8])
        other = placed([full(p) for p in now], [(Shard(0),)] * len(now), mesh)
        ours.param_groups[0]["params"] = other
        go(other, grads[8:11])
        plain = [nn.Parameter(full(p)) for p in other]
        ours.param_groups[0]["params"] = plain
        go(plain, grads[11:])
        worst = max(float((p - q).abs().max()) for p, q in zip(plain, one, strict=True))
        assert worst < 1e-9, (method, worst)
    dist.barrier()


@pytest.mark.ranks(2)
def test_a_sharded_model_that_is_materialised_after_construction_is_trained(world):
    """Built on meta and sharded, then the optimizer, then memory: torchtitan's order reversed."""
    first_model = sharded(make(Net), world.mesh())
    first = optimizer("EShampoo", first_model.parameters())
    with torch.device("meta"):
        model = Net().double()
    sharded(model, world.mesh())
    late = optimizer("EShampoo", model.parameters())
    model.to_empty(device="cpu")
    for p, q in zip(model.parameters(), first_model.parameters(), strict=True):
        p.data.copy_(q.data)
    for m, o in ((model, late), (first_model, first)):
        train(m, o, range(14), world.rank, world.size)
    same_bits(model, first_model)
