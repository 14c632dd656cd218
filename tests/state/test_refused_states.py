"""What is no state, or has values that no run can have written, is refused and changes nothing."""

import pytest
import torch
from keyword_table import METHODS
from training import assert_same, parameters, run, snapshot, through_a_file, trained

NAN = float("nan")


def refused(optimizer, state_dict, word):
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=word):
        optimizer.load_state_dict(state_dict)
    assert_same(before, snapshot(optimizer))


def with_entry(state_dict, index, name, value):
    """The state with another entry; the original stays as it is."""
    state = {k: dict(v) for k, v in state_dict["state"].items()}
    state[index][name] = value
    return {**state_dict, "state": state}


@pytest.mark.parametrize("method", METHODS)
def test_a_state_of_this_library_needs_no_code(method):
    optimizer, *_ = trained(method, [(4, 4), (3,)], 4, frequency=2)
    assert_same(optimizer.state_dict(), through_a_file(optimizer.state_dict()))


NO_STATE = {
    "nothing": {},
    "a list": [1, 2],
    "a model": {"weight": torch.ones(4, 4), "bias": torch.ones(4)},
    "a list as state": {"state": [1, 2], "param_groups": []},
    "numbers as groups": {"state": {}, "param_groups": [1, 2]},
    "groups without parameters": {"state": {}, "param_groups": [{"lr": 1.0}]},
    "numbers as state": {"state": {0: 3.0}, "param_groups": [{"params": [0]}]},
}


@pytest.mark.parametrize("state_dict", NO_STATE.values(), ids=NO_STATE)
def test_what_is_no_state_is_refused(state_dict):
    optimizer, *_ = trained("EShampoo", [(4, 4), (3,)], 4, frequency=2)
    refused(optimizer, state_dict, "not the state of an optimizer")


def test_entries_of_another_kind_are_refused():
    optimizer, *_ = trained("EShampoo", [(4, 4), (3,)], 4, frequency=2, merge_dims=False)
    state_dict = optimizer.state_dict()
    for name, value in [
        ("exp_avg", "text"),
        ("exp_avg", 3.0),
        ("step", "text"),
        ("step", NAN),
        ("step", -1),
        ("basis_checks", torch.ones(1, 2)),
        ("exp_avg", torch.ones(1, 4, 4).to_sparse()),
        ("exp_avg", torch.ones(1, 4, 4, device="meta")),
    ]:
        word = rf"shape \(4, 4\).*{name}|{name}.*shape \(4, 4\)"
        refused(optimizer, with_entry(state_dict, 0, name, value), word)


def changed(value):
    """One number of an entry, replaced."""

    def change(X):
        X = X.clone()
        X.view(-1)[0] = value
        return X

    return change


# By entry: what it becomes, and what the error says.
IMPOSSIBLE = {
    **{
        f"{value} in {name}": (name, changed(value), "NaN or Inf")
        for name in ("exp_avg", "exp_avg_sq", "norm_sq", "factor_0", "basis_1", "step")
        for value in (NAN, float("inf"))
    },
    "negative D": ("exp_avg_sq", changed(-1e-12), "negative"),
    "a negative square of a norm": ("norm_sq", changed(-1.0), "negative"),
    "a negative step": ("step", changed(-1000), "negative"),
    "a negative number of skipped gradients": ("skipped", changed(-1), "negative"),
    "a negative counter": ("basis_checks", changed(-7), "negative"),
    "a negative cost": ("basis_spent", changed(-1.0), "negative"),
}


@pytest.mark.parametrize(("name", "change", "word"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_a_value_that_no_run_can_have_written_is_refused(name, change, word):
    optimizer, *_ = trained("EShampoo", [(3,), (6, 6)], 6, frequency=2)
    state_dict = optimizer.state_dict()
    entry = change(state_dict["state"][1][name])
    refused(optimizer, with_entry(state_dict, 1, name, entry), f"{name}.*6, 6.* {word}")


@pytest.mark.parametrize("name", ["exp_avg", "factor_0", "root_1", "exp_avg_sq"])
def test_the_same_holds_for_roots_and_in_a_lean_state(name):
    optimizer, *_ = trained("Shampoo", [(3,), (6, 6)], 6, frequency=2, state="lean")
    state_dict = optimizer.state_dict()
    entry = changed(NAN)(state_dict["state"][1][name])
    refused(optimizer, with_entry(state_dict, 1, name, entry), f"{name}.*6, 6.* NaN or Inf")


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [("exp_avg", NAN, "NaN or Inf"), ("exp_avg_sq", -1.0, "negative"), ("step", -2.0, "negative")],
)
def test_a_state_of_adamw_is_looked_at_too(name, value, word):
    optimizer, params, grads = trained("EShampoo", [(4, 4), (3,)], 4)
    adamw = torch.optim.AdamW(params)
    run(adamw, params, grads[:2])
    adamw.state[params[1]][name].fill_(value)
    refused(optimizer, adamw.state_dict(), word)


def test_before_its_first_gradient_a_state_of_soap_is_at_minus_one():
    params = parameters([torch.ones(4, 4), torch.ones(3)])
    optimizer, again = (METHODS["SOAP"](params) for _ in range(2))
    again.load_state_dict(through_a_file(optimizer.state_dict()))
    assert again.state[params[0]]["step"].tolist() == [-1]


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("method", "form"), [("EShampoo", "lean"), ("Shampoo", "full")])
def test_what_the_library_writes_loads_also_after_it_was_rounded(method, form, narrow):
    shapes, options = [(12, 8), (5,), (3, 2, 4)], {"frequency": 1, "state": form}
    optimizer, params, grads = trained(method, shapes, 12, dtype=torch.float32, **options)
    state_dict = optimizer.state_dict()
    for entries in state_dict["state"].values():
        for name, value in entries.items():
            # Costs are counted in arithmetic, beyond the largest float16.
            if value.is_floating_point() and not name.startswith(("basis_work", "basis_spent")):
                entries[name] = value.to(narrow)
    optimizer.load_state_dict(state_dict)
    run(optimizer, params, grads[:3])
    assert all(p.isfinite().all() for p in params)
