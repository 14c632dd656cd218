"""A lean state and spread checks on several ranks: the same run as in one process."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from one_process import LIMITS, METHODS, fed, require, sharded
from problems import STEPS, Net, make, optimizer, reference, train
from saves import HALF, fresh, loaded, save_lean, state_of
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import Shard

from eshampoo import digest

GIVEN = [(40, 12), (9, 9), (5, 7), (3, 4, 6), (7,)]
# A sum in another order can turn the rounding of an entry of M̃ or Q around. At lr 1e-3, over STEPS:
NEAR = {torch.float32: 2e-4, torch.float64: 1e-8}


@pytest.fixture(scope="session")
def saved(worlds, tmp_path_factory):
    """A run with a lean state that two ranks have saved at half."""
    folder = tmp_path_factory.mktemp("lean")
    worlds[2].run(save_lean, folder=folder)
    return folder / "lean"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fsdp_with_a_lean_state_or_spread_checks_follows_one_process(world, dtype):
    found = {}
    for method, limit in (("lean", NEAR[dtype]), ("staggered", LIMITS[dtype])):
        model = sharded(make(dtype=dtype), world.mesh())
        ours = optimizer(method, model.named_parameters())
        train(model, ours, range(STEPS), world.rank, world.size)
        expected = reference(method, Net, dtype)
        found[method] = require(model.named_parameters(), expected, limit, method)
    return found


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_with_given_gradients_a_lean_state_follows_one_process_and_is_saved(world, dtype):
    found = {}
    options = {"steps": STEPS, "dtype": dtype, "limit": NEAR[dtype], "state": "lean"}
    for method in (*METHODS, "CASPR"):
        ours, gap = fed(world, method, GIVEN, [(Shard(0),)] * 5, world.mesh(), **options)
        found[method] = gap
        params = ours.param_groups[0]["params"]
        again = optimizer(method, params, state="lean")
        again.load_state_dict(ours.state_dict())  # which travels in 16 bits
        for p in params:
            assert digest(dict(ours.state[p])) == digest(dict(again.state[p])), method
    return found


@pytest.mark.ranks(2)
def test_ranks_check_their_blocks_at_the_steps_of_one_process(world):
    options = {"steps": STEPS, "record": True}
    ours, gap = fed(world, "staggered", GIVEN, [(Shard(0),)] * 5, world.mesh(), **options)
    steps = [tuple(t for t, _, _ in report.history) for report in ours.basis_report()]
    everyone = [None] * world.size
    dist.all_gather_object(everyone, steps)
    assert len({at for mine in everyone for at in mine}) > 2, everyone
    return gap


@pytest.mark.ranks(1, 3)
def test_a_lean_state_saved_on_two_ranks_continues_on_fewer_and_more(world, saved):
    model, ours = loaded(world, saved, "lean")
    train(model, ours, range(HALF, STEPS), world.rank, world.size)
    return require(model.named_parameters(), reference("lean"), NEAR[torch.float64])


@pytest.mark.ranks(2)
def test_a_lean_checkpoint_of_dcp_goes_into_a_full_state_by_way_of_a_lean_one(world, saved):
    """DCP writes into what is there, and refuses triangles where there are matrices."""
    model, ours = fresh(world)
    with pytest.raises(CheckpointException, match=r"Size mismatch.*factor_0"):
        dcp.load(state_of(model, ours), checkpoint_id=saved)
    model, lean = loaded(world, saved, "lean")
    full = optimizer("EShampoo", model.named_parameters())
    full.load_state_dict(lean.state_dict())
    train(model, full, range(HALF, STEPS), world.rank, world.size)
    return require(model.named_parameters(), reference("lean"), 1e-5)
