"""Values of the keywords: bad ones are refused and nothing changes, good ones act at once."""

import inspect

import numpy as np
import oracles
import pytest
import torch
from cases import (
    ABSENT,
    BALANCED,
    BLOCKED,
    COMMON,
    EVERYONE,
    KEYWORDS,
    METHODS,
    OF_TORCH,
    Pair,
    assert_close,
    assert_same,
    feed,
    furthest,
    keywords_of,
    live_changes,
    parameters,
    problem,
    run,
    snapshot,
    thinned,
    through_a_file,
    trained,
)
from eshampoo.optimizers import CLASSES

import eshampoo
from eshampoo import EShampoo

BAD = [
    (keyword.methods[0], name, value, rule)
    for name, keyword in KEYWORDS.items()
    for value, rule in keyword.bad
]
FIXED = [
    (name, keyword.fixed)
    for name, keyword in keywords_of("EShampoo").items()
    if keyword.fixed is not ABSENT
]
WRONG = [(name, value) for name, keyword in KEYWORDS.items() for value in keyword.wrong]


def test_the_table_of_keywords_has_those_of_every_class():
    for method, build in ((cls.__name__, cls) for cls in CLASSES):
        offered = {*inspect.signature(build).parameters} - {"params"}
        assert {*keywords_of(method)} <= offered <= {*KEYWORDS}, method


def element(value):
    """The number or word that a message must show."""
    if isinstance(value, tuple):
        return next(repr(v) for v in value if not 0 <= v < 1 or v == 1.0)
    return repr(value)


def check(error, name, value, rule):
    assert name in str(error.value)
    assert element(value) in str(error.value)
    assert rule in str(error.value)
    assert "Pass" in str(error.value)


@pytest.mark.parametrize(
    ("method", "name", "value", "rule"), BAD, ids=[f"{n}={v}" for _, n, v, _ in BAD]
)
def test_a_bad_value_is_refused_by_constructor_group_and_step(method, name, value, rule):
    (p, q) = parameters([torch.ones(3, 3), torch.ones(2)])
    with pytest.raises(ValueError) as error:
        getattr(eshampoo, method)([p], **{name: value})
    check(error, name, value, rule)
    with pytest.raises(ValueError) as error:
        getattr(eshampoo, method)([{"params": [p], name: value}])
    check(error, name, value, rule)

    optimizer = getattr(eshampoo, method)([p])
    feed([p, q], [torch.ones(3, 3), torch.ones(2)])
    optimizer.step()
    before = snapshot(optimizer)
    with pytest.raises(ValueError) as error:
        optimizer.add_param_group({"params": [q], name: value})
    check(error, name, value, rule)
    assert_same(before, snapshot(optimizer))
    assert q not in optimizer.state

    good = optimizer.param_groups[0][name]
    optimizer.param_groups[0][name] = value
    before = snapshot(optimizer)
    with pytest.raises(ValueError) as error:
        optimizer.step()
    check(error, name, value, rule)
    assert_same(before, snapshot(optimizer))
    optimizer.param_groups[0][name] = good
    optimizer.step()
    assert optimizer.state[p]["step"].item() == 2


@pytest.mark.parametrize(("name", "value"), WRONG, ids=[f"{n}={v}" for n, v in WRONG])
def test_a_value_of_the_wrong_kind_is_named(name, value):
    with pytest.raises((ValueError, TypeError)) as error:
        EShampoo(parameters([torch.ones(2)]), **{name: value})
    assert name in str(error.value)


@pytest.mark.parametrize("value", [None, False])
@pytest.mark.parametrize("method", EVERYONE)
def test_switches_of_torch_that_are_off_are_taken_by_constructor_and_group(method, value):
    p, q = parameters([torch.ones(3, 3), torch.ones(2, 2)])
    switches = dict.fromkeys(OF_TORCH, value)
    optimizer = getattr(eshampoo, method)([p], **switches)
    optimizer.add_param_group({"params": [q], **switches})
    feed([p, q], [torch.ones(3, 3), torch.ones(2, 2)])
    optimizer.step()
    assert all(group[name] is value for group in optimizer.param_groups for name in OF_TORCH)


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


@pytest.mark.parametrize(("name", "value", "expected"), NUMBERS)
def test_numbers_of_other_libraries_are_numbers(name, value, expected):
    (p,) = parameters([torch.ones(3, 3)])
    for build in (
        lambda: EShampoo([p], **{name: value}),
        lambda: EShampoo([{"params": [p], name: value}]),
    ):
        optimizer = build()
        found = optimizer.param_groups[0][name]
        assert found == expected
        assert type(found) is type(expected)
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


@pytest.mark.parametrize(("name", "value"), [("lr", "1e-3"), ("frequency", "10"), ("eps", "1E-8")])
def test_a_number_in_quotes_is_refused_as_a_string(name, value):
    with pytest.raises(ValueError, match="is a string, not a number") as error:
        EShampoo(parameters([torch.ones(2, 2)]), **{name: value})
    assert f"{name}={value!r}" in str(error.value)
    with pytest.raises(ValueError) as error:
        EShampoo(parameters([torch.ones(2, 2)]), betas=(0.9, "0.99"))
    assert "betas[1]='0.99'" in str(error.value)
    assert "is a string" in str(error.value)


def test_a_word_is_no_number_in_quotes():
    with pytest.raises(ValueError) as error:
        EShampoo(parameters([torch.ones(2, 2)]), solver="jacobi")
    assert "string" not in str(error.value)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"sides": "left"}, {"vectors": "full"}),
        ({"exponent": 1.0}, {"correction": "bounded"}),
        ({"statistics": "observe"}, {"correction": "bounded"}),
        ({"moment": "row"}, {"correction": "optimal"}),
        ({"moment": "block"}, {"correction": "bounded"}),
        ({"rms": 0.4}, {"graft": "adam"}),
    ],
)
def test_values_that_contradict_each_other_are_refused_with_the_way_out(one, other):
    p = parameters([torch.ones(3, 3)])
    EShampoo(p, **one, merge_dims=False), EShampoo(p, **other)
    with pytest.raises(ValueError, match=r"set |leave ") as error:
        EShampoo(p, **one, **other, merge_dims=False)
    for name, value in {**one, **other}.items():
        assert f"{name}={value!r}" in str(error.value)


@pytest.mark.parametrize(("name", "value"), FIXED)
def test_what_the_state_was_laid_out_by_cannot_change_under_way(name, value):
    optimizer, params, grads = trained("EShampoo", [(3, 3), (2,)], 3)
    before, good = snapshot(optimizer), optimizer.param_groups[0][name]
    optimizer.param_groups[0][name] = value
    feed(params, grads[0])
    with pytest.raises(ValueError, match=name) as error:
        optimizer.step()
    assert "set it back" in str(error.value)
    optimizer.param_groups[0][name] = good
    assert_same(before, snapshot(optimizer))
    optimizer.step()


# Values in groups ---------------------------------------------------------------------------------

LIVE = {
    f"{method}-{name}": (method, name, change)
    for method in (*BLOCKED, "Muon")
    for name, change in live_changes(keywords_of(method).values()).items()
    # SOAP's solver is the power step, in which the slots are sorted.
    if method != "SOAP" or name not in ("slots", "power")
}


@pytest.mark.parametrize(
    ("method", "name", "change"), thinned(LIVE, lambda method, name, change: {method, name})
)
def test_a_value_written_into_the_group_takes_effect_at_the_next_step(method, name, change):
    shapes = BALANCED if method == "SOAP" else [(4, 4), (6,), (7, 3)]
    options = {"tau": 0.0, "frequency": 6, "merge_dims": False, "max_dim": 5}
    if method == "SOAP":
        options["max_dim"] = 50
    if method == "CASPR":
        options["graft"] = "adam"
    if method == "Muon":
        options = {"nesterov": False}
    tensors, grads = problem(shapes, 22, condition=3.0)
    changed, kept = Pair(method, tensors, **{**COMMON, **options}), parameters(tensors)
    for t, step in enumerate(grads):
        if t == 9:
            changed.change(**change)
        changed.step(step)
        changed.assert_equal(1e-9, f"after step {t + 1}")
    run(getattr(eshampoo, method)(kept, **{**COMMON, **options}), kept, grads)
    gap = furthest(changed.params, kept)
    assert gap > 1e-6, f"{name} had no effect, so the test shows nothing"


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


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)])
@pytest.mark.parametrize("method", METHODS)
def test_a_tensor_with_one_element_is_a_learning_rate_whatever_its_shape(method, shape):
    tensors, grads = problem([(4, 3), (5,), ()], 6)
    params, twins = parameters(tensors), parameters(tensors)
    rate = torch.full(shape, 0.5, dtype=torch.float64)
    ours, theirs = METHODS[method](params, lr=rate), METHODS[method](twins, lr=0.5)
    assert ours.param_groups[0]["lr"] is rate
    for t, step in enumerate(grads):
        rate.fill_(0.5 / (t + 1))  # is live
        theirs.param_groups[0]["lr"] = 0.5 / (t + 1)
        run(ours, params, [step])
        run(theirs, twins, [step])
        for p, q in zip(params, twins, strict=True):
            assert_close(p.detach(), q.detach())
