"""What several ranks do together, and what must hold then."""

import os
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from problems import (
    STEPS,
    Net,
    Parallel,
    Square,
    SquareParallel,
    batch,
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
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

EXACT, SINGLE = 1e-9, 1e-5
METHODS = ("EShampoo", "Shampoo", "SOAP", "KLShampoo")
SOME = ("EShampoo", "Shampoo")


@dataclass
class World:
    """Where a scenario runs."""

    rank: int
    size: int
    folder: Path

    def mesh(self, *shape, names=None):
        """A mesh of all ranks."""
        names = names or ("replicate", "shard")[-len(shape or (1,)) :]
        return init_device_mesh("cpu", shape or (self.size,), mesh_dim_names=names)


def kind_for(method):
    return Square if method == "SOAP" else Net


def sharded(model, mesh):
    """FSDP2, layer by layer."""
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def distance(params, expected):
    """The largest difference to the values of one process, where they are known, for all ranks."""
    found = {name.removeprefix("module."): full(p) for name, p in params}
    assert not expected or found.keys() == expected.keys()
    worst = max((float((found[n] - p).abs().max()) for n, p in expected.items()), default=0.0)
    everyone = [0.0] * dist.get_world_size()
    dist.all_gather_object(everyone, worst)
    return max(everyone)


def require(params, expected, limit, what=""):
    """The same values as one process, on every rank."""
    worst = distance(params, expected)
    assert worst <= limit, f"{what}: {worst} > {limit}"
    return worst


# -------------------------------------------------------------------- training equals one process


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


LIMITS = {torch.float64: EXACT, torch.float32: SINGLE}


def label(method, dtype):
    return f"{method} {str(dtype).removeprefix('torch.')}"


def replicas_agree(model):
    """Plain tensors are those of rank 0, bit for bit."""
    for name, p in model.named_parameters():
        if not isinstance(p, DTensor):
            first = p.detach().clone()
            dist.broadcast(first, 0)
            assert torch.equal(first, p), name


GIVEN = [(40, 12), (9, 9), (5, 7), (3, 4, 6), (7,)]


def given(world, placements, mesh):
    """The other methods in float32, with gradients that have the same bits in one process.

    Those of a model are sums in another order, and in float32 that is too much for KL-Shampoo,
    which divides by both factors, and SOAP, which takes a basis from one gradient; see `rounding`.
    """
    options = {"steps": STEPS, "dtype": torch.float32}
    return {
        f"{label(method, torch.float32)} given": fed(
            world, method, GIVEN, placements, mesh, **options
        )[1]
        for method in METHODS[1:]
    }


def fsdp(world):
    mesh, part = world.mesh(), (world.rank, world.size)
    found = follow(lambda model: sharded(model, mesh), part)
    return found | given(world, [(Shard(0),)] * 5, mesh)


def hsdp(world):
    mesh, part = world.mesh(2, world.size // 2), (world.rank, world.size)
    found = follow(lambda model: sharded(model, mesh), part)
    return found | given(world, [(Replicate(), Shard(0))] * 5, mesh)


def ddp(world):
    part, group = (world.rank, world.size), dist.group.WORLD
    methods = (*METHODS, "adaptive", "partial", "block graft") if world.size == 2 else METHODS
    found = follow(nn.parallel.DistributedDataParallel, part, methods, process_group=group)
    return found | given(world, [None] * 5, world.mesh())


def ddp_without_group(world):
    return follow(nn.parallel.DistributedDataParallel, (world.rank, world.size))


def split_inside(model, mesh):
    """Tensor parallelism: `up` by columns, `down` by rows; the rest stays plain and replicated."""
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


def kind_inside(method):
    return SquareParallel if method == "SOAP" else Parallel


def tp(world):
    mesh = world.mesh(names=("tp",))
    found = follow(lambda model: split_inside(model, mesh), kind=kind_inside)
    ways = [(Shard(1),), (Shard(0),), (Shard(1),), (Shard(2),), (Replicate(),)]
    return found | given(world, ways, mesh)


def fsdp_tp(world):
    mesh = world.mesh(2, world.size // 2, names=("dp", "tp"))

    def build(model):
        split_inside(model, mesh["tp"])
        for layer in (model.up, model.down, model):
            fully_shard(layer, mesh=mesh["dp"])
        return model

    # The group has nothing to do with slices of a mesh, and must not mind them.
    more = {"kind": kind_inside, "process_group": dist.group.WORLD}
    found = follow(build, (world.rank // 2, 2), **more)
    ways = [(Shard(0), Shard(1)), (Shard(0), Shard(0)), (Shard(0), Shard(1)), (Shard(0), Shard(2))]
    ways += [(Shard(0), Replicate())]
    return found | given(world, ways, mesh)


class Thin(nn.Module):
    """More dimensions than examples: its first gradients do not have full rank."""

    outputs = 10

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(40, 24)
        self.up = nn.Linear(24, 48)
        self.norm = nn.LayerNorm(48)
        self.down = nn.Linear(48, 24)
        self.head = nn.Linear(24, self.outputs)

    def forward(self, x):
        h = torch.relu(self.up(self.embedding(x)))
        return self.head(torch.relu(self.down(self.norm(h))))


def rounding(world):
    """Where factors lack rank, one process differs from itself as much as several ranks do.

    The gradients of the second run of one process are disturbed in their last bit. The loss is a
    real one; the basis in the null space of a factor is made of rounding.
    """

    def run(model, ours, part=(0, 1), disturb=False):
        generator = torch.Generator().manual_seed(1)
        for t in range(STEPS):
            x = torch.randint(40, (16,), generator=torch.Generator().manual_seed(t))
            x = x.chunk(part[1])[part[0]]
            ours.zero_grad()
            nn.functional.cross_entropy(model(x), (7 * x + 3) % 10).backward()
            for p in model.parameters() if disturb else ():
                up = torch.randint(2, p.shape, generator=generator).to(p.dtype)
                p.grad.mul_(1 + torch.finfo(p.dtype).eps * up)
            ours.step()
        return {n: full(p) for n, p in model.named_parameters()}

    found = {}
    for method in ("KLShampoo", "SOAP"):
        model = sharded(make(Thin), world.mesh())
        ranks = run(model, optimizer(method, model.named_parameters()), (world.rank, world.size))
        if world.rank == 0:
            one, other = (
                run(m, optimizer(method, m.named_parameters()), disturb=d)
                for m, d in ((make(Thin), False), (make(Thin), True))
            )
            disturbed, spread = (
                max(float((values[n] - one[n]).abs().max()) for n in one)
                for values in (other, ranks)
            )
            assert disturbed > 1e3 * EXACT, (method, disturbed)
            assert spread < 30 * disturbed, (method, spread, disturbed)
            found[method] = f"last bit {disturbed:.1e}, {world.size} ranks {spread:.1e}"
    dist.barrier()
    return found


class Sequence(nn.Module):
    """A norm over a sequence that is split over ranks: the gradients of its weights are sums."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)

    def forward(self, x):
        return self.down(torch.tanh(self.up(self.norm(x))))


def sequence_parallel(world):
    def data(t):
        return torch.randn(8, 4, 6, generator=torch.Generator().manual_seed(t), dtype=torch.float64)

    def run(model, ours):
        for t in range(12):
            ours.zero_grad()
            model(data(t)).square().mean().backward()
            ours.step()

    torch.manual_seed(3)
    one = Sequence().double()
    torch.manual_seed(3)
    model = Sequence().double()
    parallelize_module(
        model,
        world.mesh(names=("tp",)),
        {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(),
        },
    )
    options = {"frequency": 4, "merge_dims": False}
    run(one, optimizer("EShampoo", one.named_parameters(), **options))
    run(model, optimizer("EShampoo", model.named_parameters(), **options))
    return require(
        model.named_parameters(), {n: p.detach() for n, p in one.named_parameters()}, EXACT
    )


# -------------------------------------------------------------------- placements and gaps


def fed(world, method, shapes, placements, mesh, gaps=(), steps=14, dtype=torch.float64, **more):
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
    limit = LIMITS.get(dtype, SINGLE)
    return ours, require([(str(i), p) for i, p in enumerate(params)], expected, limit, method)


SHAPES = [(40, 12), (9, 9), (5, 7), (3, 4, 6), (9, 9), (7,), (1, 3), (11,)]


def placements(world):
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


def more_ranks_than_matrices(world):
    """Some ranks own nothing, and hold a part or, of a plain tensor, all of it."""
    return {
        (method, str(way)): fed(world, method, [(5, 7), (6,)], [way] * 2, world.mesh())[1]
        for method in METHODS
        for way in ((Shard(0),), None)
    }


def an_embedding_is_spread(world):
    ours, worst = fed(world, "EShampoo", [(64, 16)], [(Shard(0),)], world.mesh())
    (bucket,) = ours._buckets
    assert len(bucket.blocks) == 4 // world.size
    return worst


def missing_gradients(world):
    """Everywhere, or on some ranks only: then the parameter stands still everywhere."""
    everyone = tuple(range(world.size))
    gaps = [(0, 0, everyone), (3, 1, everyone), (6, 1, everyone), (6, 5, everyone), (9, 3, (0,))]
    gaps += [(11, 4, (1,)), (12, 7, (0,)), (12, 2, everyone), (13, 5, (1,))]
    worst = 0.0
    for method in ("EShampoo", "Shampoo", "KLShampoo"):
        worst = max(worst, fed(world, method, SHAPES, [(Shard(0),)] * 8, world.mesh(), gaps)[1])
    return worst


def low_precision(world):
    """bfloat16 gradients travel as they are: the same as one process, which has the same ones."""
    ways = [(Shard(0),)] * 8
    worst = fed(world, "EShampoo", SHAPES, ways, world.mesh(), dtype=torch.bfloat16)
    ours, mesh = worst[0], world.mesh()
    bucket = next(b for b in ours._buckets if b.exchange is not None)
    assert bucket.exchange.gradients.like.dtype == torch.bfloat16
    assert bucket.exchange.updates.like.dtype == bucket.stacks.exp_avg.dtype == torch.float32
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


def unused_under_ddp(world):
    def build(model):
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)

    alone = unused(build, branches, world)
    return alone, unused(build, branches, world, METHODS, process_group=dist.group.WORLD)


def unused_under_fsdp(world):
    """A layer with a shard group of its own, and one that shares it with the trunk.

    FSDP2 itself communicates in every layer, so all ranks take the same branches.
    """

    def build(model):
        fully_shard(model.left, mesh=world.mesh())
        return fully_shard(model, mesh=world.mesh())

    return unused(build, lambda t, rank: branches(t, 0), world)


# -------------------------------------------------------------------- gradients that are not finite


def not_finite(world):
    """One bad entry in one rank's shard: the block stands still everywhere, as in one process."""
    bad = {(2, 0): (39, 3), (5, 1): (0, 0), (6, 5): (6,), (8, 7): (0,), (9, 3): (2, 1, 1)}
    bad |= {(11, 2): (4, 6), (12, 5): (0,), (12, 1): (8, 8)}
    values, grads = tensors(SHAPES, 15)
    for (t, i), entry in bad.items():
        grads[t][i][entry] = float("nan") if t % 2 else float("inf")
    worst = 0.0
    for method in ("EShampoo", "Shampoo", "KLShampoo"):
        params = placed(values, [(Shard(0),)] * 8, world.mesh())
        one = [nn.Parameter(v.clone()) for v in values]
        ours, single = optimizer(method, params), optimizer(method, one)
        for step in grads:
            feed(params, step)
            feed(one, step)
            ours.step()
            single.step()
        expected = {str(i): p.detach() for i, p in enumerate(one)}
        found = [(str(i), p) for i, p in enumerate(params)]
        worst = max(worst, require(found, expected, EXACT, method))
        theirs = single.state_dict()["state"]
        for i, state in ours.state_dict()["state"].items():
            for name in state:
                if name.startswith(("skipped", "step")):
                    assert torch.equal(state[name], theirs[i][name]), (i, name)
        assert sum(int(s["skipped"].sum()) for s in ours.state_dict()["state"].values()) >= 7
    return worst


def not_finite_raises(world):
    """On every rank alike, with nothing changed; also if the entry is in one rank's shard."""
    values, grads = tensors([(9, 9), (7,), (5, 7)], 2)
    params = placed(values, [(Shard(0),), (Shard(0),), None], world.mesh())
    named = list(zip(("matrix", "vector", "plain"), params, strict=True))
    ours = optimizer("EShampoo", named, nonfinite="raise", process_group=dist.group.WORLD)
    feed(params, grads[0])
    ours.step()
    before = [full(p).clone() for p in params]
    for bad in range(3):
        feed(params, grads[1])
        if bad == 2 or world.rank == 0:  # DDP gives all ranks the same gradient
            part = params[bad].grad
            part = part.to_local() if isinstance(part, DTensor) else part
            part.view(-1)[0] = float("nan")
        with expect(FloatingPointError) as error:
            ours.step()
        assert named[bad][0] in str(error), error
        assert all(torch.equal(b, full(p)) for b, p in zip(before, params, strict=True))
        alike(str(error))
    feed(params, grads[1])
    ours.step()


# -------------------------------------------------------------------- wrong use


class Caught:
    """The error that a block of code raised."""

    text = ""

    def __str__(self):
        return self.text


@contextmanager
def expect(kind):
    caught = Caught()
    try:
        yield caught
    except kind as error:
        caught.text = str(error)
        return
    raise AssertionError(f"no {kind.__name__} was raised")


def alike(text):
    """All ranks say the same."""
    everyone = [""] * dist.get_world_size()
    dist.all_gather_object(everyone, text)
    assert text
    assert set(everyone) == {text}, everyone


def parameters_that_differ(world):
    """Or their number, their groups, or what is to be done with them."""
    values, _ = tensors([(6, 5), (4,)], 1)
    last = world.rank == world.size - 1

    def build(params, what, method="EShampoo", **more):
        with expect(ValueError) as error:
            optimizer(method, params, process_group=dist.group.WORLD, **more)
        alike(str(error))
        assert str(error).startswith(what), error
        assert "they must agree" in str(error)
        assert f"rank {world.size - 1}" in str(error)

    def leaves(tensors):
        return [nn.Parameter(v) for v in tensors]

    other = [v.clone() for v in values]
    other[0][:2] = values[0][:2].flip(0)  # the same sum
    build(leaves(other if last else values), "parameter 0")  # values
    build(leaves(values[:1] if last else values), "parameter 1 is (none)")  # how many
    build(leaves(values if last else values[:1]), "parameter 1")
    build(leaves([values[0].t() if last else values[0]]), "parameter 0")  # shape
    build(leaves([values[0].to(torch.float32 if last else torch.float64)]), "parameter 0")  # dtype
    build(placed(values[:1], [(Shard(int(last)),)], world.mesh()), "parameter 0")  # where it lies
    build(leaves(values), "max_dim", max_dim=8 if last else 16)
    build(leaves(values), "lr", lr=torch.tensor(0.5 if last else 0.25))
    build(leaves(values), "the method", method="SOAP" if last else "EShampoo")
    groups = [{"params": [p]} for p in leaves(values)]
    build(groups if last else leaves(values), "the number of param groups")
    build([{"params": leaves(values[:1])}, *(groups[1:] if last else [])], "the number of param")
    # NaN agrees with itself, schedules are not compared, and no group means no check.
    more = {"process_group": dist.group.WORLD, "tau": lambda t: 0.1, "record": last}
    optimizer("EShampoo", leaves([torch.full((3, 3), float("nan"))]), **more)
    optimizer("EShampoo", leaves(other if last else values))
    # What was refused left nothing behind: the same parameters, alike now, take a step.
    params = leaves(values)
    ours = optimizer("EShampoo", params, process_group=dist.group.WORLD)
    feed(params, values)
    ours.step()
    dist.barrier()


def meshes_that_do_not_fit(world):
    """All ranks say the same, those that have no part in a parameter and those that have."""
    mesh_of = type(world.mesh())
    low, high, square = mesh_of("cpu", [0, 1]), mesh_of("cpu", [2, 3]), world.mesh(2, 2)
    values, grads = tensors([(6, 5), (8, 4)], 2)

    def on(mesh, value):
        inside = mesh.get_coordinate() is not None
        local = value.chunk(2)[world.rank % 2] if inside else value[:0]
        shape, stride = value.shape, value.stride()
        return nn.Parameter(
            DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
        )

    (everywhere,) = placed(values[1:], [(Shard(0),)], world.mesh())
    part = ("a", on(low, values[0]))
    for other in (("b", everywhere), ("b", on(high, values[1]))):
        for named in ([part, other], [other, part]):
            with expect(ValueError) as error:
                optimizer("EShampoo", named)
            alike(str(error))
            assert "'a'" in str(error)
            assert "[0, 1]" in str(error)
            assert "slices of one mesh" in str(error)
    # A later group is refused too, and the optimizer goes on without it.
    ours = optimizer("EShampoo", [everywhere])
    with expect(ValueError) as error:
        ours.add_param_group({"params": [on(low, values[0])]})
    alike(str(error))
    feed([everywhere], grads[0][1:])
    ours.step()
    # What the message proposes works: slices of one mesh, and an optimizer for each mesh.
    sliced = [*placed(values[:1], [(Shard(0),)], square["shard"]), everywhere]
    own = [on(low if world.rank < 2 else high, values[0])]
    for params in (sliced, own):
        ours = optimizer("EShampoo", params)
        for step in grads:
            for p, grad in zip(params, step, strict=False):
                p.grad = torch.zeros_like(p) + grad.sum()
            ours.step()
    dist.barrier()


def placements_that_cannot_be_used(world):
    mesh = world.mesh()
    for shape in ((6, 5), (7,)):
        param = nn.Parameter(DTensor.from_local(torch.ones(shape), mesh, [Partial()]))
        with expect(ValueError) as error:
            optimizer("EShampoo", [param])
        assert "Partial" in str(error)
        assert "redistribute" in str(error)
        alike(str(error))


def groups_of_others(world):
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
        assert "does not belong" in str(error), error
    else:
        param = nn.Parameter(values[0])
        ours = optimizer("EShampoo", [param], process_group=half)
        feed([param], grads[0])
        ours.step()
    dist.barrier()


def copies_are_refused(world):
    import copy

    params = placed(tensors([(6, 5)], 1)[0], [(Shard(0),)], world.mesh())
    ours = optimizer("EShampoo", params)
    with expect(TypeError) as error:
        copy.deepcopy(ours)
    assert "state_dict" in str(error)


def a_failed_basis_is_reported_by_all(world):
    """In the same words as one process; the step is complete, so who catches the error can go on.

    A gradient that is skipped delays a check, which only the owner knows: all ranks raise together
    at the next step of checks.
    """
    values, grads = tensors([(9, 9), (5, 6)], 8)
    late = [[grads[0][0] * float("nan"), grads[0][1]], *grads[1:]]
    real = torch.linalg.eigh

    def fails(A, *args, **kwargs):
        if A.shape[-1] == 9:
            raise torch.linalg.LinAlgError("the algorithm failed to converge")
        return real(A, *args, **kwargs)

    def run(placements, steps, method, group=None):
        params = placed(values, placements, world.mesh())
        named = list(zip("ab", params, strict=True))
        options = {"frequency": 2, "max_failures": 2, "merge_dims": False, "process_group": group}
        ours, said = optimizer(method, named, **options), {}
        for t, step in enumerate(steps, 1):
            feed(params, step)
            try:
                ours.step()
            except RuntimeError as error:
                said[t] = str(error)
        assert all(full(p).isfinite().all() for p in params)
        return said

    torch.linalg.eigh = fails
    for method in ("EShampoo", "Shampoo"):
        alone = run([None] * 2, grads, method)
        assert list(alone) == [4, 6, 8]
        assert "factor 0 of parameter 'a' (shape (9, 9)) (2 times in a row)" in alone[4]
        for way in ((Shard(0),), None):
            group = dist.group.WORLD if way is None else None
            assert run([way] * 2, grads, method, group) == alone
            said = run([way] * 2, late, method, group)
            alike(str(said))
            assert list(said) == [6, 8], said
    torch.linalg.eigh = real


def a_rank_that_ends_ends_the_others(world):
    """Not a hang until the timeout of the backend: the connection breaks. Ends all ranks."""
    values, grads = tensors([(9, 9), (5, 6)], 4)
    params = placed(values, [(Shard(0),)] * 2, world.mesh())
    ours = optimizer("EShampoo", params)
    for t, step in enumerate(grads):
        feed(params, step)
        if t == 2 and world.rank == 1:
            os._exit(0)
        start = time.monotonic()
        try:
            ours.step()
        except RuntimeError:
            assert t >= 2
            assert time.monotonic() - start < 30
            os._exit(0)
    raise AssertionError("no error although a rank is gone")


# -------------------------------------------------------------------- checkpoints

HALF = STEPS // 2 + 2


def state_of(model, ours):
    """What DCP saves and fills."""
    return dict(zip(("model", "optimizer"), get_state_dict(model, ours), strict=True))


def fresh(world, method="EShampoo"):
    """A sharded model with other values, and its optimizer."""
    model = sharded(make(kind_for(method), seed=5), world.mesh())
    return model, optimizer(method, model.named_parameters())


def load(world, name, method="EShampoo"):
    model, ours = fresh(world, method)
    state = state_of(model, ours)
    dcp.load(state, checkpoint_id=world.folder / name)
    set_state_dict(
        model, ours, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return model, ours


def save_at_half(world):
    """By all methods; also asynchronously while training goes on, and as one plain file."""
    for method in ("EShampoo", "Shampoo", "SOAP", "KLShampoo"):
        kind = kind_for(method)
        model = sharded(make(kind), world.mesh())
        ours = optimizer(method, model.named_parameters())
        train(model, ours, range(HALF), world.rank, world.size)
        state = state_of(model, ours)
        symmetric(state["optimizer"])
        dcp.save(state, checkpoint_id=world.folder / f"half-{method}")
        if method == "EShampoo":
            whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
            gathered = dict(
                zip(("model", "optimizer"), get_state_dict(model, ours, options=whole), strict=True)
            )
            if world.rank == 0:
                torch.save(gathered, world.folder / "half.pt")
            # The saving thread talks to the other ranks meanwhile, so it has a group of its own.
            saving = dcp.async_save(
                state_of(model, ours),
                checkpoint_id=world.folder / "async",
                process_group=dist.new_group(),
            )
            train(model, ours, range(HALF, STEPS), world.rank, world.size)
            saving.result()
            require(model.named_parameters(), reference(method), EXACT)
    dist.barrier()


def symmetric(state):
    """All ranks have the same entries with the same global shapes and dtypes."""
    mine = {
        f"{p}.{name}": f"{tuple(value.shape)} {value.dtype} {type(value).__name__}"
        for p, entries in state["state"].items()
        for name, value in entries.items()
    }
    everyone = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    assert len(mine) > 50
    for theirs in everyone:
        assert theirs == mine


def empty_shards_have_entries(world):
    """A vector shorter than the world leaves some ranks without a part of it."""
    values, grads = tensors([(3,), (7, 5)], 3)
    params = placed(values, [(Shard(0),)] * 2, world.mesh())
    ours = optimizer("EShampoo", params)
    for step in grads:
        feed(params, step)
        ours.step()
    keys = {i: sorted(s) for i, s in ours.state_dict()["state"].items()}
    everyone = [None] * world.size
    dist.all_gather_object(everyone, keys)
    assert all(theirs == keys for theirs in everyone)
    assert set(keys) == {0, 1}


def continue_from_half(world):
    """Every checkpoint in some world, EShampoo's in all."""
    files = {"half-EShampoo": "EShampoo"}
    files |= {
        1: {"async": "EShampoo"},
        2: {"half-Shampoo": "Shampoo"},
        3: {"half-SOAP": "SOAP", "half-KLShampoo": "KLShampoo"},
    }[world.size]
    worst = 0.0
    for name, method in files.items():
        model, ours = load(world, name, method)
        train(model, ours, range(HALF, STEPS), world.rank, world.size)
        expected = reference(method, kind_for(method))
        worst = max(worst, require(model.named_parameters(), expected, EXACT, name))
    return worst


def continue_from_a_plain_file(world):
    """A gathered state into one process without any sharding, and into a sharded run."""
    worst = 0.0
    for rank0 in (False, True):
        saved = torch.load(world.folder / "half.pt", weights_only=True)  # loading changes it
        model, ours = fresh(world)
        mine = saved if not rank0 or world.rank == 0 else {"model": {}, "optimizer": {}}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=rank0)
        set_model_state_dict(model, mine["model"], options=options)
        set_optimizer_state_dict(model, ours, mine["optimizer"], options=options)
        train(model, ours, range(HALF, STEPS), world.rank, world.size)
        worst = max(worst, require(model.named_parameters(), reference("EShampoo"), EXACT, "full"))
    saved = torch.load(world.folder / "half.pt", weights_only=True)
    one = make(seed=6)
    single = optimizer("EShampoo", one.named_parameters())
    set_state_dict(
        one, single, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
    )
    train(one, single, range(HALF, STEPS))
    return max(worst, require(one.named_parameters(), reference("EShampoo"), EXACT, "single"))


def from_one_process(world):
    """`torch.save` of a single process into an FSDP2 run and a DDP run with a group, and back."""
    one = make()
    single = optimizer("EShampoo", one.named_parameters())
    train(one, single, range(HALF))
    path = world.folder / f"single-{world.rank}-{world.size}.pt"
    torch.save({"model": one.state_dict(), "optimizer": single.state_dict()}, path)
    saved = torch.load(path, weights_only=True)
    # Into FSDP2, by name …
    model, ours = fresh(world)
    by_name = get_optimizer_state_dict(one, single)
    set_state_dict(
        model,
        ours,
        model_state_dict=dict(saved["model"]),  # it is changed
        optim_state_dict=by_name,
        options=StateDictOptions(full_state_dict=True),
    )
    train(model, ours, range(HALF, STEPS), world.rank, world.size)
    worst = require(model.named_parameters(), reference("EShampoo"), EXACT, "by name")
    # … and directly, with full tensors for the sharded ones.
    direct = sharded(make(seed=5), world.mesh())
    ours = optimizer("EShampoo", direct.named_parameters())
    ours.load_state_dict(saved["optimizer"])
    for p, value in zip(direct.parameters(), saved["model"].values(), strict=True):
        feed([p], [value])
        p.data.copy_(p.grad)
    train(direct, ours, range(HALF, STEPS), world.rank, world.size)
    worst = max(worst, require(direct.named_parameters(), reference("EShampoo"), EXACT, "direct"))
    # Into DDP with a group, whose state_dict is then again one for a single process.
    inner = make(seed=0)
    inner.load_state_dict(saved["model"])
    model = nn.parallel.DistributedDataParallel(inner)
    ours = optimizer("EShampoo", model.named_parameters(), process_group=dist.group.WORLD)
    ours.load_state_dict(saved["optimizer"])
    train(model, ours, range(HALF, HALF + 5), world.rank, world.size, inner)
    back = make(seed=7)
    back.load_state_dict(inner.state_dict())
    last = optimizer("EShampoo", back.named_parameters())
    last.load_state_dict(ours.state_dict())
    train(back, last, range(HALF + 5, STEPS))
    return max(worst, require(back.named_parameters(), reference("EShampoo"), EXACT, "back"))


def from_adamw(world):
    """The state of AdamW on sharded parameters is a start for EShampoo, as in one process."""
    runs = []
    for shard in (False, True):
        model = sharded(make(), world.mesh()) if shard else make()
        part = (world.rank, world.size) if shard else (0, 1)
        adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
        train(model, adam, range(6), *part)  # factors have full rank at the next check
        if shard:
            saved = {"optimizer": get_optimizer_state_dict(model, adam)}
            dcp.save(saved, checkpoint_id=world.folder / "adamw")
            model.zero_grad()  # with gradients, torch would not make up a state to be filled
            empty = torch.optim.AdamW(model.parameters(), lr=1e-3)
            loaded = {"optimizer": get_optimizer_state_dict(model, empty)}
            dcp.load(loaded, checkpoint_id=world.folder / "adamw")
            ours = optimizer("EShampoo", model.named_parameters())
            set_optimizer_state_dict(model, ours, loaded["optimizer"])
        else:
            ours = optimizer("EShampoo", model.named_parameters())
            ours.load_state_dict(adam.state_dict())
        train(model, ours, range(6, STEPS), *part)
        runs.append(model)
    expected = {n: p.detach() for n, p in runs[0].named_parameters()}
    return require(runs[1].named_parameters(), expected, EXACT)


def hsdp_saves(world):
    """Placements on two mesh dimensions load on another mesh: what is stored does not know them."""
    mesh = world.mesh(2, 2)
    model = sharded(make(), mesh)
    ours = optimizer("EShampoo", model.named_parameters())
    train(model, ours, range(HALF), world.rank, world.size)
    dcp.save(state_of(model, ours), checkpoint_id=world.folder / "hsdp")
    model, ours = load(world, "hsdp")
    train(model, ours, range(HALF, STEPS), world.rank, world.size)
    return require(model.named_parameters(), reference("EShampoo"), EXACT)


def tp_saves(world):
    mesh = world.mesh(2, 2, names=("dp", "tp"))

    def build(seed):
        model = split_inside(make(Parallel, seed=seed), mesh["tp"])
        for layer in (model.up, model.down, model):
            fully_shard(layer, mesh=mesh["dp"])
        return model, optimizer("EShampoo", model.named_parameters())

    model, ours = build(0)
    train(model, ours, range(HALF), world.rank // 2, 2)
    dcp.save(state_of(model, ours), checkpoint_id=world.folder / "tp")
    model, ours = build(4)
    state = state_of(model, ours)
    dcp.load(state, checkpoint_id=world.folder / "tp")
    set_state_dict(
        model, ours, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    train(model, ours, range(HALF, STEPS), world.rank // 2, 2)
    return require(model.named_parameters(), reference("EShampoo", Parallel), EXACT)


def undisturbed(world):
    """What `killed.py` must end with, whatever happens to it."""
    model = sharded(make(), world.mesh())
    train(model, optimizer("EShampoo", model.named_parameters()), range(20), world.rank, 2)
    values = {name: full(p) for name, p in model.named_parameters()}
    if world.rank == 0:
        torch.save({"values": values, "start": 0}, world.folder / "undisturbed.pt")


# A run that changes its world: 4 ranks, then 2, then 3.


def first_third(world):
    model = sharded(make(), world.mesh())
    ours = optimizer("EShampoo", model.named_parameters())
    train(model, ours, range(11), world.rank, world.size)
    dcp.save(state_of(model, ours), checkpoint_id=world.folder / "third")


def second_third(world):
    model, ours = load(world, "third")
    train(model, ours, range(11, 20), world.rank, world.size)
    dcp.save(state_of(model, ours), checkpoint_id=world.folder / "two-thirds")


def last_third(world):
    model, ours = load(world, "two-thirds")
    train(model, ours, range(20, STEPS), world.rank, world.size)
    return require(model.named_parameters(), reference("EShampoo"), EXACT)
