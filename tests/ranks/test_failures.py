"""Bad gradients, failed decompositions and ranks that end: every rank hears of them."""

import os
import time
from itertools import product

import pytest
import torch
import torch.distributed as dist
from faults import REPORTED, Faults
from one_process import EXACT, LIMITS, SHAPES, require
from problems import feed, full, optimizer, placed, tensors
from refusals import alike, expect
from torch import nn
from torch.distributed.tensor import DTensor, Shard

pytestmark = pytest.mark.slow


@pytest.mark.ranks(4)
def test_a_bad_entry_in_one_shard_stops_its_block_everywhere(world):
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


@pytest.mark.ranks(2, 3)
def test_a_vector_without_a_finite_gradient_on_one_rank_moves_nowhere(world):
    """Either all shards of a parameter take a step or none; one of one entry is on rank 0 alone."""
    values, grads = tensors([(7,), (1,), (5, 4)], 6)
    for method in ("EShampoo", "Shampoo"):
        params = placed(values, [(Shard(0),)] * 3, world.mesh())
        ours = optimizer(method, params)
        feed(params, grads[0])
        ours.step()
        for t, (bad, value) in enumerate([(0, None), (1, None), (0, float("nan")), (1, 1e200)], 1):
            feed(params, grads[t])
            if world.rank == 0 and value is None:
                params[bad].grad = None
            elif world.rank == 0:
                params[bad].grad.to_local()[-1] = value
            before = [full(p).clone() for p in params]
            ours.step()
            moved = [not torch.equal(b, full(p)) for b, p in zip(before, params, strict=True)]
            assert moved == [number != bad for number in range(3)], (method, t)
        state = ours.state_dict()["state"]
        assert [float(state[i]["step"]) for i in (0, 1)] == [3, 3]
        assert [int(state[i]["skipped"]) for i in (0, 1)] == [1, 1]


@pytest.mark.ranks(2)
def test_a_skipped_parameter_keeps_its_zeros_and_infinities_on_every_rank(world):
    values, grads = tensors([(9, 9), (7,)], 3)
    for value in values:
        value.view(-1)[:3] = torch.tensor([-0.0, -float("inf"), float("nan")])
    for way in ((Shard(0),), None):
        params = placed(values, [way] * 2, world.mesh())
        group = dist.group.WORLD if way is None else None
        ours = optimizer("EShampoo", params, eps=0.0, process_group=group)
        before = [full(p).view(torch.int64).clone() for p in params]
        for step in grads:
            feed(params, [G * float("nan") for G in step])
            ours.step()
            after = [full(p).view(torch.int64) for p in params]
            assert all(map(torch.equal, before, after))


@pytest.mark.ranks(4)
def test_with_raise_every_rank_raises_and_nothing_changes(world):
    """All ranks say the same, and nothing changes, also if the entry is in one rank's shard."""
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
    # Finite everywhere, but the squares overflow: on one rank, or only in the sum over all.
    for size, ranks in ((1e200, 1), (1.1e154, 4)):
        for bad, p in enumerate(params[:2]):
            feed(params, grads[1])
            if world.rank < ranks:
                p.grad.to_local().view(-1)[:1] = size
            with expect(FloatingPointError) as error:
                ours.step()
            assert named[bad][0] in str(error), error
            alike(str(error))
            assert all(torch.equal(b, full(p)) for b, p in zip(before, params, strict=True))
    feed(params, grads[1])
    ours.step()


@pytest.mark.ranks(2)
def test_a_basis_that_failed_three_times_is_reported_by_all_ranks(world):
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
        options = {"frequency": 2, "merge_dims": False, "process_group": group}
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
        assert list(alone) == [6, 8]
        assert "factor 0 of parameter 'a' (shape (9, 9)) (3 times in a row)" in alone[6]
        for way in ((Shard(0),), None):
            group = dist.group.WORLD if way is None else None
            assert run([way] * 2, grads, method, group) == alone
            said = run([way] * 2, late, method, group)
            alike(str(said))
            assert list(said) == [8], said
    torch.linalg.eigh = real


# Which decompositions a solver uses while factors lack rank.
USED = {"eigh": ("eigh", "svd", "qr"), "partial": ("eigh", "svd", "qr"), "qr": ("qr", "svd"),
        "power": ("qr", "svd")}  # fmt: skip
# In which precision, which calls of step t fail, how, and after which steps an error is raised.
FAULTS = {
    "in float32": (torch.float32, lambda A, t: A.dtype == torch.float32, "cuSOLVER", []),
    "of stacks": (torch.float64, lambda A, t: A.dim() == 3 and len(A) > 1, "CUDA memory", []),
    "for two steps": (torch.float64, lambda A, t: t in (2, 3), "LAPACK", []),
    "without a word": (torch.float64, lambda A, t: t in (2, 3), "nan", []),
    "for ever": (torch.float64, lambda A, t: True, "MAGMA", [3]),
}


@pytest.mark.ranks(2)
def test_with_any_decomposition_failing_two_ranks_follow_one_process(world):
    """For every solver: the same updates, counts of failures, and steps that raise an error."""
    shapes, worst = [(20, 3), (20, 3), (5, 6), (7,)], 0.0

    def run(params, grads, group, fails, fault, name, solver):
        named = list(zip("abcd", params, strict=True))
        options = {"frequency": 1, "tau": 1e-3, "budget": None, "solver": solver, "max_dim": 24}
        ours, said = optimizer("EShampoo", named, process_group=group, **options), {}
        for t, step in enumerate(grads, 1):
            feed(params, step)
            with pytest.MonkeyPatch.context() as patch:
                Faults(patch, name, lambda A, t=t: fails(A, t), REPORTED.get(fault, fault))
                try:
                    ours.step()
                except RuntimeError as error:
                    said[t] = str(error)
            if t == 3:
                counts = ours.state_dict()["state"]
                counts = [counts[i]["basis_failures"].flatten().tolist() for i in range(3)]
        return said, counts

    for solver, names in USED.items():
        for name, (how, (dtype, fails, fault, raised)) in product(names, FAULTS.items()):
            what = f"{solver}, {name} fails {how}"
            values, grads = tensors(shapes, 3 if raised else 5, dtype=dtype)
            one = [nn.Parameter(v.clone()) for v in values]
            alone = run(one, grads, None, fails, fault, name, solver)
            assert list(alone[0]) == raised, (what, alone)
            kept = {"for two steps": 2, "without a word": 2, "for ever": 3}.get(how, 0)
            assert max(map(max, alone[1])) == kept, (what, alone)
            for way in ((Shard(0),), None):
                params = placed(values, [way] * 4, world.mesh())
                group = dist.group.WORLD if way is None else None
                found = run(params, grads, group, fails, fault, name, solver)
                assert (list(found[0]), found[1]) == (raised, alone[1]), (what, found, alone)
                alike(str(found[0]))  # the words of one rank, which names its own parameters
                pairs = [(str(i), p) for i, p in enumerate(params)]
                expected = {str(i): p.detach() for i, p in enumerate(one)}
                worst = max(worst, require(pairs, expected, LIMITS[dtype], what))
    return worst


@pytest.mark.ranks(2, ends=True)
def test_a_rank_that_ends_ends_the_others(world):
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
