"""The classes: their defaults, what they refuse, and that they train."""

import pytest
import torch
from cases import METHODS, parameters
from torch import nn

from eshampoo import EShampoo, FullMatrixAdam


def test_the_defaults_are_those_of_the_design():
    p = [torch.nn.Parameter(torch.ones(2))]
    adamw = torch.optim.AdamW(p).defaults
    for name in ("EShampoo", "Shampoo", "KLShampoo", "FullMatrixAdam"):
        defaults = METHODS[name](p).defaults
        for key in ("lr", "betas", "eps", "weight_decay", "maximize"):
            assert defaults[key] == adamw[key], (name, key)
    expected = {
        "EShampoo": {
            "tau": 0.1,
            "frequency": 50,
            "solver": "eigh",
            "slots": "rank",
            "refresh_to": 0.5,
            "qr_iterations": 10,
            "beta3": None,
            "correction": "naive",
            "vectors": "adam",
            "matrices": "kronecker",
            "max_dim": 1024,
            "oversize": "split",
            "merge_dims": True,
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
        "FullMatrixAdam": {"max_dim": 1024},
    }
    for name, values in expected.items():
        assert {key: METHODS[name](p).defaults[key] for key in values} == values, name


def test_a_keyword_that_does_not_exist_is_refused():
    with pytest.raises(TypeError, match="frequncy"):
        EShampoo(parameters([torch.ones(2)]), frequncy=3)
    with pytest.raises(TypeError, match="graft"):
        EShampoo(parameters([torch.ones(2)]), graft="adam")


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


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_on_an_ill_conditioned_problem_it_ends_below_adamw(method):
    options = {"frequency": 5, "merge_dims": False}
    if method == "FullMatrixAdam":
        options = {"frequency": 5}
    rates = (0.01, 0.03, 0.1)
    adamw = min(ill_conditioned(torch.optim.AdamW, lr) for lr in rates)
    assert min(ill_conditioned(METHODS[method], lr, **options) for lr in rates) < adamw
