"""Targets from AdamW's validation metric, and who reaches them when."""

import math
from dataclasses import replace

import numpy as np
import pytest
from tiny_runs import tiny, trained

from eshampoo.lab.figures.targets import best_metric, target_cells, target_of, way_to
from eshampoo.lab.report.compare import Group


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return trained(tiny("adamw", steps=4), tmp_path_factory.mktemp("run") / "run")


def measured(log, *metrics, higher=True):
    """A log of four steps of a second each, with these metrics."""
    return replace(
        log,
        header={**log.header, "higher_is_better": higher},
        evaluations=tuple(enumerate(metrics, 1)),
        step=np.arange(1.0, 5.0),
        times={name: np.full(4, 1 / 3) for name in log.times},
    )


def test_the_target_is_the_median_of_the_best_metrics_at_the_best_rate(log):
    low = Group("AdamW", tuple(measured(log, value) for value in (0.1, 0.9, 0.2)))
    high = Group("AdamW", tuple(measured(log, value, 0.1) for value in (0.5, 0.3, 0.4)))
    assert target_of([low, high]) == 0.4
    losses = Group("AdamW", tuple(measured(log, v, 9.0, higher=False) for v in (3.0, 1.0, 2.0)))
    assert target_of([losses]) == 2.0
    assert best_metric(measured(log, math.nan)) == -math.inf


def test_a_target_is_reached_at_the_first_evaluation_that_is_as_good(log):
    assert way_to(measured(log, 0.1, 0.5, 0.9), 0.5) == (2.0, pytest.approx(2.0))
    assert way_to(measured(log, 9.0, 3.0, 2.0, higher=False), 2.0) == (3.0, pytest.approx(3.0))
    assert way_to(measured(log, 0.1, math.nan), 0.5) == (math.inf, math.inf)


def test_means_are_over_the_runs_that_hit(log):
    group = Group("x", tuple(measured(log, *m) for m in ((0.5,), (0.1, 0.2, 0.6), (0.1,))))
    assert target_cells(group, 0.5) == ["2/3", "2 ± 1", "2.0 ± 1.0"]
    assert target_cells(group, 0.6) == ["1/3", "3", "3.0"]
    assert target_cells(group, 0.7) == ["0/3", "–", "–"]
