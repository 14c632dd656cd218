"""Who owns which blocks."""

import pytest
from torch.distributed.tensor import Replicate, Shard

from benchmarks.ownership import measure


@pytest.mark.slow
def test_the_state_and_the_work_are_shared_out_evenly():
    for placement in (Shard(0), Replicate()):
        found = measure("vit_s", 4, placement)
        assert found.largest_state <= 1.15 / 4 * found.single_state, found
        assert found.largest_cost <= 1.2 * found.mean_cost, found
