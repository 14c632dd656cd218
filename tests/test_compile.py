"""`torch.compile` leaves a step alone."""

import pytest
import torch
from torch._dynamo.utils import counters
from training import assert_same, feed, parameters, problem

from eshampoo import EShampoo


@pytest.mark.slow
def test_a_compiled_step_has_the_same_bits_no_graph_and_is_not_compiled_again():
    tensors, grads = problem([(4, 3), (3,)], 6)
    runs, frames = [], []
    for compiled in (False, True):
        torch._dynamo.reset()
        counters.clear()
        params = parameters(tensors)
        optimizer = EShampoo(params, frequency=2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for each in grads:
            feed(params, each)
            step()
            schedule.step()
            frames.append(counters["frames"]["total"])
        runs.append(([*params], optimizer.state_dict()["state"]))
    assert_same(*runs)
    assert counters["stats"]["unique_graphs"] == 0
    assert frames[-1] == frames[len(grads) + 1]  # nothing was compiled after the second step


@pytest.mark.slow
def test_a_compiled_step_breaks_the_graph_once_and_never_again():
    tensors, grads = problem([(4, 3), (3,)], 4)
    torch._dynamo.reset()
    counters.clear()
    params = parameters(tensors)
    step = torch.compile(EShampoo(params, frequency=2).step, backend="eager")
    frames = []
    for each in grads:
        feed(params, each)
        step()
        frames.append(counters["frames"]["total"])
    assert list(counters["graph_break"].values()) == [1]
    assert frames == frames[:1] * len(grads)
