"""The classes: their defaults, what they refuse, and that they train."""

import inspect
import pydoc
import re
from functools import cache

import pytest
import torch
from keyword_table import METHODS
from torch import nn
from training import assert_same, feed, parameters, snapshot

from eshampoo import EShampoo, FullMatrixAdam, Muon
from eshampoo.classes import CLASSES


def test_the_defaults_are_those_of_the_design():
    p = [torch.nn.Parameter(torch.ones(2))]
    adamw = torch.optim.AdamW(p).defaults
    for name in ("EShampoo", "Shampoo", "CASPR", "KLShampoo", "FullMatrixAdam"):
        defaults = METHODS[name](p).defaults
        for key in ("lr", "eps", "weight_decay", "maximize"):
            assert defaults[key] == adamw[key], (name, key)
        assert defaults["betas"] == (0.9, 0.95 if name == "EShampoo" else 0.999)
    expected = {
        "EShampoo": {
            "tau": 0.03,
            "frequency": "auto",
            "novelty": 0.1,
            "budget": 0.25,
            "rms": "auto",
            "factors": "gram",
            "batch_dims": 0,
            "pieces": 1,
            "solver": "eigh",
            "qr_iterations": 10,
            "beta3": None,
            "correction": "naive",
            "vectors": "adam",
            "matrices": "kronecker",
            "max_dim": 1024,
            "oversize": "split",
            "merge_dims": False,
            "nesterov": False,
            "process_group": None,
            "nonfinite": "skip",
            "record": False,
        },
        "Shampoo": {
            "tau": 0.0,
            "frequency": 100,
            "variant": "shampoo",
            "trace_scaling": False,
            "graft": "adam",
            "graft_scope": "parameter",
            "eigenvalues": "stale",
            "rms": None,
        },
        "KLShampoo": {"tau": 0.0, "frequency": 10},
        "SOAP": {
            "lr": 3e-3,
            "betas": (0.95, 0.95),
            "tau": 0.0,
            "frequency": 10,
            "solver": "power",
            "merge_dims": False,
            "max_dim": 10000,
            "oversize": "identity",
        },
        "CASPR": {"rms": None},
        "FullMatrixAdam": {"max_dim": 1024, "rms": "auto"},
    }
    for name, values in expected.items():
        assert {key: METHODS[name](p).defaults[key] for key in values} == values, name


def test_as_published_is_the_paper_in_one_word():
    p = [nn.Parameter(torch.ones(3, 3))]
    paper = {"betas": (0.9, 0.999), "tau": 0.1, "frequency": 50, "merge_dims": True}
    published = EShampoo.as_published(p, 3e-3)
    assert type(published) is EShampoo
    assert published.defaults == EShampoo(p, 3e-3, **paper, rms=None, budget=None).defaults
    assert EShampoo.as_published(p, frequency=7).defaults["frequency"] == 7
    with pytest.raises(TypeError, match="EShampoo has no keyword 'frequncy'"):
        EShampoo.as_published(p, frequncy=3)


def test_a_keyword_that_does_not_exist_is_refused_with_the_one_that_was_meant():
    with pytest.raises(TypeError, match=r"'frequncy': did you mean 'frequency'\?"):
        EShampoo(parameters([torch.ones(2)]), frequncy=3)
    with pytest.raises(TypeError, match="'variant' belongs to other optimizers"):
        EShampoo(parameters([torch.ones(2)]), variant="shampoo2")
    with pytest.raises(TypeError, match="'lamb': it takes lr, betas"):
        EShampoo(parameters([torch.ones(2)]), lamb=True)


ELSEWHERE = {
    "learning_rate": "lr",
    "wd": "weight_decay",
    "epsilon": "eps",
    "momentum": "betas[0]",
    "precondition_frequency": "frequency",
    "max_preconditioner_dim": "max_dim",
}


@pytest.mark.parametrize(("theirs", "ours"), ELSEWHERE.items())
def test_a_name_of_other_optimizers_is_refused_with_ours(theirs, ours):
    (p,) = parameters([torch.ones(2, 2)])
    with pytest.raises(TypeError, match=rf"{theirs!r}: did you mean {re.escape(repr(ours))}\?"):
        EShampoo([p], **{theirs: 1})
    with pytest.raises(ValueError, match=rf"{theirs!r}, .*did you mean {re.escape(repr(ours))}\?"):
        EShampoo([{"params": [p], theirs: 1}])


def test_a_name_of_other_optimizers_may_be_a_keyword_or_mean_nothing():
    (p,) = parameters([torch.ones(2, 2)])
    assert Muon([p], momentum=0.5).defaults["momentum"] == 0.5
    with pytest.raises(TypeError, match="'frequency' belongs to other optimizers"):
        Muon([p], precondition_frequency=10)


def test_a_sixth_argument_by_position_is_refused_with_those_that_have_one():
    first = "params, lr, betas, eps, weight_decay"
    with pytest.raises(TypeError, match=f"EShampoo takes only {first} by position"):
        EShampoo(parameters([torch.ones(2)]), 1e-3, (0.9, 0.99), 1e-8, 0.1, False)


@pytest.mark.parametrize("key", ["frequncy", "freq", "max_dims", "variant", "learning_rate"])
def test_a_misspelt_key_of_a_group_is_refused_and_nothing_changes(key):
    p, q = parameters([torch.ones(3, 3), torch.ones(2)])
    with pytest.raises(ValueError, match=key):
        EShampoo([{"params": [p], key: 3}])
    optimizer = EShampoo([p])
    with pytest.raises(ValueError, match=key):
        optimizer.add_param_group({"params": [q], key: 3})
    feed([p], [torch.ones(3, 3)])
    optimizer.param_groups[0][key] = 3
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=key):
        optimizer.step()
    assert_same(before, snapshot(optimizer))


def test_keys_of_torch_and_of_frameworks_may_be_in_a_group():
    (p,) = parameters([torch.ones(3, 3)])
    keys = {"initial_lr": 1e-3, "kind": "head", "max_lr": 0.1}
    optimizer = EShampoo([{"params": [p], **keys, "my_note": "first layer", "lr_scale": 0.5}])
    feed([p], [torch.ones(3, 3)])
    optimizer.step()
    assert optimizer.param_groups[0]["my_note"] == "first layer"


def test_a_checker_and_help_see_each_class_with_its_own_keywords_and_defaults():
    for cls in CLASSES:
        parameters_ = inspect.signature(cls).parameters
        assert list(parameters_)[:5] == ["params", "lr", "betas", "eps", "weight_decay"]
        defaults = cls([nn.Parameter(torch.ones(2))]).defaults
        own = {name: p.default for name, p in parameters_.items() if name != "params"}
        assert own == {name: defaults[name] for name in own}
        assert defaults.keys() - own.keys() == {"method"}
        kinds = {p.kind for name, p in list(parameters_.items())[5:]}
        assert kinds == {inspect.Parameter.KEYWORD_ONLY}


def test_help_prints_the_keywords_once():
    text = pydoc.render_doc(EShampoo, renderer=pydoc.plaintext)
    assert text.count("qr_iterations: int = 10") == 1
    assert re.search(r"as_published\(params.* frequency: [^=]* = 50, .*\*\*keywords\)", text)


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


@pytest.mark.parametrize(
    ("method", "keyword"),
    [
        ("Shampoo", "correction"),
        ("Shampoo", "factors"),
        ("KLShampoo", "beta3"),
        ("EShampoo", "graft"),
        ("SOAP", "graft_scope"),
        ("CASPR", "graft"),
    ],
)
def test_a_class_does_not_offer_what_means_nothing_to_it(method, keyword):
    assert keyword not in inspect.signature(METHODS[method]).parameters
    with pytest.raises(TypeError, match="other optimizers") as error:
        METHODS[method](parameters([torch.ones(2)]), **{keyword: None})
    assert method in str(error.value)
    assert keyword in str(error.value)


def test_the_documentation_of_a_class_has_its_own_keywords_and_no_others():
    for cls in CLASSES:
        names = list(inspect.signature(cls).parameters)
        documented = re.findall(r"^        (\w+): ", cls.__doc__, re.M)
        assert documented == names, cls.__name__


def test_eshampoo_has_at_most_34_keywords_and_help_has_at_most_70_lines_of_arguments():
    assert len(inspect.signature(EShampoo).parameters) - 1 <= 34  # without `params`
    arguments = EShampoo.__doc__.partition("Args:\n")[2].rstrip()
    assert len(arguments.splitlines()) <= 70


def ill_conditioned(optimizer_class, lr, **options):
    """Final loss of min ‖A(W − W*)B‖² with rotated, widely spread curvature."""
    generator = torch.Generator().manual_seed(3)

    def curvature(d):
        Q = torch.linalg.qr(torch.randn(d, d, generator=generator)).Q
        return Q @ torch.diag(torch.logspace(0, -2, d)) @ Q.T

    A, B = curvature(12), curvature(8)
    target = torch.randn(12, 8, generator=generator)
    W = nn.Parameter(torch.zeros(12, 8))
    optimizer = optimizer_class([W], lr=lr, weight_decay=0.0, **options)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)
    for _ in range(300):
        optimizer.zero_grad()
        loss = (A @ (W - target) @ B).square().sum()
        loss.backward()
        optimizer.step()
        schedule.step()
    return loss.item()


@cache
def best_of_adamw(rates):
    return min(ill_conditioned(torch.optim.AdamW, lr) for lr in rates)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_on_an_ill_conditioned_problem_it_ends_below_adamw(method):
    options = {"frequency": 5, "merge_dims": False}
    if method == "FullMatrixAdam":
        options = {"frequency": 5}
    rates = (0.01, 0.03, 0.1)
    found = min(ill_conditioned(METHODS[method], lr, **options) for lr in rates)
    assert found < best_of_adamw(rates)
