"""Several ranks beside one process: the same training, the same gradients, the same end."""

import torch
import torch.distributed as dist
from problems import (
    STEPS,
    Net,
    Parallel,
    Square,
    SquareParallel,
    feed,
    full,
    make,
    optimizer,
    placed,
    reference,
    tensors,
    train,
)
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

EXACT, SINGLE = 1e-9, 1e-5
LIMITS = {torch.float64: EXACT, torch.float32: SINGLE}
METHODS = ("EShampoo", "Shampoo", "SOAP", "KLShampoo")
SOME = ("EShampoo", "Shampoo")
SHAPES = [(40, 12), (9, 9), (5, 7), (3, 4, 6), (9, 9), (7,), (1, 3), (11,)]


def kind_for(method):
    return Square if method == "SOAP" else Net


def kind_inside(method):
    return SquareParallel if method == "SOAP" else Parallel


def sharded(model, mesh):
    """FSDP2, layer by layer."""
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def split_inside(model, mesh):
    """Tensor parallelism: `up` by columns, `down` by rows; the rest stays plain and replicated."""
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


def require(params, expected, limit, what=""):
    """The same values as one process, where they are known; the largest difference on any rank."""
    found = {name.removeprefix("module."): full(p) for name, p in params}
    assert not expected or found.keys() == expected.keys()
    gaps = [(found[n] - p).abs().max().double() for n, p in expected.items()]
    worst = torch.stack([torch.zeros((), dtype=torch.float64), *gaps]).max()  # NaN stays NaN
    everyone = [torch.empty_like(worst) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, worst)
    worst = torch.stack(everyone).max().item()
    assert worst <= limit, f"{what}: {worst} > {limit}"
    return worst


def replicas_agree(model):
    """Plain tensors are those of rank 0, bit for bit."""
    for name, p in model.named_parameters():
        if not isinstance(p, DTensor):
            first = p.detach().clone()
            dist.broadcast(first, 0)
            assert torch.equal(first, p), name


def label(method, dtype):
    return f"{method} {str(dtype).removeprefix('torch.')}"


def follow(build, part=(0, 1), methods=METHODS, kind=kind_for, **more):
    """Train by every method in float64, and by EShampoo in float32, on a part of every batch.

    The largest difference to one process, by method.
    """
    found = {}
    for method, dtype in [*((m, torch.float64) for m in methods), ("EShampoo", torch.float32)]:
        inner = make(kind(method), dtype)
        model = build(inner)
        ours = optimizer(method, model.named_parameters(), **more)
        train(model, ours, range(STEPS), *part, inner)
        expected, limit = reference(method, kind(method), dtype), LIMITS[dtype]
        found[label(method, dtype)] = require(model.named_parameters(), expected, limit, method)
        replicas_agree(model)
    return found


def fed(
    world,
    method,
    shapes,
    placements,
    mesh,
    gaps=(),
    steps=14,
    dtype=torch.float64,
    limit=None,
    **more,
):
    """Random gradients for placed parameters, and the same for one process.

    `gaps` holds (step, parameter, ranks without its gradient).
    """
    values, grads = tensors(shapes, steps, dtype=dtype)
    params = placed(values, placements, mesh)
    group = dist.group.WORLD if None in placements else None
    ours = optimizer(method, params, process_group=group, **more)
    # Rank 0 compares.
    one = [nn.Parameter(v.clone()) for v in values] if world.rank == 0 else []
    single = optimizer(method, one, **more) if one else None
    missing = {(t, i): ranks for t, i, ranks in gaps}
    for t, step in enumerate(grads):
        here = [None if world.rank in missing.get((t, i), ()) else g for i, g in enumerate(step)]
        feed(params, here)
        ours.step()
        if single is not None:
            feed(one, [None if (t, i) in missing else g for i, g in enumerate(step)])
            single.step()
    expected = {str(i): p.detach() for i, p in enumerate(one)}
    limit = LIMITS.get(dtype, SINGLE) if limit is None else limit
    return ours, require([(str(i), p) for i, p in enumerate(params)], expected, limit, method)
