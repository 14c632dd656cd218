"""The size of an update: every Shampoo with the length of every graft, and a fixed one."""

import math

import pytest
import torch
from beside_oracles import compare
from keyword_table import KEYWORDS, METHODS, choices
from training import feed, parameters, run, trained

from eshampoo import EShampoo, Shampoo


@pytest.mark.parametrize("scope", ["parameter", pytest.param("block", marks=pytest.mark.slow)])
@pytest.mark.parametrize("graft", choices("graft"))
@pytest.mark.parametrize("trace_scaling", choices("trace_scaling"))
@pytest.mark.parametrize("variant", choices("variant"))
def test_every_shampoo_follows_the_oracle(variant, trace_scaling, graft, scope):
    for eigenvalues, tau in [("stale", 0.0), ("stale", 0.4), ("fresh", 0.4)]:
        compare(
            "Shampoo",
            [(5, 4), (2, 3, 2), (7, 3)],
            9,
            tolerance=1e-9,
            variant=variant,
            trace_scaling=trace_scaling,
            graft=graft,
            graft_scope=scope,
            eigenvalues=eigenvalues,
            tau=tau,
            frequency=4,
            merge_dims=False,
            max_dim=6,
            eps=1e-6,
        )


def test_a_graft_with_another_state_cannot_come_under_way():
    optimizer, params, grads = trained("Shampoo", [(3, 3)], 3)
    optimizer.param_groups[0]["graft"] = KEYWORDS["graft"].fixed
    with pytest.raises(ValueError, match="graft"):
        run(optimizer, params, grads)


# A fixed size -------------------------------------------------------------------------------------


def test_with_rms_every_block_with_a_basis_moves_by_that_root_mean_square():
    params = parameters([torch.randn(5, 4), torch.randn(3, 2, 3), torch.randn(6)])
    lr, rms = 0.1, 0.3
    optimizer = EShampoo(params, lr=lr, rms=rms, frequency=2, weight_decay=0.0, merge_dims=False)
    for t in range(1, 7):
        before = [W.detach().clone() for W in params]
        feed(params, [10.0**t * torch.randn(W.shape) for W in params])
        optimizer.step()
        moved = [
            (W.detach() - V).square().mean().sqrt().item() / lr
            for W, V in zip(params, before, strict=True)
        ]
        based = [t >= 2, t >= 2, False]  # before the first check it is AdamW; a vector always
        for size, fixed in zip(moved, based, strict=True):
            assert (abs(size - rms) < 1e-5) == fixed, (t, size)


def test_an_update_of_zero_stays_zero_whatever_rms_says():
    (p,) = parameters([torch.ones(3, 3)])
    optimizer = EShampoo([p], rms=0.4, frequency=1, weight_decay=0.0)
    feed([p], [torch.zeros(3, 3)])
    optimizer.step()
    assert torch.equal(p.detach(), torch.ones(3, 3))


def test_rms_and_graft_together_are_refused():
    (p,) = parameters([torch.ones(3, 3)])
    for build in (lambda: EShampoo([p], rms=0.4, graft="adam"), lambda: Shampoo([p], rms=0.4)):
        with pytest.raises(ValueError, match="both set the size") as error:
            build()
        assert "leave one of them at None" in str(error.value)


def test_a_graft_in_a_param_group_takes_the_place_of_the_default_size():
    p, q = parameters([torch.ones(3, 4), torch.ones(4, 3)])
    optimizer = EShampoo([{"params": [p], "graft": "adam"}, {"params": [q]}])
    optimizer.add_param_group({"params": parameters([torch.ones(2, 2)]), "graft": "sgd"})
    assert [group["rms"] for group in optimizer.param_groups] == [None, 0.4, None]
    with pytest.raises(ValueError, match="both set the size"):
        EShampoo([{"params": [p], "graft": "adam", "rms": 0.4}])


@pytest.mark.parametrize("graft", ["adam", "rmsprop", "adagrad"])
@pytest.mark.parametrize("method", ["EShampoo", "SOAP", "CASPR"])
def test_rounding_in_rows_without_signal_does_not_lengthen_an_update(method, graft):
    """M, rotated back, has an error in every row, which Adam would divide by its own size: 681 lr.

    AdamW's largest update here has a root mean square of 0.85 lr; AdaGrad's and RMSprop's first
    ones have entries of 1 and 1/√(1−β2), so at most 32 lr."""
    generator = torch.Generator().manual_seed(0)
    (W,) = parameters([torch.zeros(12, 8)])
    options = {"betas": (0.9, 0.999), "weight_decay": 0.0, "graft": graft, "frequency": 3}
    optimizer = METHODS[method]([W], lr=1.0, **options)
    for _ in range(30):
        before = W.detach().clone()
        W.grad = 100 * torch.randn(12, 8, generator=generator)
        W.grad[:4] *= 1e-10
        optimizer.step()
        size = float((W.detach() - before).norm()) / math.sqrt(W.numel())
        assert size <= {"adam": 1.5, "rmsprop": 32.0, "adagrad": 1.0}[graft]
