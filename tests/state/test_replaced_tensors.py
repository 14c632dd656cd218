"""What the param groups and `state` hold is what is trained: tensors and entries replaced."""

import copy
from collections import defaultdict

import pytest
import torch
from keyword_table import METHODS
from torch import nn
from training import assert_same, feed, parameters, problem, run, snapshot, trained

from eshampoo import EShampoo

SHAPES = [(4, 4), (5, 3), (4, 4), (3,), ()]
OPTIONS = {"frequency": 3}
# One row of the table for each kind of state.
STATES = ("EShampoo", "Shampoo")


def twins(method, steps=7, more=9, shapes=SHAPES, **options):
    """Two optimizers after the same steps, with the gradients of the steps to come."""
    options = {**OPTIONS, **options}
    one, params, _ = trained(method, shapes, steps, **options)
    two, others, _ = trained(method, shapes, steps, **options)
    return one, params, two, others, problem(shapes, more, seed=5)[1]


def replaced(params):
    return [nn.Parameter(p.detach().clone()) for p in params]


# Tensors, followed by their place -----------------------------------------------------------------


def all_at_once(optimizer, new):
    optimizer.param_groups[0]["params"] = new


def one_by_one(optimizer, new):
    for i, p in enumerate(new):
        optimizer.param_groups[0]["params"][i] = p


@pytest.mark.parametrize("way", [all_at_once, one_by_one])
@pytest.mark.parametrize("method", STATES)
def test_tensors_that_were_replaced_are_trained_with_the_state_of_the_old_ones(method, way):
    one, params, two, others, grads = twins(method)
    new = replaced(others)
    before = [q.detach().clone() for q in others]
    way(two, new)
    run(one, params, grads)
    run(two, new, grads)
    assert_same([p.detach() for p in params], [q.detach() for q in new])
    assert_same(before, [q.detach() for q in others])  # the old ones stay where they were
    assert one.basis_report() == two.basis_report()
    assert_same(one.state_dict(), two.state_dict())
    assert two.state.keys() == {*new}


def test_a_replacement_before_the_first_step_is_as_if_the_optimizer_was_built_with_it():
    tensors, grads = problem(SHAPES, 8)
    early, late, thrown = (parameters(tensors) for _ in range(3))
    one, two = EShampoo(early, **OPTIONS), EShampoo(thrown, **OPTIONS)
    two.param_groups[0]["params"] = late
    run(one, early, grads)
    run(two, late, grads)
    assert_same([p.detach() for p in early], [p.detach() for p in late])


def test_a_model_that_changes_its_dtype_takes_the_state_along():
    """`module.to` writes into the parameters, which stay the same objects."""
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizer = EShampoo(net.parameters(), frequency=2, tau=0.0)

    def train(dtype):
        X = torch.randn(16, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
        optimizer.zero_grad()
        net(X).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        train(torch.float32)
    before = copy.deepcopy(optimizer.state_dict())
    net.double()
    after = optimizer.state_dict()
    weight = net[0].weight
    assert optimizer.state[weight]["exp_avg"].dtype == torch.float64
    for i, entries in before["state"].items():
        for name, value in entries.items():
            assert torch.equal(value, after["state"][i][name].to(value.dtype)), name
    train(torch.float64)
    net.bfloat16()
    train(torch.bfloat16)
    assert optimizer.state[weight]["exp_avg"].dtype == torch.float32
    assert optimizer.state[weight]["step"].tolist() == [5.0]


@pytest.mark.parametrize("swap", [True, False])
def test_parameters_that_are_materialised_from_meta_are_trained(swap):
    """With swapped tensors the parameters stay the same objects; otherwise they are replaced."""
    tensors, grads = problem([(4, 6), (4,)], 6)
    with torch.device("meta"):
        net = nn.Linear(6, 4, dtype=torch.float64)
    optimizer = EShampoo(net.parameters(), **OPTIONS)
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        net.to_empty(device="cpu")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    params = list(net.parameters())
    if swap:
        assert params[0] is optimizer.param_groups[0]["params"][0]
    else:
        optimizer.param_groups[0]["params"] = params
    for p, W in zip(params, tensors, strict=True):
        p.data.copy_(W)
    twin = parameters(tensors)
    run(optimizer, params, grads)
    run(EShampoo(twin, **OPTIONS), twin, grads)
    assert_same([p.detach() for p in params], [p.detach() for p in twin])
    assert optimizer.state[params[0]]["exp_avg"].device.type == "cpu"


def test_parameters_that_were_left_on_meta_are_refused_by_name_at_the_step():
    net = nn.Linear(6, 4, device="meta")
    optimizer = EShampoo(net.named_parameters(), **OPTIONS)
    net.to_empty(device="cpu")
    net(torch.ones(2, 6)).sum().backward()
    with pytest.raises(RuntimeError, match=r"'weight'.*meta.*param_groups"):
        optimizer.step()


# Tensors that cannot take the state ---------------------------------------------------------------


def other_shape(optimizer, params):
    optimizer.param_groups[0]["params"][1] = nn.Parameter(torch.ones(3, 5))


def shape_in_place(optimizer, params):
    params[1].data = torch.ones(3, 5, dtype=torch.float64)


def integers(optimizer, params):
    optimizer.param_groups[0]["params"][1] = torch.ones(5, 3, dtype=torch.int64)


def one_less(optimizer, params):
    del optimizer.param_groups[0]["params"][4]


def one_more(optimizer, params):
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(3)))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (other_shape, "'layer.1'"),
        (shape_in_place, "'layer.1'"),
        (integers, "'layer.1'"),
        (one_less, r"\[4\] parameters.*\[5\]"),
        (one_more, r"\[6\] parameters.*\[5\]"),
    ],
)
def test_what_cannot_take_the_state_is_refused_and_nothing_changes(change, word):
    params = parameters(problem(SHAPES, 1)[0])
    named = [(f"layer.{i}", p) for i, p in enumerate(params)]
    optimizer, grads = EShampoo(named, **OPTIONS), problem(SHAPES, 9)[1]
    run(optimizer, params, grads[:4])
    saved = copy.deepcopy(optimizer.state_dict())
    before, weight = snapshot(optimizer), params[1].data
    feed(params, grads[4])
    change(optimizer, params)
    for call in (optimizer.step, optimizer.state_dict, optimizer.basis_report):
        with pytest.raises((ValueError, TypeError), match=word):
            call()
    optimizer.param_groups[0]["params"] = list(params)
    params[1].data = weight
    assert_same(before, snapshot(optimizer))
    assert_same(saved, optimizer.state_dict())
    run(optimizer, params, grads[4:])


# Entries of `state` -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", STATES)
def test_a_state_that_was_thrown_away_starts_afresh(method):
    grads = problem(SHAPES, 8)[1]
    optimizer, params, _ = trained(method, SHAPES, 5, **OPTIONS)
    optimizer.state = defaultdict(dict)
    twin = copy.deepcopy(params)
    fresh = METHODS[method](twin, **OPTIONS)
    run(optimizer, params, grads)
    run(fresh, twin, grads)
    assert_same([p.detach() for p in params], [p.detach() for p in twin])
    assert_same(optimizer.state_dict(), fresh.state_dict())


def delete(optimizer, p):
    del optimizer.state[p]


def empty(optimizer, p):
    optimizer.state[p] = {}


def clear(optimizer, p):
    optimizer.state[p].clear()


@pytest.mark.parametrize("how", [delete, empty, clear])
@pytest.mark.parametrize("which", [2, 4])  # one that shares its stacks with the first, and the last
def test_one_parameter_starts_afresh_if_its_state_is_deleted(how, which):
    one, _, two, others, _ = twins("EShampoo")
    how(two, others[which])
    reset, kept = two.state_dict()["state"][which], two.state_dict()["state"][0]
    assert not reset["exp_avg"].any()
    assert reset["step"].sum() == 0
    if which == 2:
        assert torch.equal(reset["basis_0"][0], torch.eye(4))
    assert_same(kept, one.state_dict()["state"][0])


@pytest.mark.parametrize("name", ["exp_avg", "factor_0", "basis_checks"])
def test_an_entry_that_is_written_is_taken(name):
    one, params, two, others, grads = twins("EShampoo")
    value = one.state[params[0]][name]
    two.state[others[0]][name] = 2 * value
    value.mul_(2)  # written in place, which always was possible
    run(one, params, grads)
    run(two, others, grads)
    assert_same([p.detach() for p in params], [q.detach() for q in others])
    assert_same(one.state_dict(), two.state_dict())


@pytest.mark.parametrize("eight", [8, torch.tensor([8.0])])
def test_a_step_that_is_written_is_taken_also_as_a_number(eight):
    optimizer, params, grads = trained("EShampoo", SHAPES, 4, **OPTIONS)
    optimizer.state[params[0]]["step"] = eight
    run(optimizer, params, grads[:1])
    assert optimizer.state[params[0]]["step"].tolist() == [9.0]
    assert optimizer.basis_report()[0].checks == 2  # at steps 3 and 9


@pytest.mark.parametrize("value", [torch.ones(2, 2), "text", None, "missing"])
def test_an_entry_that_does_not_fit_is_refused_by_name(value):
    params = parameters(problem(SHAPES, 1)[0])
    optimizer = EShampoo([("w", params[0]), *[(str(i), p) for i, p in enumerate(params[1:])]])
    feed(params, problem(SHAPES, 1)[1][0])
    before, ours = params[0].detach().clone(), optimizer.state[params[0]]["exp_avg"]
    if value == "missing":
        del optimizer.state[params[0]]["exp_avg"]
    else:
        optimizer.state[params[0]]["exp_avg"] = value
    for call in (optimizer.step, optimizer.state_dict):
        with pytest.raises(ValueError, match=r"'exp_avg'.*parameter 'w'"):
            call()
    assert torch.equal(before, params[0].detach())
    assert ours.sum() == 0
    optimizer.state[params[0]]["exp_avg"] = ours
    optimizer.step()


def test_dictionaries_that_are_exchanged_for_equal_ones_change_nothing():
    """As Lightning does when it moves the state of an optimizer to a device."""
    one, params, two, others, grads = twins("EShampoo")
    for p, entries in two.state.items():
        two.state[p] = {name: value.to("cpu") for name, value in entries.items()}
    run(one, params, grads)
    run(two, others, grads)
    assert_same([p.detach() for p in params], [q.detach() for q in others])


# A model without a basis --------------------------------------------------------------------------


@pytest.mark.filterwarnings("error")
def test_a_model_without_a_basis_warns_once():
    p = nn.Parameter(torch.ones(1 << 16))
    p.grad = torch.ones_like(p)
    optimizer, adamw = EShampoo([p]), torch.optim.AdamW([p])
    with pytest.warns(UserWarning, match=r"AdamW.*\(65536,\).*FSDP2"):
        optimizer.step()
    optimizer.step()
    resumed = EShampoo([p])
    resumed.load_state_dict(optimizer.state_dict())
    resumed.step()
    copy.deepcopy(resumed).step()
    adamw.step()
    switched = EShampoo([p])
    with pytest.warns(UserWarning, match="AdamW"):
        switched.load_state_dict(adamw.state_dict())
    switched.step()


@pytest.mark.filterwarnings("error")
def test_a_model_in_which_one_matrix_has_a_basis_does_not_warn():
    shapes = [(1 << 16,), (5, 1), (3, 3)]
    params = parameters([torch.ones(shape) for shape in shapes])
    run(EShampoo(params), params, [[torch.ones(shape) for shape in shapes]])


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((4, 3), {"matrices": "adam"}),
        ((40, 50), {"max_dim": 16, "oversize": "identity"}),
        ((4, 400), {"sides": "right"}),
    ],
)
def test_matrices_without_a_basis_warn_too(shape, options):
    (W,) = parameters([torch.zeros(shape)])
    W.grad = torch.ones_like(W)
    with pytest.warns(UserWarning, match="nothing here has a basis"):
        EShampoo([W], **options).step()
