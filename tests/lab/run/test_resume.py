"""A run that was stopped, interrupted or killed goes on to the same curve, bit for bit."""

import os
import signal
import subprocess
import sys
import time

import made_data
import numpy as np
import pytest
from tiny_runs import tiny, trained

from eshampoo.lab.errors import UserError
from eshampoo.lab.run.checkpoint import checkpoints
from eshampoo.lab.run.runlog import FILE_NAME, read_log


# one of torch, one with rotated averages, one with roots
@pytest.mark.parametrize("optimizer", ["adamw", "eshampoo", "shampoo"])
def test_a_stopped_run_resumes_to_the_same_curve(optimizer, tmp_path):
    """Bit for bit: losses, basis computations and criteria; only the newest checkpoint stays."""
    run = tiny(optimizer)
    whole = trained(run, tmp_path / "whole")
    seen = []
    part = tmp_path / "part"
    trained(
        run,
        part,
        checkpoint_every=4,
        watch=lambda progress: seen.append(progress.step),
        stopped=lambda: len(seen) == 14,
    )
    assert seen[-1] == 14
    assert not read_log(part / FILE_NAME).finished
    assert [path.name for path in checkpoints(part)] == ["checkpoint-00000014.pt"]
    resumed = trained(run, part, resume=True)
    assert resumed.finished
    assert np.array_equal(resumed.step, whole.step)
    assert np.array_equal(resumed.loss, whole.loss)
    assert np.array_equal(resumed.computations, whole.computations)
    assert np.array_equal(resumed.basis_criterion, whole.basis_criterion, equal_nan=True)
    assert resumed.evaluations == whole.evaluations


def test_dropped_paths_resume_too(tmp_path):
    """ConvNeXt draws from torch's generator in every step."""
    data = made_data.imagewoof_folder(tmp_path)
    run = tiny("adamw", steps=8, workload="imagewoof-convnext")
    whole = trained(run, tmp_path / "whole", data)
    count = []
    trained(run, tmp_path / "part", data, watch=count.append, stopped=lambda: len(count) == 3)
    assert np.array_equal(trained(run, tmp_path / "part", data, resume=True).loss, whole.loss)


def command(out, *more):
    words = [sys.executable, "-m", "eshampoo.lab", "train", "digits-vit", "--scale", "tiny"]
    words += ["--optimizer", "eshampoo", "--frequency", "3", "--merge-dims", "false"]
    words += ["--steps", "160", "--threads", "1"]
    return [*words, "--checkpoint-every", "10", "--out", str(out), *more]


def wait_for_checkpoint(process, out):
    deadline = time.monotonic() + 60
    while not checkpoints(out):
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline, "no checkpoint within a minute"
        time.sleep(0.01)


@pytest.mark.slow
def test_a_killed_run_and_an_interrupted_one_resume_to_the_same_curve(tmp_path):
    """SIGKILL loses the steps since the last checkpoint, Ctrl-C none; the curve is the same."""
    killed = tmp_path / "killed"
    first = subprocess.Popen(command(killed), stdout=subprocess.DEVNULL)
    wait_for_checkpoint(first, killed)
    first.kill()
    first.wait()
    assert not read_log(killed / FILE_NAME).finished

    second = subprocess.Popen(command(killed, "--resume"), stdout=subprocess.PIPE, text=True)
    newest = checkpoints(killed)[0]
    while newest in checkpoints(killed):
        assert second.poll() is None
        time.sleep(0.01)
    os.kill(second.pid, signal.SIGINT)
    output, _ = second.communicate(timeout=60)
    assert second.returncode == 130
    assert "interrupted and saved" in output

    assert subprocess.run(command(killed, "--resume"), stdout=subprocess.DEVNULL).returncode == 0
    resumed = read_log(killed / FILE_NAME)
    run = tiny("eshampoo", steps=160, frequency=3, betas=(0.9, 0.95))
    whole = trained(run, tmp_path / "whole")
    assert resumed.finished
    assert np.array_equal(resumed.loss, whole.loss)
    assert np.array_equal(resumed.computations, whole.computations)


def test_a_damaged_checkpoint_is_told(tmp_path):
    count = []
    trained(tiny("adamw"), tmp_path, watch=count.append, stopped=lambda: len(count) == 3)
    checkpoints(tmp_path)[0].write_bytes(b"half a checkpoint")
    with pytest.raises(
        UserError, match=r"checkpoint-00000003\.pt is damaged or foreign.*start again"
    ):
        trained(tiny("adamw"), tmp_path, resume=True)
