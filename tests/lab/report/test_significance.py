"""z by hand, and what it is called."""

import math

import pytest

from eshampoo.lab.report.significance import significance, standard_error, word


def test_z_is_the_difference_of_means_over_its_standard_error():
    low, high = [1.0, 2.0, 3.0], [4.0, 5.0, 6.0]
    assert standard_error(low) == pytest.approx(1 / math.sqrt(3))
    assert significance(low, high) == pytest.approx(3 / math.sqrt(2 / 3))
    assert significance(high, low) == pytest.approx(-3 / math.sqrt(2 / 3))
    assert significance(low, [1.0, math.inf]) == math.inf
    assert significance([math.inf], low) == -math.inf
    assert math.isnan(significance([1.0], [2.0]))


def test_z_has_a_word():
    words = {2.1: "lower", -2.1: "higher", 1.9: "level", -1.9: "level", math.nan: "–"}
    assert {z: word(z) for z in words} == words


def test_runs_that_diverged_have_no_standard_error():
    assert math.isnan(standard_error([1.0, math.inf]))
    assert math.isnan(standard_error([1.0]))
