"""Welch's t-test by hand, and what its result is called."""

import math

import pytest
from scipy.special import betainc

from eshampoo.lab.report.significance import Difference, difference, standard_error


def test_t_df_and_p_are_those_of_welch():
    """df = (s²/n + u²/m)² / ((s²/n)²/(n−1) + (u²/m)²/(m−1)) with s² = 1, u² = 4, n = m = 3."""
    low, high = [1.0, 2.0, 3.0], [4.0, 6.0, 8.0]
    assert standard_error(low) == pytest.approx(1 / math.sqrt(3))
    found = difference(low, high)
    assert found.t == pytest.approx(4 / math.sqrt(5 / 3))
    assert found.df == pytest.approx((5 / 3) ** 2 / ((1 / 3) ** 2 / 2 + (4 / 3) ** 2 / 2))
    assert found.p == pytest.approx(
        betainc(found.df / 2, 1 / 2, found.df / (found.df + found.t**2))
    )
    assert difference(high, low).t == -found.t
    assert str(difference([9.0, 9.1, 9.2], low)) == "higher (t(2.0) = -12.2, p = 0.0061)"


def test_the_level_is_five_percent():
    words = {(2.1, 0.049): "lower", (-2.1, 0.049): "higher", (2.0, 0.051): "level"}
    assert {(t, p): Difference(t, 4.0, p).word for t, p in words} == words


def test_a_run_that_diverged_is_worse_than_any_other():
    assert str(difference([1.0, 2.0], [1.0, math.inf])) == "lower (a run diverged)"
    assert difference([math.inf], [5.0]).word == "higher"
    assert str(difference([1.0, math.inf], [math.inf, 2.0])) == "–"
    assert math.isnan(standard_error([1.0, math.inf]))


@pytest.mark.parametrize("values", [[1.0], [1.0, 1.0], [1.0, math.nan]])
def test_one_seed_equal_seeds_and_nan_tell_nothing(values):
    assert str(difference(values, [1.0, 2.0])) == "–"
    assert str(difference([1.0, 2.0], values)) == "–"
