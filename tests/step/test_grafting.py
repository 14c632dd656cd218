"""The size of an update: every Shampoo with the length of every graft, and a fixed one."""

import pytest
import torch
from cases import KEYWORDS, choices, compare, feed, parameters, run, trained

from eshampoo import EShampoo, Shampoo


@pytest.mark.parametrize("scope", choices("graft_scope"))
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
