"""The loop: equal runs are equal, a stopped or killed run resumes bit for bit, logs are true."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from eshampoo.lab.catalogue import WORKLOADS, setting
from eshampoo.lab.checkpoint import checkpoints
from eshampoo.lab.errors import UserError
from eshampoo.lab.optimizers import scheduled
from eshampoo.lab.runlog import FILE_NAME, compact, read_log
from eshampoo.lab.runs import Run
from eshampoo.lab.training import train

from . import made_data

OPTIMIZERS = ("adamw", "eshampoo", "shampoo", "soap")


def trained(run, out, data=None, **keywords):
    out.mkdir(parents=True, exist_ok=True)
    train(run, setting(run).data(data), out, **keywords)
    return read_log(out / FILE_NAME)


def tiny(optimizer, steps=24, workload="digits-vit", **options):
    if optimizer != "adamw":
        # tiny matrices stay matrices
        options = {"frequency": 4, "merge_dims": False, **options}
    return WORKLOADS[workload].run(optimizer, options, scale="tiny", steps=steps)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_stopped_run_resumes_to_the_same_curve(optimizer, tmp_path):
    """Bit for bit: losses, basis computations and criteria, and the two newest checkpoints stay."""
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
    assert [path.name for path in checkpoints(part)] == [
        "checkpoint-00000014.pt",
        "checkpoint-00000012.pt",
    ]
    resumed = trained(run, part, resume=True)
    assert resumed.finished
    assert np.array_equal(resumed.step, whole.step)
    assert np.array_equal(resumed.loss, whole.loss)
    assert np.array_equal(resumed.computations, whole.computations)
    assert np.array_equal(resumed.basis_criterion, whole.basis_criterion, equal_nan=True)
    assert resumed.evaluations == whole.evaluations


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_workload_trains_on_its_published_format(workload, tmp_path):
    """Two runs with the same seed are equal, another seed is not; the model has layer kinds."""
    data = made_data.MAKERS[workload](tmp_path)
    run = tiny("eshampoo", steps=6, workload=workload, frequency=2)
    first, second = (trained(run, tmp_path / name, data) for name in ("first", "second"))
    assert np.isfinite(first.loss).all()
    assert np.array_equal(first.loss, second.loss)
    assert first.evaluations == second.evaluations
    assert np.isfinite(first.evaluations[-1][1])
    assert first.end["computations"] == first.computations[-1] > 0
    assert first.basis_computations[-1].sum() == first.end["computations"]
    assert 0 < first.end["optimizer_share"] < 1
    assert {factor.letter for factor in first.factors} >= {"L", "R"}
    other = Run(**{**run.record(), "seed": 1})
    assert not np.array_equal(trained(other, tmp_path / "third", data).loss, first.loss)


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
    words += ["--steps", "800", "--threads", "1"]
    return [*words, "--checkpoint-every", "50", "--out", str(out), *more]


def wait_for_checkpoint(process, out):
    deadline = time.monotonic() + 60
    while not checkpoints(out):
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline, "no checkpoint within a minute"
        time.sleep(0.01)


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
    run = tiny("eshampoo", steps=800, frequency=3)
    whole = trained(run, tmp_path / "whole")
    assert resumed.finished
    assert np.array_equal(resumed.loss, whole.loss)
    assert np.array_equal(resumed.computations, whole.computations)


def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path):
    run = tiny("eshampoo")
    whole = trained(run, tmp_path / "whole")
    count = []
    part = tmp_path / "part"
    trained(run, part, checkpoint_every=5, watch=count.append, stopped=lambda: len(count) == 12)
    checkpoints(part)[0].write_bytes(b"half a checkpoint")
    assert np.array_equal(trained(run, part, resume=True).loss, whole.loss)


def test_another_run_is_not_resumed(tmp_path):
    count = []
    trained(tiny("eshampoo"), tmp_path, watch=count.append, stopped=lambda: len(count) == 3)
    with pytest.raises(UserError, match="holds another run"):
        trained(tiny("eshampoo", tau=0.3), tmp_path, resume=True)


def test_logging_costs_less_than_two_percent(tmp_path):
    run = WORKLOADS["digits-vit"].run("eshampoo", {"frequency": 1}, steps=100)
    end = trained(run, tmp_path).end
    assert end["logging_share"] < 0.02


def test_the_split_of_the_time_adds_up(tmp_path):
    began = time.perf_counter()
    log = trained(tiny("eshampoo", steps=60), tmp_path)
    elapsed = time.perf_counter() - began
    assert log.end["seconds"] == pytest.approx(log.seconds[-1])
    assert log.end["seconds"] < elapsed
    optimizer = log.times["optimizer"].sum()
    assert log.end["optimizer_share"] == pytest.approx(optimizer / log.seconds[-1])


def test_the_header_says_what_was_run(tmp_path):
    log = trained(tiny("eshampoo"), tmp_path, command="eshampoo train …")
    assert log.run == tiny("eshampoo")
    assert log.header["command"] == "eshampoo train …"
    assert log.header["environment"]["torch"] == str(torch.__version__)
    assert log.header["setting"]["model"]["width"] == 16
    assert {factor.kind for factor in log.factors} >= {"attention", "feed_forward", "linear"}


def test_a_run_that_diverges_ends_and_says_so(tmp_path):
    log = trained(tiny("adamw", lr=1e30), tmp_path)
    assert log.end["diverged"] is True
    assert log.end["final_loss"] is None
    assert len(log.step) < 24


def test_scheduled_options_follow_the_share_of_the_run(tmp_path):
    """τ = 0.99, then 0: no basis after the first, then one at every check."""
    assert [scheduled("0.8,0.01@0.9", share) for share in (0, 0.89, 0.9)] == [0.8, 0.8, 0.01]
    log = trained(tiny("eshampoo", steps=40, frequency=1, tau="0.999,0.0@0.5"), tmp_path)
    early, late = log.computations[19], log.computations[39] - log.computations[19]
    assert late > 5 * early
    with pytest.raises(UserError, match="cannot read the schedule"):
        scheduled("x@0.5", 0)


def test_a_compact_log_keeps_the_curve_and_the_end(tmp_path):
    log = trained(tiny("eshampoo", steps=60), tmp_path / "whole")
    compact(log.path, tmp_path / "short", points=20)
    short = read_log(tmp_path / "short" / FILE_NAME)
    assert len(short.step) == 20
    assert short.end == log.end
    assert short.loss[0] == pytest.approx(log.loss[:3].mean(), abs=1e-4)
    assert short.seconds[-1] == pytest.approx(log.seconds[-1], abs=0.01)
    kept = np.isin(log.basis_step, short.basis_step)
    assert 0 < kept.sum() == len(short.basis_step) < len(kept)
    assert kept[-1]
    assert np.array_equal(short.basis_computations, log.basis_computations[kept])
    assert np.array_equal(short.basis_work, log.basis_work[kept])
    assert short.path.stat().st_size < log.path.stat().st_size
