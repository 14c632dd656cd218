"""Bad arguments and inputs: the message says what, which rule and what to do; nothing changes."""

import pytest
import torch
from cases import METHODS, assert_same, feed, parameters, run, snapshot, trained
from torch import nn

from eshampoo import EShampoo, FullMatrixAdam, schedules

NAN = float("nan")
BAD = [
    ("lr", -1e-3, "at least 0"),
    ("lr", NAN, "at least 0"),
    ("lr", torch.ones(2), "one element"),
    ("betas", (-0.1, 0.9), "[0, 1)"),
    ("betas", (1.0, 0.9), "[0, 1)"),
    ("betas", (0.9, 1.1), "[0, 1]"),
    ("betas", (0.9, -0.1), "[0, 1]"),
    ("betas", (0.9, NAN), "[0, 1]"),
    ("beta3", 1.5, "[0, 1]"),
    ("beta3", -0.5, "[0, 1]"),
    ("eps", -1e-8, "at least 0"),
    ("weight_decay", -0.1, "at least 0"),
    ("tau", -0.1, "at least 0"),
    ("tau", NAN, "at least 0"),
    ("frequency", 0, "at least 1"),
    ("frequency", -3, "at least 1"),
    ("frequency", 2.5, "whole number"),
    ("frequency", True, "whole number"),
    ("qr_iterations", 0, "at least 1"),
    ("max_dim", 0, "at least 1"),
    ("max_failures", 0, "at least 1"),
    ("refresh_to", 1.5, "[0, 1]"),
    ("refresh_to", -0.5, "[0, 1]"),
    ("solver", "jacobi", "'eigh', 'qr', 'power', 'partial'"),
    ("slots", "first", "'rank', 'match'"),
    ("correction", "none", "'naive', 'bounded', 'basis_aware', 'optimal'"),
    ("vectors", "shampoo", "'adam', 'full'"),
    ("matrices", "full", "'kronecker', 'adam'"),
    ("oversize", "merge", "'split', 'identity'"),
    ("nonfinite", "ignore", "'skip', 'raise', 'propagate'"),
]
BAD_SHAMPOO = [
    ("variant", "shampoo3", "'shampoo', 'shampoo2'"),
    ("graft", "lamb", "None, 'adam', 'rmsprop', 'adagrad', 'sgd'"),
    ("graft_scope", "layer", "'block', 'parameter'"),
    ("eigenvalues", "old", "'stale', 'fresh'"),
]
# Other kinds of thing than the option takes: also an error that names option and value.
BAD_KINDS = [
    ("lr", "fast"),
    ("lr", None),
    ("betas", (0.9,)),
    ("betas", 0.9),
    ("betas", (0.9, 0.99, 0.999)),
    ("betas", ("a", "b")),
    ("eps", None),
    ("weight_decay", "no"),
    ("tau", None),
    ("tau", "0.1"),
    ("beta3", "0.9"),
    ("refresh_to", None),
]
ALL = [("EShampoo", *row) for row in BAD] + [("Shampoo", *row) for row in BAD_SHAMPOO]
IDS = [f"{name}={value}" for _, name, value, _ in ALL]


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


@pytest.mark.parametrize(("method", "name", "value", "rule"), ALL, ids=IDS)
def test_a_bad_value_is_refused_by_constructor_group_and_step(method, name, value, rule):
    (p, q) = parameters([torch.ones(3, 3), torch.ones(2)])
    with pytest.raises(ValueError) as error:
        METHODS[method]([p], **{name: value})
    check(error, name, value, rule)
    with pytest.raises(ValueError) as error:
        METHODS[method]([{"params": [p], name: value}])
    check(error, name, value, rule)

    optimizer = METHODS[method]([p], frequency=2)
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


@pytest.mark.parametrize(("name", "value"), BAD_KINDS, ids=[f"{n}={v}" for n, v in BAD_KINDS])
def test_a_value_of_the_wrong_kind_is_named(name, value):
    with pytest.raises((ValueError, TypeError)) as error:
        EShampoo(parameters([torch.ones(2)]), **{name: value})
    assert name in str(error.value)


def test_a_keyword_that_does_not_exist_is_refused():
    with pytest.raises(TypeError, match="frequncy"):
        EShampoo(parameters([torch.ones(2)]), frequncy=3)
    with pytest.raises(TypeError, match="graft"):
        EShampoo(parameters([torch.ones(2)]), graft="adam")


def test_a_schedule_that_returns_a_negative_tau_is_refused():
    (p,) = parameters([torch.ones(3, 3)])
    optimizer = EShampoo([p], tau=schedules.constant(-0.5), frequency=1)
    feed([p], [torch.ones(3, 3)])
    with pytest.raises(ValueError, match=r"-0\.5"):
        optimizer.step()


LAYOUT = [
    ("max_dim", 2, "max_dim"),
    ("oversize", "identity", "oversize"),
    ("merge_dims", False, "merge_dims"),
    ("vectors", "full", "vectors"),
    ("matrices", "adam", "matrices"),
    ("correction", "optimal", "correction"),
]


@pytest.mark.parametrize(("name", "value", "word"), LAYOUT)
def test_what_the_state_was_laid_out_by_cannot_change_under_way(name, value, word):
    optimizer, params, grads = trained("EShampoo", [(3, 3), (2,)], 3)
    before, good = snapshot(optimizer), optimizer.param_groups[0][name]
    optimizer.param_groups[0][name] = value
    feed(params, grads[0])
    with pytest.raises(ValueError, match=word) as error:
        optimizer.step()
    assert "set it back" in str(error.value)
    optimizer.param_groups[0][name] = good
    assert_same(before, snapshot(optimizer))
    optimizer.step()


def test_a_graft_with_another_state_cannot_come_under_way():
    optimizer, params, grads = trained("Shampoo", [(3, 3)], 3)
    optimizer.param_groups[0]["graft"] = None
    with pytest.raises(ValueError, match="graft"):
        run(optimizer, params, grads)


def test_a_sparse_gradient_is_refused_by_name_before_anything_changes():
    embedding, linear = nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2)
    named = [("emb", embedding.weight), ("weight", linear.weight)]
    optimizer = EShampoo(named, frequency=1)
    linear(embedding(torch.tensor([1, 2]))).sum().backward()
    assert embedding.weight.grad.is_sparse
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match="sparse") as error:
        optimizer.step()
    assert "'emb'" in str(error.value)
    assert "sparse=False" in str(error.value)
    assert_same(before, snapshot(optimizer))
    embedding.weight.grad = None
    optimizer.step()
    assert optimizer.state[linear.weight]["step"].item() == 1


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64])
def test_parameters_must_be_real_floating_point_tensors(dtype):
    p = torch.ones(3, dtype=dtype)
    with pytest.raises(TypeError, match="floating-point") as error:
        EShampoo([p])
    assert str(dtype) in str(error.value)
    optimizer, *_ = trained("EShampoo", [(3, 3)], 2)
    before = snapshot(optimizer)
    with pytest.raises(TypeError, match="floating-point"):
        optimizer.add_param_group({"params": [p]})
    assert_same(before, snapshot(optimizer))


@pytest.mark.parametrize("wrap", [lambda p: [p], lambda p: p, lambda p: [("w", p)]])
def test_parameters_must_be_leaves(wrap):
    p = 2 * torch.ones(3, 4, requires_grad=True)
    with pytest.raises(ValueError, match="leaf") as error:
        EShampoo([{"params": wrap(p)}])
    assert "(3, 4)" in str(error.value)
    assert "detach" in str(error.value)


@pytest.mark.parametrize("params", [[], torch.ones(2), [1.0], [{"params": {torch.ones(2)}}]])
def test_what_torch_refuses_is_refused(params):
    with pytest.raises((ValueError, TypeError)):
        EShampoo(params)


def test_a_parameter_in_two_groups_is_refused():
    (p,) = parameters([torch.ones(2)])
    optimizer = EShampoo([p])
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [p]})
    assert len(optimizer.param_groups) == 1


def test_a_refused_group_leaves_an_optimizer_that_works_and_can_be_saved():
    optimizer, params, grads = trained("EShampoo", [(3, 3)], 2)
    (q,) = parameters([torch.ones(2, 2)])
    with pytest.raises(ValueError):
        optimizer.add_param_group({"params": [q], "frequency": 0})
    optimizer.add_param_group({"params": [q], "frequency": 1})
    run(optimizer, [*params, q], [[*step, torch.eye(2)] for step in grads])
    assert optimizer.state[q]["step"].item() == 2
    assert len(optimizer.state_dict()["param_groups"]) == 2


def test_full_matrix_adam_refuses_what_is_too_large():
    (p,) = parameters([torch.ones(5, 7)])
    with pytest.raises(ValueError, match="max_dim=34") as error:
        FullMatrixAdam([p], max_dim=34)
    assert "35 elements" in str(error.value)
    assert "EShampoo" in str(error.value)
    FullMatrixAdam([p], max_dim=35)


def test_the_optimal_correction_refuses_large_blocks():
    (p,) = parameters([torch.ones(65, 64)])
    with pytest.raises(ValueError, match="4096") as error:
        EShampoo([("big", p)], correction="optimal", merge_dims=False)
    assert "'big'" in str(error.value)
    assert "Lower max_dim" in str(error.value)


@pytest.mark.parametrize("method", ["Shampoo", "KLShampoo"])
def test_a_correction_of_what_a_method_does_not_keep_is_refused(method):
    with pytest.raises(ValueError, match="second moment") as error:
        METHODS[method](parameters([torch.ones(2)]), correction="basis_aware")
    assert method in str(error.value)


def test_schedules_refuse_what_makes_no_sense():
    with pytest.raises(ValueError, match="2 boundaries and 2 values"):
        schedules.piecewise((1, 2), (0.1, 0.2))
    with pytest.raises(ValueError, match="decrease"):
        schedules.piecewise((2, 1), (0.1, 0.2, 0.3))
    with pytest.raises(ValueError, match="steps=0"):
        schedules.linear(0.1, 0.2, 0)
