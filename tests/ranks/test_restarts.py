"""A run under torchrun in which a rank is killed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from saves import undisturbed

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    # After a restart, gloo would find the addresses of the ranks that are gone.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "PYTHONPATH": str(ROOT),
}


def test_a_killed_rank_is_restarted_and_the_run_ends_bit_for_bit_the_same(worlds, tmp_path):
    worlds[2].run(undisturbed, folder=tmp_path)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *torchrun, "--max-restarts=1", HERE / "killed.py", tmp_path, "17"],
        env=ENVIRONMENT,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    killed, expected = (
        torch.load(tmp_path / name, weights_only=True) for name in ("end.pt", "undisturbed.pt")
    )
    assert (killed["start"], expected["start"]) == (14, 0)
    for name, value in expected["values"].items():
        assert torch.equal(value, killed["values"][name]), name
