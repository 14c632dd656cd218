"""Every way to lie on a mesh, gradients that are missing, and low precision, beside one process."""

import pytest
import torch
from one_process import METHODS, SHAPES, SOME, fed
from problems import feed, full, optimizer, placed, tensors
from torch import nn
from torch.distributed.tensor import Replicate, Shard

pytestmark = pytest.mark.slow


@pytest.mark.ranks(3, 4)
def test_every_placement_equals_one_process(world):
    """Every way to lie on a mesh, and plain tensors beside it."""
    line, last = world.mesh(), [(Shard(0),), (Shard(1),), (Replicate(),)]
    ways = [
        [(Shard(0),)] * 8,
        [(way,) for way in (Shard(1), Shard(0), Shard(1), Shard(2), Replicate())] + last,
        [(Shard(0),), None, (Shard(0),), None, None, (Shard(0),), None, None],  # a mixed model
    ]
    worst = 0.0
    for way in ways:
        for method in SOME:
            worst = max(worst, fed(world, method, SHAPES, way, line)[1])
    if world.size == 4:
        square = world.mesh(2, 2)
        way = [(Shard(0), Shard(1)), (Replicate(), Shard(0)), (Shard(0), Shard(0))]
        way += [(Shard(1), Replicate()), (Shard(1), Shard(0)), (Shard(0), Replicate())]
        way += [(Replicate(), Replicate()), (Shard(0), Shard(0))]
        for method in ("EShampoo", "Shampoo"):
            worst = max(worst, fed(world, method, SHAPES, way, square)[1])
    return worst


@pytest.mark.ranks(4)
def test_more_ranks_than_matrices_equal_one_process(world):
    """Some ranks own nothing, and hold a part or, of a plain tensor, all of it."""
    return {
        (method, str(way)): fed(world, method, [(5, 7), (6,)], [way] * 2, world.mesh())[1]
        for method in METHODS
        for way in ((Shard(0),), None)
    }


@pytest.mark.ranks(2)
def test_the_blocks_of_an_embedding_are_spread(world):
    ours, worst = fed(world, "EShampoo", [(64, 16)], [(Shard(0),)], world.mesh())
    (bucket,) = ours._buckets
    assert len(bucket.blocks) == 4 // world.size
    return worst


@pytest.mark.ranks(4)
def test_a_parameter_without_a_gradient_on_some_rank_stands_still_everywhere(world):
    """Everywhere, or on some ranks only: then the parameter stands still everywhere."""
    everyone = tuple(range(world.size))
    gaps = [(0, 0, everyone), (3, 1, everyone), (6, 1, everyone), (6, 5, everyone), (9, 3, (0,))]
    gaps += [(11, 4, (1,)), (12, 7, (0,)), (12, 2, everyone), (13, 5, (1,))]
    worst = 0.0
    for method in ("EShampoo", "Shampoo", "KLShampoo"):
        worst = max(worst, fed(world, method, SHAPES, [(Shard(0),)] * 8, world.mesh(), gaps)[1])
    return worst


@pytest.mark.ranks(4)
def test_bfloat16_gradients_travel_as_they_are(world):
    """bfloat16 gradients travel as they are: the same as one process, which has the same ones."""
    ways = [(Shard(0),)] * 8
    worst = fed(world, "EShampoo", SHAPES, ways, world.mesh(), dtype=torch.bfloat16)
    ours, mesh = worst[0], world.mesh()
    bucket = next(b for b in ours._buckets if b.route.team is not None)
    assert bucket.route.gradients.like.dtype == torch.bfloat16
    assert bucket.route.updates.like.dtype == bucket.state.exp_avg.dtype == torch.float32
    # A parameter of another dtype in the same bucket: then all travel as float32.
    values, grads = tensors([(6, 6), (6, 6)], 8)
    mixed = [v.to(d) for v, d in zip(values, (torch.bfloat16, torch.float32), strict=True)]
    params = placed(mixed, ways[:2], mesh)
    one = [nn.Parameter(v.clone()) for v in mixed]
    pair = [optimizer("EShampoo", p, merge_dims=False, frequency=4) for p in (params, one)]
    for step in grads:
        for ps, o in zip((params, one), pair, strict=True):
            feed(ps, [g.to(p.dtype) for g, p in zip(step, ps, strict=True)])
            o.step()
    for p, q in zip(params, one, strict=True):
        assert torch.equal(full(p), q.detach())
    return worst[1]
