"""Values of the keywords: bad ones are refused and nothing changes, good ones act at once."""

import inspect

import numpy as np
import oracles
import pytest
import torch
from beside_oracles import Pair
from keyword_table import ABSENT, COMMON, KEYWORDS, keywords_of, live_changes
from training import (
    assert_close,
    assert_same,
    feed,
    furthest,
    parameters,
    problem,
    run,
    snapshot,
    through_a_file,
    trained,
)

import eshampoo
from eshampoo import EShampoo
from eshampoo.classes import CLASSES


def test_the_table_of_keywords_has_those_of_every_class():
    for method, build in ((cls.__name__, cls) for cls in CLASSES):
        offered = {*inspect.signature(build).parameters} - {"params"}
        assert {*keywords_of(method)} <= offered <= {*KEYWORDS}, method


def element(value):
    """The number or word that a message must show."""
    if isinstance(value, tuple):
        return next(repr(v) for v in value if not 0 <= v < 1 or v == 1.0)
    return repr(value)


@pytest.mark.parametrize("name", [name for name, k in KEYWORDS.items() if k.bad or k.wrong])
def test_a_bad_value_is_refused_with_its_name_its_rule_and_what_to_do(name):
    keyword = KEYWORDS[name]
    build = getattr(eshampoo, keyword.methods[0])
    for value, rule in keyword.bad:
        with pytest.raises(ValueError) as error:
            build(parameters([torch.ones(3, 3)]), **{name: value})
        for words in (name, element(value), rule, "Pass"):
            assert words in str(error.value)
    for value in keyword.wrong:  # of another kind
        with pytest.raises((ValueError, TypeError), match=name):
            build(parameters([torch.ones(3, 3)]), **{name: value})


@pytest.mark.parametrize("method", ["EShampoo", "Shampoo"])
def test_a_bad_value_in_a_group_is_refused_at_every_call_and_nothing_changes(method):
    p, q = parameters([torch.ones(3, 3), torch.ones(2)])
    with pytest.raises(ValueError, match="frequency=0"):
        getattr(eshampoo, method)([{"params": [p], "frequency": 0}])
    optimizer = getattr(eshampoo, method)([p])
    feed([p, q], [torch.ones(3, 3), torch.ones(2)])
    optimizer.step()
    good = optimizer.param_groups[0]["frequency"]
    calls = {
        "add": lambda: optimizer.add_param_group({"params": [q], "frequency": 0}),
        "step": optimizer.step,
    }
    for name, call in calls.items():
        if name == "step":
            optimizer.param_groups[0]["frequency"] = 0
        before = snapshot(optimizer)
        with pytest.raises(ValueError, match="frequency=0"):
            call()
        assert_same(before, snapshot(optimizer))
        assert q not in optimizer.state
    optimizer.param_groups[0]["frequency"] = good
    optimizer.step()
    assert optimizer.state[p]["step"].item() == 2


@pytest.mark.parametrize("method", ["EShampoo", "Muon"])
def test_switches_of_torch_are_no_keywords_but_may_be_passed_where_they_mean_nothing(method):
    build = getattr(eshampoo, method)
    p, q = parameters([torch.ones(3, 3), torch.ones(2, 2)])
    off = dict.fromkeys(("capturable", "differentiable", "amsgrad"), False)
    assert not (off.keys() | {"foreach", "fused"}) & inspect.signature(build).parameters.keys()
    optimizer = build([p], foreach=True, fused=None, **off)
    optimizer.add_param_group({"params": [q], "foreach": None, "fused": True, **off})
    feed([p, q], [torch.ones(3, 3), torch.ones(2, 2)])
    optimizer.step()
    reasons = {"capturable": "CUDA graph", "differentiable": "in place", "amsgrad": "second moment"}
    for name, why in reasons.items():
        with pytest.raises(ValueError, match=f"{name}=True .*{why}"):
            build([p], **{name: True})
        with pytest.raises(ValueError, match=f"{name}=True .*{why}"):
            build([{"params": [p], name: True}])


NUMBERS = [
    ("lr", np.float32(0.5), 0.5),
    ("lr", np.float64(0.5), 0.5),
    ("betas", (np.float32(0.5), np.float64(0.75)), (0.5, 0.75)),
    ("betas", [torch.tensor(0.5), 0.75], (0.5, 0.75)),
    ("betas", torch.tensor([0.5, 0.75]), (0.5, 0.75)),
    ("betas", np.array([0.5, 0.75]), (0.5, 0.75)),
    ("lr", np.array(0.5), 0.5),
    ("record", np.bool_(True), True),
    ("eps", torch.tensor(0.5), 0.5),
    ("weight_decay", np.int64(1), 1),
    ("tau", np.float32(0.25), 0.25),
    ("tau", torch.tensor(0.25), 0.25),
    ("frequency", 10.0, 10),
    ("frequency", np.int64(10), 10),
    ("frequency", np.float32(10), 10),
    ("frequency", torch.tensor(10), 10),
    ("max_dim", 64.0, 64),
    ("budget", np.float64(0.5), 0.5),
    ("beta3", np.float32(0.5), 0.5),
]


@pytest.mark.parametrize(("name", "value"), [("lr", "1e-3"), ("frequency", "10"), ("eps", "1E-8")])
def test_a_number_in_quotes_is_refused_as_a_string(name, value):
    with pytest.raises(ValueError, match="is a string, not a number") as error:
        EShampoo(parameters([torch.ones(2, 2)]), **{name: value})
    assert f"{name}={value!r}" in str(error.value)
    with pytest.raises(ValueError, match="solver='jacobi'") as error:
        EShampoo(parameters([torch.ones(2, 2)]), solver="jacobi")
    assert "string" not in str(error.value)


def test_numbers_of_other_libraries_are_numbers():
    for name, value, expected in NUMBERS:
        (p,) = parameters([torch.ones(3, 3)])
        for build in (
            lambda p=p, own={name: value}: EShampoo([p], **own),
            lambda p=p, own={name: value}: EShampoo([{"params": [p], **own}]),
        ):
            optimizer = build()
            found = optimizer.param_groups[0][name]
            assert found == expected, name
            assert type(found) is type(expected), name
            p.grad = torch.ones(3, 3)
            optimizer.step()
            through_a_file(optimizer.state_dict())
        optimizer.param_groups[0][name] = value  # as a scheduler may write it
        optimizer.step()
        assert optimizer.state[p]["step"].item() == 2


def test_a_schedule_may_return_numbers_of_other_libraries():
    tensors, grads = problem([(4, 4)], 4)
    for number in (np.float32, torch.tensor):
        params = parameters(tensors)
        optimizer = EShampoo(params, frequency=2, tau=lambda t, number=number: number(0.25))
        run(optimizer, params, grads)
        assert optimizer.basis_report()[0].checks == 2


@pytest.mark.parametrize("value", [-1.0, torch.nan, torch.inf])
def test_a_rate_in_a_tensor_is_refused_as_a_number_is(value):
    for lr in (value, torch.tensor(value), torch.tensor([value])):
        with pytest.raises(ValueError, match=r"lr=.*at least 0"):
            EShampoo(parameters([torch.ones(2, 2)]), lr=lr)


def test_a_number_in_a_tensor_is_read_at_every_step():
    (p,) = parameters([torch.ones(4, 4)])
    optimizer, decay = EShampoo([p], lr=1.0), torch.tensor(0.5)
    optimizer.param_groups[0]["weight_decay"] = decay
    p.grad = torch.zeros(4, 4)
    optimizer.step()
    decay.zero_()
    optimizer.step()
    assert torch.equal(p, torch.full((4, 4), 0.5))


def test_values_that_contradict_each_other_are_refused_with_the_way_out():
    p, one, other = parameters([torch.ones(3, 3)]), {"moment": "row"}, {"correction": "optimal"}
    EShampoo(p, **one), EShampoo(p, **other)
    with pytest.raises(ValueError, match=r"set |leave ") as error:
        EShampoo(p, **one, **other)
    for name, value in {**one, **other}.items():
        assert f"{name}={value!r}" in str(error.value)


def test_vectors_with_a_basis_go_with_one_sided_matrices():
    one_sided, vectors = ({"sides": "left"}, {"vectors": "full"})
    tensors, grads = problem([(4, 3), (5,)], 6)
    together, apart = parameters(tensors), parameters(tensors)
    run(EShampoo(together, **one_sided, **vectors), together, grads)
    for options, p, at in ((one_sided, apart[0], 0), (vectors, apart[1], 1)):
        run(EShampoo([p], **options), [p], [[step[at]] for step in grads])
    for p, q in zip(together, apart, strict=True):
        assert_same(p.detach(), q.detach())


def test_what_the_state_was_laid_out_by_cannot_change_under_way():
    optimizer, params, grads = trained("EShampoo", [(3, 3), (2,)], 3)
    feed(params, grads[0])
    before, group = snapshot(optimizer), optimizer.param_groups[0]
    fixed = {n: k.fixed for n, k in keywords_of("EShampoo").items() if k.fixed is not ABSENT}
    assert len(fixed) > 5
    for name, value in fixed.items():
        good, group[name] = group[name], value
        with pytest.raises(ValueError, match=f"{name}.*set it back"):
            optimizer.step()
        group[name] = good
    assert_same(before, snapshot(optimizer))
    optimizer.step()


# Values in groups ---------------------------------------------------------------------------------

# One method for each kind of state, and the one without a basis.
LIVE = [
    pytest.param(method, change, id=f"{method}-{name}")
    for method in ("EShampoo", "Shampoo", "Muon")
    for name, change in live_changes(keywords_of(method).values()).items()
]


@pytest.mark.parametrize(("method", "change"), LIVE)
def test_a_value_written_into_the_group_takes_effect_at_the_next_step(method, change):
    options = {"tau": 0.0, "frequency": 6, "max_dim": 5}
    if method == "Muon":
        options = {"nesterov": False}
    elif "rms" in change:
        options["rms"] = 0.4
    tensors, grads = problem([(4, 4), (6,), (7, 3)], 22, condition=3.0)
    changed, kept = Pair(method, tensors, **{**COMMON, **options}), parameters(tensors)
    for t, step in enumerate(grads):
        if t == 9:
            changed.change(**change)
        changed.step(step)
        changed.assert_equal(1e-9, f"after step {t + 1}")
    run(getattr(eshampoo, method)(kept, **{**COMMON, **options}), kept, grads)
    gap = furthest(changed.params, kept)
    assert gap > 1e-6, "the change had no effect, so the test shows nothing"


def test_groups_with_options_of_their_own_are_optimizers_of_their_own():
    tensors, grads = problem([(4, 3), (3, 4), (5,), (4, 3)], 26, condition=3.0)
    params = parameters(tensors)
    options = [
        {"tau": 0.0, "frequency": 3, "lr": 1e-2},
        {"tau": 0.4, "frequency": 4, "solver": "qr", "betas": (0.5, 0.9)},
        {"vectors": "full", "frequency": 6, "beta3": 0.8, "nesterov": True},
        {"correction": "optimal", "frequency": 2, "maximize": True, "weight_decay": 0.3},
    ]
    common = {"merge_dims": False, "eps": 1e-7}
    optimizer = EShampoo(
        [{"params": [p], **o} for p, o in zip(params, options, strict=True)], **common
    )
    separate = [
        oracles.EShampoo([W], **{**common, **o}) for W, o in zip(tensors, options, strict=True)
    ]
    for step in grads:
        feed(params, step)
        optimizer.step()
        for oracle, G in zip(separate, step, strict=True):
            oracle.step([G])
    for W, oracle in zip(params, separate, strict=True):
        assert_close(W.detach(), oracle.params[0], 1e-10)
