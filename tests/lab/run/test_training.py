"""The loop: equal runs are equal, and the log says truly what was run and where time went."""

import time
from itertools import count
from types import SimpleNamespace

import made_data
import numpy as np
import pytest
import torch
from tiny_runs import tiny, trained

from eshampoo.lab.catalogue import WORKLOADS
from eshampoo.lab.errors import UserError
from eshampoo.lab.optimizers import scheduled
from eshampoo.lab.run import training
from eshampoo.lab.run.runlog import CPU_TIMES, TIMES
from eshampoo.lab.run.runs import Run


@pytest.mark.slow
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


def test_lbfgs_searches_along_its_line(tmp_path):
    """A step is one iteration with a line search, so the loss falls at every one of them."""
    run = WORKLOADS["pinn-poisson"].run("lbfgs", {}, scale="tiny", steps=12)
    losses = trained(run, tmp_path, None).loss
    assert (np.diff(losses) < 0).all()
    assert losses[-1] < 0.9 * losses[0]


def test_the_split_of_the_time_adds_up(tmp_path):
    began = time.perf_counter()
    log = trained(tiny("eshampoo", steps=60), tmp_path)
    elapsed = time.perf_counter() - began
    assert log.end["seconds"] == pytest.approx(log.seconds[-1])
    assert log.end["seconds"] < elapsed
    optimizer = log.times["optimizer"].sum()
    assert log.end["optimizer_share"] == pytest.approx(optimizer / log.seconds[-1])


def test_cpu_seconds_stand_beside_the_wall_seconds(tmp_path, monkeypatch):
    """With clocks that tick when they are read: wall seconds in twos, CPU seconds in ones."""
    ticks = {"perf_counter": count(0, 2).__next__, "process_time": count().__next__}
    monkeypatch.setattr(training, "time", SimpleNamespace(**ticks))
    log = trained(tiny("eshampoo", steps=4), tmp_path)
    assert [log.times[name].tolist() for name in TIMES] == [[2] * 4] * 3
    assert [log.cpu_times[name].tolist() for name in CPU_TIMES] == [[2] * 4, [1] * 4]
    assert (log.end["seconds"], log.end["cpu_seconds"]) == (24, 8)
    assert log.end["optimizer_share"] == pytest.approx(1 / 3)
    assert log.end["cpu_optimizer_share"] == 0.5


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


@pytest.mark.slow
def test_observed_statistics_see_labels_that_are_sampled_from_the_model(tmp_path):
    options = {"statistics": "observe", "optimizer": "shampoo"}
    log = trained(tiny(**options), tmp_path / "a")
    again = trained(tiny(**options), tmp_path / "b")
    other = trained(tiny("shampoo"), tmp_path / "c")
    assert log.end["final_loss"] == again.end["final_loss"] != other.end["final_loss"]
    assert log.end["computations"] == other.end["computations"] > 0


def test_labels_are_sampled_only_where_there_are_classes(tmp_path):
    run = tiny("eshampoo", workload="molecules-gnn", statistics="observe")
    with pytest.raises(UserError, match="molecules-gnn has no classes"):
        training.train(run, None, tmp_path)
