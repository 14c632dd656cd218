"""The worlds themselves: a function that fails, hangs or ends a rank is told of, and no other."""

import os
import time

import pytest
import torch.distributed as dist
from worlds import RankError, Ranks

pytestmark = pytest.mark.slow


def number_of_ranks(world):
    numbers = [None] * world.size
    dist.all_gather_object(numbers, world.rank)
    assert numbers == list(range(world.size))
    return len(numbers)


def fails_on_rank_one(world):
    assert world.rank != 1, "not here"
    dist.barrier()


def hangs_on_rank_one(world):
    while world.rank == 1:
        time.sleep(0.1)


def ends_rank_one(world):
    if world.rank == 1:
        os._exit(3)


def ends_all(world):
    os._exit(0)


@pytest.fixture
def ranks(tmp_path):
    """A world of two ranks, which runs what comes after a failure as if nothing had been."""
    ranks = Ranks(2, tmp_path)
    assert ranks.run(number_of_ranks) == 2
    yield ranks
    assert ranks.run(number_of_ranks) == 2
    ranks.stop()


def test_a_world_runs_one_function_after_another_in_the_same_processes(ranks):
    processes = ranks.processes
    assert ranks.run(number_of_ranks) == 2
    assert ranks.processes is processes


def test_a_failure_is_told_with_the_traceback_of_every_rank(ranks):
    with pytest.raises(RankError) as error:
        ranks.run(fails_on_rank_one)
    first, second = str(error.value).split("rank 1 of 2: ")
    assert "fails_on_rank_one failed\nrank 0 of 2: Traceback" in first
    assert "dist.barrier()" in first
    assert "AssertionError: not here" in second


def test_a_rank_that_hangs_is_killed_and_tells_where_it_was(ranks):
    ranks.patience = 1.0
    with pytest.raises(RankError) as error:
        ranks.run(hangs_on_rank_one)
    ranks.patience = 60.0
    assert "rank 0 of 2: returned" in str(error.value)
    assert "rank 1 of 2: hangs" in str(error.value)
    assert "in hangs_on_rank_one" in str(error.value)


def test_a_rank_that_ends_has_failed_unless_it_was_to_end(ranks):
    with pytest.raises(RankError, match="rank 1 of 2: ended with code 3"):
        ranks.run(ends_rank_one)
    ranks.run(ends_all, ends=True)
    with pytest.raises(RankError, match="rank 0 of 2: returned"):
        ranks.run(number_of_ranks, ends=True)
