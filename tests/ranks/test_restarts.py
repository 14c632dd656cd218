"""Runs under torchrun: a rank that is killed, and the examples, stopped and resumed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from saves import undisturbed

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
TIMEOUT = 400


def torchrun(ranks, *command, restarts=0):
    """Run a script on some ranks to its end; what it printed."""
    head = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [sys.executable, *head, f"--max-restarts={restarts}", *map(str, command)],
        env=ENVIRONMENT,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_a_killed_rank_is_restarted_and_the_run_ends_bit_for_bit_the_same(worlds, tmp_path):
    worlds[2].run(undisturbed, folder=tmp_path)
    torchrun(2, HERE / "killed.py", tmp_path, 17, restarts=1)
    killed, expected = (
        torch.load(tmp_path / name, weights_only=True) for name in ("end.pt", "undisturbed.pt")
    )
    assert (killed["start"], expected["start"]) == (14, 0)
    for name, value in expected["values"].items():
        assert torch.equal(value, killed["values"][name]), name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train_ddp", "train_fsdp2"])
def test_the_examples_run_stop_and_resume(name, tmp_path):
    script = ROOT / "examples" / f"{name}.py"
    first = torchrun(2, script, "--folder", tmp_path, "--steps", 40, "--stop-after", 24)
    assert "step 20" in first
    assert "resumed" not in first
    second = torchrun(1, script, "--folder", tmp_path, "--steps", 40)
    assert "resumed at step 20" in second
    losses = [float(line.split()[-1]) for line in (first + second).splitlines() if "loss" in line]
    assert losses[-1] < 0.8 * losses[0]
