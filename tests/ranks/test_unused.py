"""Parameters that some ranks, or all, do not use in a step."""

import warnings

import pytest
import torch
import torch.distributed as dist
from one_process import EXACT, METHODS, SOME, replicas_agree, require
from problems import STEPS, batch, make, optimizer
from torch import nn
from torch.distributed.fsdp import fully_shard

from eshampoo import EShampoo

pytestmark = pytest.mark.slow


class Branches(nn.Module):
    """A trunk, and two branches that a batch takes or not."""

    outputs = 12

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(12, 12)
        self.left = nn.Linear(12, 12)
        self.right = nn.Linear(12, 12)
        self.register_buffer("table", torch.randn(40, 12))

    def forward(self, x, left, right):
        h = torch.tanh(self.trunk(self.table[x]))
        out = h + self.left(h) if left else h
        return out + self.right(h) if right else out.clone()


def branches(t, rank):
    """Left on all ranks in two of three steps; right on rank 0 only, in some steps nowhere."""
    return t % 3 != 1, t % 2 == 0 and rank == 0


def on_branches(model, ours, inner, parts, take, to_none):
    """Take steps on these parts of every batch, which may use different branches."""
    for t in range(STEPS):
        ours.zero_grad(set_to_none=to_none)
        for rank, share in parts:
            x, y = batch(t, inner, rank, dist.get_world_size())
            loss = (model(x, *take(t, rank)) - y).square().mean() * share
            loss.backward()
        ours.step()


def unused(build, take, world, methods=SOME, **more):
    """Parameters that some ranks, or all, do not use: as one process with the mean gradient."""
    worst = 0.0
    for method, to_none in [(m, n) for m in methods for n in (True, False)]:
        inner = make(Branches)
        model = build(inner)
        ours = optimizer(method, model.named_parameters(), **more)
        on_branches(model, ours, inner, [(world.rank, 1.0)], take, to_none)
        one, expected = make(Branches), {}
        if world.rank == 0:
            single = optimizer(method, one.named_parameters())
            everyone = [(rank, 1 / world.size) for rank in range(world.size)]
            on_branches(one, single, one, everyone, take, to_none)
            expected = {n: p.detach() for n, p in one.named_parameters()}
        worst = max(worst, require(model.named_parameters(), expected, EXACT, method))
        replicas_agree(model)
    return worst


@pytest.mark.ranks(2)
def test_parameters_unused_under_ddp_move_as_in_one_process(world):
    def build(model):
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)

    alone = unused(build, branches, world)
    return alone, unused(build, branches, world, METHODS, process_group=dist.group.WORLD)


@pytest.mark.ranks(2)
def test_parameters_unused_under_fsdp_move_as_in_one_process(world):
    """A layer with a shard group of its own, and one that shares it with the trunk.

    FSDP2 itself communicates in every layer, so all ranks take the same branches.
    """

    def build(model):
        fully_shard(model.left, mesh=world.mesh())
        return fully_shard(model, mesh=world.mesh())

    return unused(build, lambda t, rank: branches(t, 0), world)


@pytest.mark.ranks(2)
def test_a_rank_that_owns_no_basis_does_not_take_the_model_for_a_flat_one(world):
    params = [nn.Parameter(torch.ones(1 << 16)), nn.Parameter(torch.eye(3))]
    ours = EShampoo(params, process_group=dist.group.WORLD)
    for p in params:
        p.grad = torch.ones_like(p)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours.step()
