"""Ranks that share work refuse the same states, make the same calls and have the same options."""

import copy
import time

import pytest
import torch
import torch.distributed as dist
from problems import feed, full, optimizer, placed, tensors
from refusals import alike, expect
from torch.distributed.tensor import Shard

pytestmark = pytest.mark.slow

SHAPES = [(9, 8), (7,), (6, 5)]
WAYS = {"process group": None, "FSDP2": (Shard(0),)}
CHECK = 6  # the first step with a check


def built(world, way, steps=CHECK - 1):
    """An optimizer after some steps, its parameters, and more gradients."""
    values, grads = tensors(SHAPES, steps + CHECK + 1)
    params = placed(values, [WAYS[way]] * len(SHAPES), world.mesh())
    group = dist.group.WORLD if WAYS[way] is None else None
    ours = optimizer("EShampoo", params, process_group=group)
    run(ours, params, grads[:steps])
    return ours, params, grads[steps:]


def run(ours, params, grads):
    for step in grads:
        feed(params, step)
        ours.step()


def everything(ours, params):
    state = {
        i: {n: full(v).clone() for n, v in ours.state[p].items()} for i, p in enumerate(params)
    }
    return [full(p).clone() for p in params], state, [g["lr"] for g in ours.param_groups]


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return all(same(a[key], b[key]) for key in a)
    return all(map(same, a, b)) if isinstance(a, list | tuple) else a == b


def held(value):
    return value.to_local() if hasattr(value, "to_local") else value


def refused(call):
    """How a call is refused; "" if it is not."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


DAMAGES = {
    "NaN in a factor": (0, "factor_0", float("nan"), "NaN or Inf"),
    "Inf in a vector's momentum": (1, "exp_avg", float("inf"), "NaN or Inf"),
    "negative D": (2, "exp_avg_sq", -1.0, "negative numbers"),
    "a negative step": (1, "step", -5.0, "negative numbers"),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_what_one_rank_refuses_all_refuse_and_nothing_changes(world, way):
    """The damage is in the last entry of what one rank was given."""
    ours, params, grads = built(world, way)
    good = ours.state_dict()
    before = everything(ours, params)
    for number, name, value, word in DAMAGES.values():
        for bad_rank in range(world.size):
            bad = copy.deepcopy(good)
            part = held(bad["state"][number][name])
            if world.rank == bad_rank and part.numel():
                part.view(-1)[-1] = value
            with expect(ValueError) as error:
                ours.load_state_dict(bad)
            alike(str(error))
            assert word in str(error), error
            assert name in str(error), error
            assert same(before, everything(ours, params))
    # Also what is no state at all: only the first rank has read the file.
    with expect(ValueError) as error:
        ours.load_state_dict(good if world.rank == 0 else None)
    alike(str(error))
    assert "this NoneType is not the state" in str(error)
    # And what is wrong with its form.
    lacks = copy.deepcopy(good)
    if world.rank == 1:
        del lacks["state"][0]["factor_0"]
    with expect(ValueError) as error:
        ours.load_state_dict(lacks)
    alike(str(error))
    assert "factor_0" in str(error)
    assert same(before, everything(ours, params))
    # The undamaged state loads, and the run goes on as it would have.
    ours.load_state_dict(good)
    assert same(before, everything(ours, params))
    run(ours, params, grads)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_ranks_compare_at_their_first_step_at_checks_and_when_they_save_and_load(world, way):
    """A plain step is taken without a word: nothing is sent besides gradients and updates."""
    ours, params, grads = built(world, way, steps=0)
    good = ours.state_dict()
    last = world.rank == world.size - 1
    calls = {
        "save": ours.state_dict,
        "load": lambda: ours.load_state_dict(good),
        "step": ours.step,
    }
    told = {name: [] for name in calls}
    for t, step in enumerate(grads, 1):
        feed(params, step)
        ours.param_groups[0]["lr"] = 0.5 if last else 0.25
        for name, call in calls.items():
            said = refused(call)
            if said:
                alike(said)
                assert "rank 1 of the process group has (param group 0: lr=0.5)" in said, said
                told[name].append(t)
        if t in told["step"]:
            ours.param_groups[0]["lr"] = 1e-3
            ours.step()
    every = list(range(1, CHECK + 2))
    assert told == {"save": every, "load": every, "step": [1, CHECK]}
    dist.barrier()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("way", WAYS)
def test_options_that_differ_later_are_refused_everywhere_before_the_step(world, way):
    ours, params, grads = built(world, way)
    last = world.rank == world.size - 1
    changes = [("lr", 0.5, 0.25), ("tau", 0.3, 0.2), ("betas", (0.5, 0.9), (0.5, 0.95))]
    for name, here, there in changes:
        kept = ours.param_groups[0][name]
        before = everything(ours, params)[:2]
        ours.param_groups[0][name] = there if last else here
        feed(params, grads[0])
        for call in (ours.step, ours.state_dict):
            with expect(ValueError) as error:
                call()
            alike(str(error))
            theirs = (
                f"rank {world.size - 1} of the process group has (param group 0: {name}={there})"
            )
            assert theirs in str(error), error
        assert same(before, everything(ours, params)[:2])
        ours.param_groups[0][name] = kept
    run(ours, params, grads)
    dist.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_a_call_that_one_rank_leaves_out_is_named_on_all(world, way):
    """A step or state_dict() that one rank does not make meets another call of the others."""
    ours, params, grads = built(world, way)
    feed(params, grads[0])
    calls = [ours.step, ours.state_dict]
    begin = time.monotonic()
    with expect(ValueError) as error:
        calls[world.rank]()
    alike(str(error))
    assert "rank 1 of the process group has (state_dict() after step 5)" in str(error), error
    assert "rank 0 has (step() number 6)" in str(error)
    assert time.monotonic() - begin < 30
    # Who makes the same calls from now on can go on.
    run(ours, params, grads)
    dist.barrier()


@pytest.mark.ranks(2)
def test_a_learning_rate_on_a_tensor_that_differs_is_found(world):
    values, grads = tensors(SHAPES, CHECK)
    params = placed(values, [None] * len(SHAPES), world.mesh())
    rate = torch.tensor(0.5)
    ours = optimizer("EShampoo", params, lr=rate, process_group=dist.group.WORLD)
    run(ours, params, grads[:-1])
    rate.fill_(0.25 if world.rank else 0.5)
    feed(params, grads[-1])
    with expect(ValueError) as error:
        ours.step()
    alike(str(error))
    assert "rank 1 of the process group has (param group 0: lr=0.25)" in str(error), error
