"""Averages that are kept in bfloat16 do not stall."""

import pytest
import torch

from eshampoo.math.rounding import average_rounded_, thresholds


def test_the_thresholds_run_evenly_through_all_values():
    along = thresholds(torch.zeros(1), 0, 4096)[0].sort().values
    over_time = torch.stack([thresholds(torch.tensor([float(t)]), 7, 1)[0, 0] for t in range(4096)])
    even = torch.arange(4096) * 16
    for found in (along, over_time.sort().values):
        assert 0 <= found.min() <= found.max() < 2**16
        assert (found - even).abs().max() < 2**16 * 0.005  # random numbers: 0.02


def test_the_thresholds_depend_on_the_position_and_the_step_alone():
    t = torch.tensor([3.0, 900.0])
    whole = thresholds(t, 0, 100)
    assert torch.equal(whole[:, 40:70], thresholds(t, 40, 30))
    assert torch.equal(whole[1:], thresholds(t[1:], 0, 100))
    assert not torch.equal(whole[0], whole[1])


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.9, 0.99, 0.999])
def test_an_average_in_bfloat16_comes_to_its_mean(beta):
    value = torch.linspace(1, 5, 1001).view(1, -1)
    share = torch.tensor([[1 - beta]])
    M, nearest = torch.zeros(1, 1001).bfloat16(), torch.zeros(1, 1001).bfloat16()
    steps = int(12 / (1 - beta))
    total = torch.zeros(1, 1001)
    for t in range(steps):
        average_rounded_(M, value, share, torch.tensor([float(t)]))
        nearest.copy_(nearest.float().lerp_(value, share))
        total += M.float() * (t >= steps // 2)
    mean = total / (steps - steps // 2)
    error = mean / value - 1
    assert error.abs().max() <= 2**-7  # one step of bfloat16
    assert error.mean().abs() <= 2**-11
    if beta == 0.999:  # what this is for
        assert (nearest.float() / value).max() < 0.8


def test_what_is_returned_is_not_rounded_and_a_share_of_zero_leaves_every_bit():
    M = torch.randn(2, 50).bfloat16()
    before, value = M.clone(), torch.randn(2, 50)
    share = torch.tensor([[0.1], [0.0]])
    average = average_rounded_(M, value, share, torch.tensor([5.0, 5.0]))
    assert torch.equal(average, before.float().lerp(value, share))
    assert torch.equal(M[1], before[1])
    assert ((M[0].float() - average[0]).abs() <= 2**-7 * average[0].abs()).all()
