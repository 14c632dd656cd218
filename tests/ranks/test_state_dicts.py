"""What `get_optimizer_state_dict` returns, `set_optimizer_state_dict` takes, in every form."""

import pytest
import torch
import torch.distributed as dist
from one_process import EXACT, require, sharded
from problems import STEPS, full, make, optimizer, reference, train
from saves import HALF
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

pytestmark = pytest.mark.slow

FLAT, FULL = {"flatten_optimizer_state_dict": True}, {"full_state_dict": True}
OFFLOADED, FROM_RANK_0 = {"cpu_offload": True}, {"broadcast_from_rank0": True}
# How a state is taken, and how it is loaded. (torch 2.13 itself loads nothing with FLAT and FULL.)
FORMS = [
    (FLAT, FLAT),
    (FLAT | OFFLOADED, FLAT | OFFLOADED),
    (FLAT | FULL, FLAT),
    (FULL, FULL),
    (FULL | OFFLOADED, FULL | FROM_RANK_0),
]


@pytest.mark.ranks(1, 2, 3)
def test_a_state_goes_out_and_comes_back_in_every_form(world):
    model = sharded(make(), world.mesh())
    ours = optimizer("EShampoo", model.named_parameters())
    train(model, ours, range(HALF), world.rank, world.size)
    states = [
        get_optimizer_state_dict(model, ours, options=StateDictOptions(**f)) for f, _ in FORMS
    ]
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    worst = 0.0
    for state, (_, form) in zip(states, FORMS, strict=True):
        fresh = optimizer("EShampoo", model.named_parameters())
        if FROM_RANK_0.items() <= form.items() and world.rank > 0:
            state = {}
        set_optimizer_state_dict(model, fresh, state, options=StateDictOptions(**form))
        for name, p in model.named_parameters():
            p.data.copy_(values[name])
        train(model, fresh, range(HALF, STEPS), world.rank, world.size)
        found = require(model.named_parameters(), reference("EShampoo"), EXACT, str(form))
        worst = max(worst, found)
    return worst


@pytest.mark.ranks(3)
def test_all_ranks_show_the_same_names_of_every_parameter(world):
    """Also those that own no block of it: torch asks each rank what to look for in a file."""
    model = sharded(make(), world.mesh())
    ours = optimizer("EShampoo", model.named_parameters())
    names = [list(ours.state[p]) for p in model.parameters()]
    everyone = [None] * world.size
    dist.all_gather_object(everyone, names)
    assert all(theirs == names for theirs in everyone)
    owned = [ours.state[p]["step"].numel() for p in model.parameters()]
    assert 0 in owned, "every rank owns a block of all, so the test shows nothing"


@pytest.mark.ranks(2)
def test_a_flat_state_says_nothing_of_frozen_parameters_and_loads(world):
    model = sharded(make(), world.mesh())
    model.embedding.weight.requires_grad_(False)
    ours = optimizer("EShampoo", model.named_parameters())
    options = StateDictOptions(**FLAT)
    train(model, ours, range(4), world.rank, world.size)
    state = get_optimizer_state_dict(model, ours, options=options)
    fresh = optimizer("EShampoo", model.named_parameters())
    set_optimizer_state_dict(model, fresh, state, options=options)
    assert [float(fresh.state[p]["step"].max()) for p in (model.norm.weight,)] == [4.0]


@pytest.mark.ranks(2)
def test_adamw_goes_on_from_sharded_parameters_as_in_one_process(world):
    model, alone = sharded(make(), world.mesh()), make()
    ours, single = (optimizer("EShampoo", net.named_parameters()) for net in (model, alone))
    train(model, ours, range(HALF), world.rank, world.size)
    train(alone, single, range(HALF))
    adamw = torch.optim.AdamW(model.parameters())
    adamw.load_state_dict(ours.adamw_state_dict())
    expected = torch.optim.AdamW(alone.parameters())
    expected.load_state_dict(single.adamw_state_dict())
    train(model, adamw, range(HALF, STEPS), world.rank, world.size)
    train(alone, expected, range(HALF, STEPS))
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(full(p), q, rtol=0, atol=EXACT, msg=name)
