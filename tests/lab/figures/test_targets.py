"""Targets from AdamW's validation metric, and who reaches them when."""

import math
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console
from tiny_runs import tiny, trained

from eshampoo.lab.figures.draw import pattern_group
from eshampoo.lab.figures.figure import Curve, Figure, Panel
from eshampoo.lab.figures.reproduce import Collected, plan, write_figure
from eshampoo.lab.figures.targets import best_metric, target_cells, target_of, way_to
from eshampoo.lab.report.compare import Group
from eshampoo.lab.run.runlog import Factor


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return trained(tiny("adamw", steps=4), tmp_path_factory.mktemp("run") / "run")


def measured(log, *metrics, higher=True):
    """A log of four steps with these metrics; a gradient takes 0.5, 1, 0.75 and 0.1 seconds."""
    return replace(
        log,
        header={**log.header, "higher_is_better": higher},
        evaluations=tuple(enumerate(metrics, 1)),
        step=np.arange(1.0, 5.0),
        cpu_times={
            "cpu": np.array([1.0, 2.0, 3.0, 2.0]),
            "cpu_optimizer": np.array([0.5, 1.0, 2.25, 1.9]),
        },
    )


def test_the_target_is_the_median_of_the_best_metrics_at_the_best_rate(log):
    low = Group("AdamW", tuple(measured(log, value) for value in (0.1, 0.9, 0.2)))
    high = Group("AdamW", tuple(measured(log, value, 0.1) for value in (0.5, 0.3, 0.4)))
    assert target_of([low, high]) == 0.4
    losses = Group("AdamW", tuple(measured(log, v, 9.0, higher=False) for v in (3.0, 1.0, 2.0)))
    assert target_of([losses]) == 2.0
    assert best_metric(measured(log, math.nan)) == -math.inf


def test_a_target_is_reached_at_the_first_evaluation_that_is_as_good(log):
    assert way_to(measured(log, 0.1, 0.5, 0.9), 0.5) == (2.0, pytest.approx(4.0))
    assert way_to(measured(log, 9.0, 3.0, 2.0, higher=False), 2.0) == (3.0, pytest.approx(8.0))
    assert way_to(measured(log, 0.1, math.nan), 0.5) == (math.inf, math.inf)


def test_means_are_over_the_runs_that_hit(log):
    group = Group("x", tuple(measured(log, *m) for m in ((0.5,), (0.1, 0.2, 0.6), (0.1,))))
    assert target_cells(group, 0.5) == ["2/3", "2 ± 1", "5 ± 3"]
    assert target_cells(group, 0.6) == ["1/3", "3", "8"]
    assert target_cells(group, 0.7) == ["0/3", "–", "–"]


def test_a_table_of_targets_has_hits_steps_and_time(tmp_path):
    curves = (
        Curve("AdamW", "adamw"),
        Curve("EShampoo", "eshampoo", {"merge_dims": False}, scaled={"tiny": {"frequency": 3}}),
    )
    panels = (Panel("Digits", "digits-vit", curves, "step", evaluations=4),)
    figure = Figure("sketch", "", "not a result", panels, seeds=1)
    points = plan(figure, "tiny", 1, 8)
    assert [point.runs[0].options.get("frequency") for point in points] == [None, 3]
    logs = {
        point.runs[0].place: trained(point.runs[0], tmp_path / str(index))
        for index, point in enumerate(points)
    }
    assert {len(log.evaluations) for log in logs.values()} == {4}
    write_figure(Collected(figure, points, [], logs), tmp_path / "sketch", Console())
    text = (tmp_path / "sketch.md").read_text()
    assert text.index("not a result") < text.index("hits ")
    assert "| steps to it | gradients to it |" in text
    assert "| 1/1 |" in next(line for line in text.splitlines() if line.startswith("| AdamW"))


def test_the_lines_of_a_language_model_are_those_of_the_paper():
    def line(grouping, kind, parameter="blocks.0.weight"):
        return pattern_group(Factor(parameter, kind, "L", block=0, mode=0, size=8), grouping)

    assert line("part", "attention") == "attention, L"
    assert line("part", "feed_forward") == "MLP, L"
    assert line("part", "linear") is None
    assert line("ends", "embedding") == "embedding, L"
    assert line("ends", "linear", "head.weight") == "output layer, L"
    assert line("ends", "attention") is None
