"""Who owns which blocks."""

import pytest
from torch.distributed.tensor import Replicate, Shard

from benchmarks.ownership import measure, simulate

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=["sharded", "replicated"])
def test_the_state_and_the_work_are_shared_out_evenly_and_as_they_are_simulated(placement):
    found = measure("vit_s", 4, placement)
    assert found.largest_state <= 1.15 / 4 * found.single_state, found
    assert found.largest_cost <= 1.2 * found.mean_cost, found
    assert simulate("vit_s", 4, placement) == found


def test_a_thousand_ranks_have_about_as_much_to_do_each():
    for model, ranks in (("llama-8b", 256), ("llama-70b", 1024)):
        found = simulate(model, ranks, Shard(0))
        assert found.largest_cost <= 1.2 * found.mean_cost
        # A vocabulary is not cut along its tokens: the owner of such a block has the most to keep.
        assert found.largest_state <= 1.6 * sum(found.states) / ranks
