"""Every Shampoo with the length of every graft."""

import pytest
import torch
from beside_oracles import compare
from keyword_table import KEYWORDS, choices
from training import parameters, run, trained

from eshampoo import Shampoo


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


def test_rms_and_graft_together_are_refused():
    (p,) = parameters([torch.ones(3, 3)])
    for rms in (0.4, "auto"):
        with pytest.raises(ValueError, match="both set the size") as error:
            Shampoo([p], rms=rms)
        assert "leave one of them at None" in str(error.value)
