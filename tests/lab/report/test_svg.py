"""Charts have round ticks and survive values that cannot be drawn."""

import numpy as np

from eshampoo.lab.report.svg import Axis, Line, chart, round_ticks


def test_ticks_are_round_and_inside():
    assert round_ticks(0, 300) == [0, 100, 200, 300]
    assert Axis(0.004, 2.3, 0, 100, log=True).ticks() == [0.01, 0.1, 1]
    assert Axis(0.3, 2.3, 0, 100, log=True).ticks() == [0.5, 1, 2]


def test_charts_survive_what_cannot_be_drawn():
    x = np.arange(5.0)
    for y in (x * np.nan, x * 0, x - 2):
        assert "</svg>" in chart("t", [Line("a & b", x, y)], x_label="x", y_label="y", log=True)
    assert "a &amp; b" in chart("t", [Line("a & b", x, x)], x_label="x", y_label="y")
    assert "</svg>" in chart("t", [], x_label="x", y_label="y")
