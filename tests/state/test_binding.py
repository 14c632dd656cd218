"""What the param groups and `state` hold is what is trained: replaced, moved, removed, written."""

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


def twins(method, steps=7, more=9, shapes=SHAPES, **options):
    """Two optimizers after the same steps, with the gradients of the steps to come."""
    options = {**OPTIONS, **options}
    one, params, _ = trained(method, shapes, steps, **options)
    two, others, _ = trained(method, shapes, steps, **options)
    return one, params, two, others, problem(shapes, more, seed=5)[1]


def replaced(params, change=lambda W: W):
    return [nn.Parameter(change(p.detach().clone())) for p in params]


def ways_to_replace():
    def whole(optimizer, new):
        optimizer.param_groups[0]["params"] = new

    def one_by_one(optimizer, new):
        for i, p in enumerate(new):
            optimizer.param_groups[0]["params"][i] = p

    def iterator(optimizer, new):
        optimizer.param_groups[0]["params"] = iter(new)

    def with_state(optimizer, new):
        for i, q in enumerate(new):
            p = optimizer.param_groups[0]["params"][i]
            optimizer.param_groups[0]["params"][i] = q
            optimizer.state[q] = optimizer.state.pop(p)

    return [whole, one_by_one, iterator, with_state]


@pytest.mark.parametrize("way", ways_to_replace())
@pytest.mark.parametrize("method", METHODS)
def test_tensors_that_were_replaced_are_trained_with_the_state_of_the_old_ones(method, way):
    one, params, two, others, grads = twins(method, record=True)
    new = replaced(others)
    before = [q.detach().clone() for q in others]
    way(two, new)
    run(one, params, grads)
    run(two, new, grads)
    assert_same([p.detach() for p in params], [q.detach() for q in new])
    assert_same(before, [q.detach() for q in others])  # the old ones stay where they were
    assert [r._replace(name=None) for r in one.basis_report()] == two.basis_report()
    assert_same(one.state_dict(), two.state_dict())
    assert two.state.keys() == {*new}


def test_a_replacement_before_the_first_step_is_as_if_the_optimizer_was_built_with_it():
    tensors, grads = problem(SHAPES, 8)
    early, late, thrown = (parameters(tensors) for _ in range(3))
    one, two = EShampoo(early, **OPTIONS), EShampoo(thrown, **OPTIONS)
    two.param_groups[0]["params"] = late
    assert [r.checks for r in two.basis_report()] == [0] * 6
    run(one, early, grads)
    run(two, late, grads)
    assert_same([p.detach() for p in early], [p.detach() for p in late])


def test_names_follow_their_tensors():
    params = parameters([torch.ones(4, 4), torch.ones(4, 4), torch.ones(4, 4)])
    optimizer = EShampoo([(n, p) for n, p in zip("abc", params, strict=True)])

    def names():
        reported = [r.name for r in optimizer.basis_report() if r.mode == 0]
        return reported, optimizer.param_groups[0]["param_names"]

    optimizer.param_groups[0]["params"] = [params[2], params[0], params[1]]
    assert names() == (["c", "a", "b"], ["c", "a", "b"])
    del optimizer.param_groups[0]["params"][1]
    assert names() == (["c", "b"], ["c", "b"])
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.zeros(4, 4))
    assert names() == (["c", "b"], ["c", "b"])
    group = optimizer.param_groups[0]
    group["params"], group["param_names"] = [*group["params"], params[0]], ["c", "b", "new"]
    assert names() == (["c", "b", "new"], ["c", "b", "new"])


# Moves --------------------------------------------------------------------------------------------


def test_a_model_that_changes_its_dtype_takes_the_state_along():
    """`module.to` writes into the parameters, which stay the same objects."""
    torch.manual_seed(0)
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


def test_a_model_that_moves_to_another_device_takes_its_state_there():
    net = nn.Linear(6, 4)
    optimizer = EShampoo(net.parameters(), **OPTIONS)
    net.to("meta")  # the only other device that is everywhere
    optimizer.param_groups[0]["params"] = list(net.parameters())
    state = optimizer.state_dict()["state"]
    counted = ("basis_checks", "basis_computations", "basis_failures", "basis_waited")
    counted += ("basis_work", "basis_spent", "criterion")
    for entries in state.values():  # what the host counts stays on the host
        assert {v.is_meta for n, v in entries.items() if not n.startswith(counted)} == {True}


def test_parameters_that_were_left_on_meta_are_refused_by_name_at_the_step():
    net = nn.Linear(6, 4, device="meta")
    optimizer = EShampoo(net.named_parameters(), **OPTIONS)
    net.to_empty(device="cpu")
    net(torch.ones(2, 6)).sum().backward()
    with pytest.raises(RuntimeError, match="meta") as error:
        optimizer.step()
    assert "'weight'" in str(error.value)
    assert "param_groups" in str(error.value)


# Removed and added --------------------------------------------------------------------------------


def test_a_parameter_that_was_removed_stands_still_and_is_in_no_state():
    one, params, two, others, grads = twins("EShampoo")
    gone = two.param_groups[0]["params"].pop(1)
    before = gone.detach().clone()
    feed(others, grads[0])
    two.step()
    assert torch.equal(before, gone.detach())
    assert gone not in two.state
    assert sorted(two.state_dict()["state"]) == [0, 1, 2, 3]
    assert len(two.basis_report()) == len(one.basis_report()) - 2
    run(one, params, grads)
    run(two, others[:1] + others[2:], [step[:1] + step[2:] for step in grads[1:]])
    assert_same([p.detach() for p in params[2:]], [q.detach() for q in others[2:]])


def test_a_parameter_that_was_added_to_a_group_starts_afresh():
    _, _, two, others, grads = twins("EShampoo")
    (q,) = parameters([torch.ones(6, 2)])
    two.param_groups[0]["params"].append(q)
    run(two, [*others, q], [[*step, torch.ones(6, 2)] for step in grads[:2]])
    assert two.state[q]["step"].tolist() == [2.0]
    assert two.state[others[0]]["step"].tolist() == [9.0]


def test_a_group_that_was_removed_or_moved_takes_nothing_from_the_others():
    params = parameters(problem(SHAPES, 1)[0])
    optimizer = EShampoo([{"params": [p], "lr": 0.1 * i} for i, p in enumerate(params)])
    grads = problem(SHAPES, 4)[1]
    run(optimizer, params, grads[:2])
    del optimizer.param_groups[0]
    optimizer.param_groups.reverse()
    before = params[0].detach().clone()
    run(optimizer, params, grads[2:])
    assert torch.equal(before, params[0].detach())
    assert [optimizer.state[p]["step"].sum().item() for p in params[1:]] == [4] * 4


# Refused ------------------------------------------------------------------------------------------


def other_shape(optimizer, params):
    optimizer.param_groups[0]["params"][1] = nn.Parameter(torch.ones(3, 5))


def shape_in_place(optimizer, params):
    params[1].data = torch.ones(3, 5, dtype=torch.float64)


def other_length(optimizer, params):
    optimizer.param_groups[0]["params"] = replaced(params)[:-1]


def other_place(optimizer, params):
    new = nn.Parameter(torch.ones(5, 3))
    optimizer.param_groups[0]["params"] = [new, params[0], *params[2:]]


def integers(optimizer, params):
    optimizer.param_groups[0]["params"][1] = torch.ones(5, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    "change", [other_shape, shape_in_place, other_length, other_place, integers]
)
def test_what_cannot_take_the_state_is_refused_by_name_and_nothing_changes(change):
    params = parameters(problem(SHAPES, 1)[0])
    named = [(f"layer.{i}", p) for i, p in enumerate(params)]
    optimizer, grads = EShampoo(named, **OPTIONS), problem(SHAPES, 9)[1]
    run(optimizer, params, grads[:4])
    saved, names = copy.deepcopy(optimizer.state_dict()), optimizer.param_groups[0]["param_names"]
    before, weight = snapshot(optimizer), params[1].data
    feed(params, grads[4])
    change(optimizer, params)
    for call in (optimizer.step, optimizer.state_dict, optimizer.basis_report):
        with pytest.raises((ValueError, TypeError), match=r"'layer.1'"):
            call()
    optimizer.param_groups[0]["params"] = params
    params[1].data = weight
    assert_same(before, snapshot(optimizer))
    assert_same(saved, optimizer.state_dict())
    assert optimizer.param_groups[0]["param_names"] == names
    run(optimizer, params, grads[4:])


def test_what_is_no_tensor_or_in_two_groups_is_refused():
    params = parameters([torch.ones(4, 4), torch.ones(3)])
    optimizer = EShampoo([{"params": [p]} for p in params])
    optimizer.param_groups[0]["params"] = [("weight", params[0])]
    with pytest.raises(TypeError, match=r"tuple.*param_names"):
        optimizer.step()
    optimizer.param_groups[0]["params"] = [params[1]]
    with pytest.raises(ValueError, match="more than one param group"):
        optimizer.step()
    optimizer.param_groups[0]["params"] = [2 * params[0]]
    with pytest.raises(ValueError, match="leaf"):
        optimizer.step()
    optimizer.param_groups[0]["params"] = [params[0]]
    optimizer.step()


def test_a_parameter_that_moves_to_a_group_with_other_blocks_is_refused_by_name():
    params = parameters([torch.ones(4, 4), torch.ones(6, 6)])
    groups = [{"params": [("a", params[0])]}, {"params": [("b", params[1])], "max_dim": 3}]
    optimizer = EShampoo(groups)
    first, second = optimizer.param_groups
    first["params"], second["params"] = [], list(params)
    with pytest.raises(ValueError, match=r"'a'.*param group"):
        optimizer.step()
    first["params"], second["params"] = [params[0]], [params[1]]
    assert len(optimizer.basis_report()) == 2 + 8


# What users write into `state` --------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
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


@pytest.mark.parametrize("how", [delete, empty])
def test_one_parameter_starts_afresh_if_its_state_is_deleted(how):
    one, _, two, others, _ = twins("EShampoo")
    how(two, others[2])  # which shares its stacks with the first
    reset, kept = two.state_dict()["state"][2], two.state_dict()["state"][0]
    assert not reset["exp_avg"].any()
    assert reset["step"].tolist() == [0.0]
    assert torch.equal(reset["basis_0"][0], torch.eye(4))
    assert_same(kept, one.state_dict()["state"][0])


@pytest.mark.parametrize("name", ["exp_avg", "factor_0", "step", "basis_checks"])
def test_an_entry_that_is_written_is_taken(name):
    one, params, two, others, grads = twins("EShampoo")
    for i in (0, 3):
        value = one.state[params[i]].get(name)
        if value is not None:  # a vector has no factor
            two.state[others[i]][name] = 2 * value
            value.mul_(2)  # written in place, which always was possible
    if name == "step":  # the host has to hear of it; in place it does not
        saved = copy.deepcopy(one.state_dict())
        one.load_state_dict(saved)
    run(one, params, grads)
    run(two, others, grads)
    assert_same([p.detach() for p in params], [q.detach() for q in others])
    assert_same(one.state_dict(), two.state_dict())


def test_a_number_is_taken_for_an_entry():
    optimizer, params, grads = trained("EShampoo", SHAPES, 4, **OPTIONS)
    optimizer.state[params[0]]["step"] = 8
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
        with pytest.raises(ValueError, match=r"'exp_avg' in the state of parameter 'w'"):
            call()
    assert torch.equal(before, params[0].detach())
    assert ours.sum() == 0
    optimizer.state[params[0]]["exp_avg"] = ours
    optimizer.step()


def test_state_for_an_unknown_parameter_is_refused():
    optimizer, *_ = trained("EShampoo", [(4, 4)], 2)
    (q,) = parameters([torch.ones(4, 4)])
    optimizer.param_groups[0]["params"].append(q)
    optimizer.state[q] = {"exp_avg": torch.ones(1, 16)}
    with pytest.raises(ValueError, match="does not know yet"):
        optimizer.step()


def test_entries_of_other_tools_are_left_alone_and_travel_along():
    one, params, two, others, grads = twins("EShampoo")
    two.state[others[0]]["seen"] = 3
    two.state["tool"] = {"version": 1}
    run(two, others, grads[:1])
    saved = two.state_dict()
    assert saved["state"][0]["seen"] == 3
    assert saved["state"]["tool"] == {"version": 1}
    one.load_state_dict(copy.deepcopy(saved))
    assert_same(saved, one.state_dict())
    assert one.state[params[0]]["seen"] == 3
    twin = copy.deepcopy(two)
    assert twin.state["tool"] == {"version": 1}
    two.param_groups[0]["params"] = replaced(others)
    assert_same(saved, two.state_dict())


def test_dictionaries_that_are_exchanged_for_equal_ones_change_nothing():
    """As Lightning does when it moves the state of an optimizer to a device."""
    one, params, two, others, grads = twins("EShampoo")
    for p, entries in two.state.items():
        two.state[p] = {name: value.to("cpu") for name, value in entries.items()}
    views = two.state[others[0]]["exp_avg"]
    run(one, params, grads)
    run(two, others, grads)
    assert_same([p.detach() for p in params], [q.detach() for q in others])
    assert two.state[others[0]]["exp_avg"] is views


# A model that was flattened -----------------------------------------------------------------------


def flattened_by_zero(optimizer):
    """What DeepSpeed does to the param groups: one vector of everything, in each."""
    for group in optimizer.param_groups:
        vector = nn.Parameter(torch.cat([p.detach().flatten() for p in group["params"]]))
        vector.grad = torch.ones_like(vector)
        group["params"] = [vector]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("method", sorted(METHODS.keys() - {"FullMatrixAdam"}))
def test_a_model_that_was_flattened_warns_once(method):
    net = nn.Sequential(nn.Linear(256, 255), nn.Linear(255, 256))
    optimizer = METHODS[method](net.named_parameters())
    flattened_by_zero(optimizer)
    with pytest.warns(UserWarning, match=r"AdamW.*\(131071,\).*FSDP2") as found:
        optimizer.step()
    assert len(found) == 1
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    copy.deepcopy(optimizer).step()


@pytest.mark.filterwarnings("error")
def test_a_run_that_goes_on_with_a_flat_model_does_not_warn_again():
    p = nn.Parameter(torch.ones(1 << 16))
    p.grad = torch.ones_like(p)
    optimizer, adamw = EShampoo([p]), torch.optim.AdamW([p])
    with pytest.warns(UserWarning, match="AdamW"):
        optimizer.step()
    resumed = EShampoo([p])
    resumed.load_state_dict(optimizer.state_dict())
    resumed.step()
    adamw.step()
    switched = EShampoo([p])
    with pytest.warns(UserWarning, match="AdamW"):
        switched.load_state_dict(adamw.state_dict())
    switched.step()


@pytest.mark.filterwarnings("error")
def test_a_model_in_which_one_matrix_has_a_basis_does_not_warn():
    shapes = [(1 << 16,), (5, 1), (3, 3)]
    params = parameters([torch.ones(shape) for shape in shapes])
    optimizer = EShampoo(params)
    feed(params, [torch.ones(shape) for shape in shapes])
    optimizer.step()


def test_matrices_that_are_all_under_adam_warn():
    params = parameters([torch.ones(4, 3), torch.ones(3)])
    optimizer = EShampoo(params, matrices="adam")
    feed(params, [torch.ones(4, 3), torch.ones(3)])
    with pytest.warns(UserWarning, match=r"AdamW.*\(4, 3\).*matrices='adam'"):
        optimizer.step()


@pytest.mark.parametrize(
    ("shape", "options"),
    [((40, 50), {"max_dim": 16, "oversize": "identity"}), ((4, 400), {"sides": "right"})],
)
def test_matrices_whose_sides_are_too_long_are_not_blamed_on_the_keyword(shape, options):
    (W,) = parameters([torch.zeros(shape)])
    W.grad = torch.ones_like(W)
    with pytest.warns(UserWarning, match="its sides are too long for a basis"):
        EShampoo([W], **options).step()
