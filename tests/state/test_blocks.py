"""A parameter cut into blocks."""

import pytest
import torch
from training import assert_close, parameters, problem, run

from eshampoo import EShampoo


def test_the_blocks_of_a_parameter_are_parameters_of_their_own():
    tensors, grads = problem([(7, 5)], 12)
    cuts = [(slice(a, a + 3), slice(b, b + 3)) for a in (0, 3, 6) for b in (0, 3)]
    options = {"frequency": 4, "tau": 0.0, "max_dim": 3, "merge_dims": False, "vectors": "full"}
    whole, pieces = parameters(tensors), parameters([tensors[0][cut] for cut in cuts])
    run(EShampoo(whole, **options), whole, grads)
    run(EShampoo(pieces, **options), pieces, [[G[cut] for cut in cuts] for (G,) in grads])
    for cut, piece in zip(cuts, pieces, strict=True):
        assert_close(whole[0].detach()[cut], piece.detach(), 1e-12)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((40, 24), {"max_dim": 16}),
        ((5, 4, 3, 3), {"max_dim": 4}),
        ((5, 4, 3, 3), {"max_dim": 12, "merge_dims": True}),
        ((1, 33), {"max_dim": 16}),
        ((9, 1, 9), {"max_dim": 4, "oversize": "identity"}),
    ],
)
def test_blocks_round_trip_exactly(shape, options):
    """Before the first basis the update is elementwise, so any misplaced entry would show."""
    tensors, grads = problem([shape], 3)
    blocked, plain = parameters(tensors), parameters(tensors)
    run(EShampoo(blocked, frequency=50, **options), blocked, grads)
    run(EShampoo(plain, matrices="adam", vectors="adam"), plain, grads)
    assert torch.equal(blocked[0].detach(), plain[0].detach())
