"""A lean state and spread checks on several ranks: the same run as in one process."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from one_process import LIMITS, METHODS, fed, require, sharded
from problems import STEPS, Net, feed, make, optimizer, placed, reference, tensors, train
from saves import HALF, fresh, loaded, save_lean, state_of
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import Shard

pytestmark = pytest.mark.slow

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
    for method, limit in (("lean", NEAR[dtype]), ("auto", LIMITS[dtype])):
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
            for name, value in ours.state[p].items():
                assert torch.equal(value, again.state[p][name]), (method, name)
    return found


@pytest.mark.ranks(2)
def test_ranks_check_their_blocks_at_the_steps_of_one_process(world):
    """After step 20, frequency="auto" spreads the checks of the blocks over the steps."""
    values, grads = tensors(GIVEN, 2 * STEPS)

    def steps_of_checks(params):
        ours = optimizer("auto", params, record=True)
        for step in grads:
            feed(params, step)
            ours.step()
        return [tuple(t for t, _, _ in report.history) for report in ours.basis_report()]

    alone = steps_of_checks([nn.Parameter(v.clone()) for v in values])
    everyone = [None] * world.size
    found = steps_of_checks(placed(values, [(Shard(0),)] * 5, world.mesh()))
    dist.all_gather_object(everyone, found)
    assert sorted(at for theirs in everyone for at in theirs) == sorted(alone)
    assert len({*alone}) > 2, alone


@pytest.mark.ranks(1, 3)
def test_a_lean_state_saved_on_two_ranks_continues_on_fewer_and_more(world, saved):
    model, ours = loaded(world, saved, "lean")
    train(model, ours, range(HALF, STEPS), world.rank, world.size)
    return require(model.named_parameters(), reference("lean"), NEAR[torch.float64])


@pytest.mark.ranks(2)
def test_dcp_refuses_a_lean_checkpoint_for_a_full_state(world, saved):
    """DCP writes into what is there, and has triangles where there are matrices."""
    with pytest.raises(CheckpointException, match=r"Size mismatch.*factor_0"):
        dcp.load(state_of(*fresh(world)), checkpoint_id=saved)
