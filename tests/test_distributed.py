"""Several ranks are one: real processes with gloo against a single one, checkpoints, wrong use.

The scenarios are in `distributed/scenarios.py`; many of them share one launch, which takes most of
the time.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples"
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    # After a restart, gloo would find the addresses of the ranks that are gone.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "PYTHONPATH": os.pathsep.join([str(HERE / "distributed"), str(HERE.parent)]),
}
TIMEOUT = 400


def call(*command, fails=False):
    """Run a command to its end; what it printed."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env=ENVIRONMENT,
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert (done.returncode != 0) == fails, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def launch(folder, *plans):
    return call(HERE / "distributed" / "launch.py", folder, *plans)


def torchrun(ranks, *command, restarts=0, fails=False):
    head = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return call(*head, f"--max-restarts={restarts}", *command, fails=fails)


def test_two_ranks_equal_one_process(tmp_path):
    launch(
        tmp_path,
        "2:fsdp,ddp,ddp_without_group,tp,sequence_parallel,an_embedding_is_spread,rounding",
    )


def test_three_ranks_equal_one_process(tmp_path):
    launch(tmp_path, "3:fsdp,placements")


def test_four_ranks_equal_one_process(tmp_path):
    launch(tmp_path, "4:fsdp,hsdp,ddp,fsdp_tp")


def test_placements_gaps_and_gradients_that_are_not_finite(tmp_path):
    scenarios = "placements,more_ranks_than_matrices,missing_gradients,low_precision"
    launch(tmp_path, f"4:{scenarios},not_finite,not_finite_raises,meshes_that_do_not_fit")


def test_wrong_use_is_refused_on_every_rank_and_nobody_hangs(tmp_path):
    refused = "parameters_that_differ,placements_that_cannot_be_used,groups_of_others"
    ended = "a_failed_basis_is_reported_by_all,a_rank_that_ends_ends_the_others"
    launch(tmp_path, f"2:{refused},copies_are_refused,unused_under_ddp,unused_under_fsdp,{ended}")


def test_checkpoints_move_between_worlds(tmp_path):
    launch(
        tmp_path,
        "4:save_at_half,empty_shards_have_entries,hsdp_saves,tp_saves",
        "1:continue_from_half",
        "2:continue_from_half,continue_from_a_plain_file,from_one_process,from_adamw",
        "3:continue_from_half",
    )


def test_a_run_that_changes_its_world_twice_follows_one_process(tmp_path):
    launch(tmp_path, "4:first_third", "2:second_third", "3:last_third")


def test_a_killed_rank_is_restarted_and_the_run_ends_bit_for_bit_the_same(tmp_path):
    launch(tmp_path, "2:undisturbed")
    torchrun(2, HERE / "distributed" / "killed.py", tmp_path, 17, restarts=1)
    killed, undisturbed = (
        torch.load(tmp_path / name, weights_only=True) for name in ("end.pt", "undisturbed.pt")
    )
    assert (killed["start"], undisturbed["start"]) == (14, 0)
    for name, value in undisturbed["values"].items():
        assert torch.equal(value, killed["values"][name]), name


@pytest.mark.parametrize("name", ["train_ddp", "train_fsdp2"])
def test_the_examples_run_stop_and_resume(name, tmp_path):
    script = EXAMPLES / f"{name}.py"
    first = torchrun(2, script, "--folder", tmp_path, "--steps", 40, "--stop-after", 24)
    assert "step 20" in first
    assert "resumed" not in first
    second = torchrun(1, script, "--folder", tmp_path, "--steps", 40)
    assert "resumed at step 20" in second
    losses = [float(line.split()[-1]) for line in (first + second).splitlines() if "loss" in line]
    assert losses[-1] < 0.8 * losses[0]


def test_the_state_and_the_work_are_shared_out_evenly():
    from torch.distributed.tensor import Replicate, Shard

    from benchmarks.ownership import measure

    for placement in (Shard(0), Replicate()):
        found = measure("vit_s", 4, placement)
        assert found.largest_state <= 1.15 / 4 * found.single_state, found
        assert found.largest_cost <= 1.2 * found.mean_cost, found
