"""Parameters that do not require gradients have no state until they are trained."""

import copy

import pytest
import torch
from keyword_table import METHODS
from training import assert_same, feed, parameters, problem, run, snapshot, through_a_file

from eshampoo import EShampoo

SHAPES = [(4, 4), (5, 3), (6,), (4, 4)]
LATE = (1, 3)  # frozen at first
METHOD_OPTIONS = {"frequency": 3}


def frozen_problem(steps):
    """Parameters of which some are frozen, and gradients."""
    tensors, grads = problem(SHAPES, steps)
    params = parameters(tensors)
    freeze(params)
    return params, grads


def freeze(params, frozen=True):
    for i in LATE:
        params[i].requires_grad_(not frozen)
        params[i].grad = None


def train(optimizer, params, grads):
    """Steps in which frozen parameters get no gradient."""
    for step in grads:
        pairs = zip(params, step, strict=True)
        run(optimizer, params, [[G if p.requires_grad else None for p, G in pairs]])


def test_a_frozen_parameter_has_no_state_and_is_in_no_file():
    params, grads = frozen_problem(4)
    optimizer = EShampoo(params, frequency=2)
    before = [p.detach().clone() for p in params]
    train(optimizer, params, grads)
    assert [p in optimizer.state for p in params] == [True, False, True, False]
    assert optimizer.state_dict()["state"].keys() == {0, 2}
    assert [torch.equal(p, W) for p, W in zip(params, before, strict=True)] == [
        False, True, False, True,
    ]  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_a_parameter_that_is_unfrozen_is_one_that_was_added_then(method):
    params, grads = frozen_problem(12)
    others = parameters(params)
    options = {"frequency": 3}
    optimizer = METHODS[method](params, **options)
    added = METHODS[method]([p for i, p in enumerate(others) if i not in LATE], **options)
    train(optimizer, params, grads[:5])
    freeze(others)
    train(added, others, grads[:5])
    freeze(params, False)
    freeze(others, False)
    added.add_param_group({"params": [others[i] for i in LATE]})
    train(optimizer, params, grads[5:])
    train(added, others, grads[5:])
    for p, q in zip(params, others, strict=True):
        assert_same(p.detach(), q.detach())
        assert_same(optimizer.state[p], added.state[q])


# When the state is saved, and whether the parameters are frozen in the run that continues.
@pytest.mark.parametrize("frozen_there", [True, False])
@pytest.mark.parametrize("when", ["before", "after", "frozen again"])
def test_a_run_resumes_before_and_after_it_unfreezes(when, frozen_there):
    params, grads = frozen_problem(15)
    optimizer = EShampoo(params, frequency=3)
    train(optimizer, params, grads[:4])
    if when != "before":
        freeze(params, False)
        train(optimizer, params, grads[4:8])
    freeze(params, when != "after")
    saved = through_a_file(optimizer.state_dict())
    assert saved["state"].keys() == ({0, 2} if when == "before" else {0, 1, 2, 3})
    weights = parameters(params)
    freeze(weights, frozen_there)
    resumed = EShampoo(weights, frequency=3)
    resumed.load_state_dict(saved)
    freeze(params, False)
    freeze(weights, False)
    train(optimizer, params, grads[8:])
    train(resumed, weights, grads[8:])
    for p, q in zip(params, weights, strict=True):
        assert_same(p.detach(), q.detach())
        assert_same(optimizer.state[p], resumed.state[q])


def test_a_parameter_that_was_trained_keeps_its_state_while_frozen():
    params, grads = frozen_problem(9)
    freeze(params, False)
    optimizer = EShampoo(params, frequency=2)
    train(optimizer, params, grads[:3])
    freeze(params)
    before = copy.deepcopy([optimizer.state[params[i]] for i in LATE])
    train(optimizer, params, grads[3:6])
    twin, optimizer = copy.deepcopy((params, optimizer))
    assert_same(before, [optimizer.state[twin[i]] for i in LATE])


def test_a_refused_state_gives_a_frozen_parameter_no_room():
    params, grads = frozen_problem(3)
    optimizer = EShampoo(params)
    freeze(params, False)
    other = EShampoo(params)
    train(other, params, grads)
    saved = other.state_dict()
    saved["state"][0]["exp_avg"] = torch.ones(3)
    freeze(params)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match="exp_avg"):
        optimizer.load_state_dict(saved)
    assert_same(before, snapshot(optimizer))


def test_a_state_of_adamw_without_some_parameters_starts_them_afresh():
    params, grads = frozen_problem(6)
    adamw = torch.optim.AdamW(params)
    train(adamw, params, grads[:3])
    optimizer = EShampoo(params)
    optimizer.load_state_dict(adamw.state_dict())
    freeze(params, False)
    feed(params, grads[3])
    optimizer.step()
    assert [int(optimizer.state[p]["step"].max()) for p in params] == [4, 1, 4, 1]
