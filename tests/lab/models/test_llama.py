"""Llama: attention is causal, and positions are relative."""

import torch

from eshampoo.lab.models.llama import Llama, rotary_angles, rotate


def test_llama_does_not_see_the_future():
    model = Llama(50, width=16, depth=2, heads=4, key_heads=2, hidden=32, length=12)
    text = torch.randint(50, (1, 12))
    changed = text.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 50
    difference = (model(text) - model(changed)).abs().amax(-1)[0]
    assert (difference[:7] == 0).all()
    assert (difference[7:] > 0).all()


def test_rotary_positions_make_products_depend_on_distance_alone():
    angles = rotary_angles(20, 8)
    q, k = torch.randn(8), torch.randn(8)
    at = [rotate(x.expand(20, 8), angles) for x in (q, k)]
    products = at[0] @ at[1].T
    torch.testing.assert_close(products[3, 1], products[12, 10])
    assert not torch.allclose(products[3, 1], products[3, 2])
