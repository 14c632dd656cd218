"""With frequency="auto" the checks of the blocks are spread over the steps, with a number not."""

from functools import partial
from itertools import pairwise

import pytest
from training import parameters, problem, run

from eshampoo import EShampoo
from eshampoo.checks import TOGETHER_UNTIL, is_new
from eshampoo.options import Options


def steps_of_checks(frequency):
    """When each of eight equal blocks was checked, in 60 steps."""
    tensors, grads = problem([(6, 5)] * 8, 60)
    params = parameters(tensors)
    optimizer = EShampoo(params, frequency=frequency, record=True)
    run(optimizer, params, grads)
    return [[t for t, _, _ in report.history] for report in optimizer.basis_report()[::2]]


def test_checks_are_spread_after_step_20_with_auto_and_not_with_a_number():
    assert TOGETHER_UNTIL == 20
    spread = steps_of_checks("auto")
    assert len({tuple(t for t in steps if t <= 20) for steps in spread}) == 1
    for last, check in pairwise(t for t in spread[0] if t >= 26):  # gaps of at least 3
        at = [sum(t in steps for steps in spread) for t in range(last + 1, check + 1)]
        assert sum(at) == 8
        assert max(at) <= -(-8 // len(at))
    assert steps_of_checks(5) == [[*range(5, 61, 5)]] * 8


@pytest.mark.parametrize("beta2", [0.95, 0.999])
@pytest.mark.parametrize("offset", [0.0, 0.3, 0.999])
def test_between_two_checks_of_all_there_is_one_of_each_block(beta2, offset):
    checks = partial(is_new, beta2, 0.1)
    common = [t for t in range(1, 9000) if checks(t)]
    own = [t for t in range(1, 9000) if checks(t, offset)]
    for last, following in pairwise(common):
        early = int(offset * (following - last)) if last >= TOGETHER_UNTIL else 0
        assert [t for t in own if last < t <= following] == [following - early]
    assert [t for t in range(1, 50) if Options(frequency=7).checks_at(t, offset)] == [
        *range(7, 50, 7)
    ]
