"""Wrong use is refused on every rank in the same words, and nobody hangs."""

import copy

import pytest
import torch
import torch.distributed as dist
from problems import feed, full, optimizer, placed, tensors
from refusals import alike, expect
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard

pytestmark = pytest.mark.slow


@pytest.mark.ranks(2)
def test_parameters_or_options_that_differ_between_ranks_are_refused(world):
    """Or their number, their groups, or what is to be done with them."""
    values, _ = tensors([(6, 5), (4,)], 1)
    last = world.rank == world.size - 1

    def build(params, what, method="EShampoo", **more):
        with expect(ValueError) as error:
            optimizer(method, params, process_group=dist.group.WORLD, **more)
        alike(str(error))
        assert f"rank {world.size - 1} of the process group has ({what}" in str(error), error

    def leaves(tensors):
        return [nn.Parameter(v) for v in tensors]

    other = [v.clone() for v in values]
    other[0][:2] = values[0][:2].flip(0)  # the same sum
    build(leaves(other if last else values), "the values of parameter 0")
    first, second = (f"param group 0: {n} is without a name" for n in range(2))
    build(leaves(values[:1] if last else values), "nothing")
    build(leaves(values if last else values[:1]), f"{second} (4,)")
    build(leaves([values[0].t() if last else values[0]]), f"{first} (5, 6)")
    narrow = torch.float32 if last else torch.float64
    build(leaves([values[0].to(narrow)]), f"{first} (6, 5) torch.float32")
    where = placed(values[:1], [(Shard(int(last)),)], world.mesh())
    build(where, f"{first} (6, 5) torch.float64 (Shard(dim=1)")
    build(leaves(values), "max_dim=8", max_dim=8 if last else 16)
    build(leaves(values), "lr=0.5", lr=torch.tensor(0.5 if last else 0.25))
    build(leaves(values), "SOAP", method="SOAP" if last else "EShampoo")
    groups = [{"params": [p]} for p in leaves(values)]
    build(groups if last else leaves(values), "2 param groups")
    build([{"params": leaves(values[:1])}, *(groups[1:] if last else [])], "2 param groups")
    # NaN agrees with itself, schedules are not compared, and no group means no check.
    more = {"process_group": dist.group.WORLD, "tau": lambda t: 0.1, "record": last}
    optimizer("EShampoo", leaves([torch.full((3, 3), float("nan"))]), **more)
    optimizer("EShampoo", leaves(values[:1] if last else values))
    # A refusal leaves nothing behind: the same parameters, now equal on all ranks, take a step.
    params = leaves(values)
    ours = optimizer("EShampoo", params, process_group=dist.group.WORLD)
    feed(params, values)
    ours.step()
    dist.barrier()


@pytest.mark.ranks(2)
def test_two_weights_of_one_shape_that_are_swapped_on_one_rank_are_refused(world):
    """DDP compares names and values when it is built, FSDP2 names at the first step."""
    values, grads = tensors([(6, 5), (6, 5), (7,)], 1)
    last = world.rank == world.size - 1

    def in_order(params):
        a, b, c = params
        return [b, a, c] if last else [a, b, c]

    def require(error, what="param group 0: 0 is b (6, 5)"):
        alike(str(error))
        assert f"rank {world.size - 1} of the process group has ({what}" in str(error), error

    leaves = [nn.Parameter(v.clone()) for v in values]
    with expect(ValueError) as error:
        optimizer("EShampoo", in_order(leaves), process_group=dist.group.WORLD)
    require(error, "the values of parameter 0")
    named = list(zip("abc", leaves, strict=True))
    with expect(ValueError) as error:
        optimizer("EShampoo", in_order(named), process_group=dist.group.WORLD)
    require(error)
    params = placed(values, [(Shard(0),)] * 3, world.mesh())
    ours = optimizer("EShampoo", in_order(list(zip("abc", params, strict=True))))
    feed(params, grads[0])
    with expect(ValueError) as error:
        ours.step()
    require(error)
    for p, value in zip(params, values, strict=True):
        assert torch.equal(full(p), value)
    # In the same order on all ranks, the same parameters take a step.
    ours = optimizer("EShampoo", zip("abc", params, strict=True))
    ours.step()
    dist.barrier()


@pytest.mark.ranks(2)
def test_partial_placements_are_refused(world):
    mesh = world.mesh()
    for shape in ((6, 5), (7,)):
        param = nn.Parameter(DTensor.from_local(torch.ones(shape), mesh, [Partial()]))
        with expect(ValueError) as error:
            optimizer("EShampoo", [param])
        assert "Partial" in str(error)
        assert "redistribute" in str(error)
        alike(str(error))


@pytest.mark.ranks(2)
def test_a_group_or_mesh_of_other_ranks_is_refused(world):
    """A rank that is given a group or a mesh of other ranks says so; the others are not hurt."""
    half = dist.new_group([0])
    mesh = init_device_mesh("cpu", (world.size,))
    sub = type(mesh)("cpu", [0])
    values, grads = tensors([(6, 5)], 1)
    if world.rank > 0:
        with expect(ValueError) as error:
            optimizer("EShampoo", [nn.Parameter(values[0])], process_group=half)
        assert "belongs to" in str(error)
        param = DTensor.from_local(
            torch.empty(0, 5), sub, [Shard(0)], run_check=False, shape=(6, 5), stride=(5, 1)
        )
        with expect(ValueError) as error:
            optimizer("EShampoo", [nn.Parameter(param)])
        assert "without rank 1" in str(error), error
    else:
        param = nn.Parameter(values[0])
        ours = optimizer("EShampoo", [param], process_group=half)
        feed([param], grads[0])
        ours.step()
    dist.barrier()


@pytest.mark.ranks(2)
def test_copies_of_a_sharded_optimizer_are_refused(world):
    params = placed(tensors([(6, 5)], 1)[0], [(Shard(0),)], world.mesh())
    ours = optimizer("EShampoo", params)
    with expect(TypeError) as error:
        copy.deepcopy(ours)
    assert "state_dict" in str(error)
