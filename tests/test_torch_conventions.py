"""What torch's own tests ask of every optimizer and the other files here do not.

Found by running its `TestOptimRenewed` with our classes (docs/reliability.md).
"""

import copy
from pathlib import Path

import pytest
import torch
import torch_names_in
from keyword_table import METHODS
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from training import assert_same, feed, parameters, problem, run, trained

from eshampoo import EShampoo

SHAPES = [(4, 3), (3,)]
STATES = ["EShampoo", "Shampoo"]  # one for each kind of state


@pytest.mark.parametrize("method", STATES)
def test_a_learning_rate_is_refused_before_the_parameters_are_looked_at(method):
    with pytest.raises(ValueError, match="Tensor lr must be 1-element"):
        METHODS[method](None, lr=torch.tensor([1e-3, 1e-3]))
    with pytest.raises(ValueError, match="lr=-1"):
        METHODS[method](None, lr=-1)


@pytest.mark.parametrize("method", STATES)
def test_names_are_given_for_all_parameters_or_for_none(method):
    p, q = parameters([torch.ones(2, 2), torch.ones(2, 2)])
    with pytest.raises(ValueError, match="Some param names are missing"):
        METHODS[method]([("weight", p), q])
    optimizer = METHODS[method]([("weight", p)])
    with pytest.raises(ValueError, match="with/without names"):
        optimizer.add_param_group({"params": [q]})


@pytest.mark.parametrize("method", STATES)
def test_a_state_loads_from_bare_into_named_parameters_and_back(method):
    optimizer, params, grads = trained(method, SHAPES, 3)
    twins = parameters([p.detach().clone() for p in params])
    named = METHODS[method]([(f"p{i}", p) for i, p in enumerate(twins)])
    named.load_state_dict(optimizer.state_dict())
    assert named.param_groups[0]["param_names"] == ["p0", "p1"]
    optimizer.load_state_dict(named.state_dict())
    run(optimizer, params, grads)
    run(named, twins, grads)
    assert_same([*params], [*twins])


@pytest.mark.parametrize("method", STATES)
def test_a_state_from_before_an_option_existed_takes_the_option_of_the_optimizer(method):
    optimizer, params, grads = trained(method, SHAPES, 2, maximize=True)
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        del group["maximize"], group["nonfinite"]
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["maximize"] is True
    run(optimizer, params, grads)


@pytest.mark.parametrize("method", STATES)
def test_a_gradient_of_zeros_moves_nothing_without_weight_decay(method):
    tensors, _ = problem(SHAPES, 1)
    params = parameters(tensors)
    optimizer = METHODS[method](params, weight_decay=0.0)
    run(optimizer, params, [[torch.zeros_like(p) for p in params]] * 3)
    assert_same([p.detach() for p in params], tensors)


@pytest.mark.parametrize("method", STATES)
def test_a_copy_has_the_public_attributes_of_the_original(method):
    optimizer, _, _ = trained(method, SHAPES, 1)
    public = {name for name in vars(optimizer) if not name.startswith("_")}
    assert public == {name for name in vars(copy.deepcopy(optimizer)) if not name.startswith("_")}


@pytest.mark.parametrize("method", STATES)
def test_it_prints_its_groups(method):
    optimizer = METHODS[method](parameters([torch.ones(2, 2)]), lr=0.25)
    assert "lr: 0.25" in repr(optimizer)
    assert repr(optimizer).startswith(type(optimizer).__name__)


def test_it_prints_what_differs_from_the_defaults_of_the_class():
    p, q, r = parameters([torch.ones(2, 2), torch.ones(2), torch.ones(3)])
    groups = [{"params": [p, q]}, {"params": [r], "tau": 0.5, "kind": "head"}]
    lines = repr(EShampoo(groups, weight_decay=0.1)).splitlines()
    assert lines[1].split(": ", 1)[1] == "2 tensors, lr: 0.001, weight_decay: 0.1"
    assert (
        lines[2].split(": ", 1)[1]
        == "1 tensors, tau: 0.5, kind: head, lr: 0.001, weight_decay: 0.1"
    )
    assert "frequency: 50" in repr(EShampoo.as_published([p]))


def test_it_prints_many_groups_in_15_lines_and_counts_the_rest():
    optimizer = EShampoo([{"params": [p]} for p in parameters([torch.ones(2)] * 40)])
    lines = repr(optimizer).splitlines()
    assert len(lines) <= 15
    assert "and 28 more groups" in lines[-2]


WAYS_TO_STEP = {
    "alone": lambda optimizer: optimizer.step(),
    "with a closure": lambda optimizer: optimizer.step(lambda: 0.0),
    "with a scheduler": lambda optimizer: scheduled(optimizer).step(),
    "with hooks": lambda optimizer: hooked(optimizer).step(),
}


def scheduled(optimizer):
    """A scheduler replaces `step` by a function of its own."""
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    return optimizer


def hooked(optimizer):
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize("step", WAYS_TO_STEP.values(), ids=WAYS_TO_STEP)
def test_a_warning_points_at_the_line_of_the_user(step):
    (vector,), (matrix,) = parameters([torch.ones(3)]), parameters([torch.ones(3, 3)])
    for p, gradient, words in ((vector, 1.0, "nothing here has"), (matrix, torch.nan, "NaN")):
        p.grad = torch.full_like(p, gradient)
        with pytest.warns(UserWarning, match=words) as caught:
            step(EShampoo([p]))
        assert [warning.filename for warning in caught] == [__file__]


def test_hooks_of_all_optimizers_run_around_those_of_one():
    optimizer, params, grads = trained("EShampoo", SHAPES, 1)
    ran = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: ran.append("all, before")),
        optimizer.register_step_pre_hook(lambda *_: ran.append("one, before")),
        optimizer.register_step_post_hook(lambda *_: ran.append("one, after")),
        register_optimizer_step_post_hook(lambda *_: ran.append("all, after")),
    ]
    feed(params, grads[0])
    optimizer.step()
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert ran == ["all, before", "one, before", "one, after", "all, after"]


def test_a_parameter_twice_in_a_param_group_warns_and_moves_once():
    (tensor,), ((gradient,),) = problem([(4, 3)], 1)
    (p,), (q,) = parameters([tensor]), parameters([tensor])
    with pytest.warns(UserWarning, match="duplicate parameters"):
        twice = METHODS["EShampoo"]([p, p])
    once = METHODS["EShampoo"]([q])
    for each, own in ((twice, p), (once, q)):
        own.grad = gradient.clone()
        each.step()
    assert_same([p.detach()], [q.detach()])


@pytest.mark.parametrize("method", STATES)
def test_a_group_without_parameters_takes_steps(method):
    optimizer = METHODS[method]([{"params": []}])
    assert optimizer.step() is None
    assert optimizer.state_dict()["state"] == {}


def test_torch_has_the_private_names_that_we_use_and_a_version_without_them_is_noticed():
    folder = Path(torch.__file__).parents[1]
    assert torch_names_in.missing(lambda file: (folder / file).read_text()) == []
    every = {name for name, _ in torch_names_in.private_names()}
    assert {*torch_names_in.missing(lambda file: "")} == every != set()
