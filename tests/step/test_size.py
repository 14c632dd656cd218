"""The size of an update: by the share of recent gradients that agree, or fixed."""

import math

import pytest
import torch
from keyword_table import METHODS
from training import feed, parameters, run

from eshampoo import EShampoo
from eshampoo.step.phases import AGREED_RMS

# A basis at every step, and an update that is not grafted.
SIZED = {"rms": "auto", "frequency": 1, "weight_decay": 0.0}
OWN = {"Shampoo": {"graft": None}}


def sizes(optimizer, params, grads):
    """The root mean square of every update of the first parameter, as a multiple of the rate."""
    found = []
    for step in grads:
        before = params[0].detach().clone()
        run(optimizer, params, [step])
        moved = params[0].detach() - before
        found.append(moved.norm().item() / math.sqrt(moved.numel()) / 0.1)
    return found


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
@pytest.mark.parametrize("method", METHODS)
def test_updates_are_as_large_as_recent_gradients_agree_and_fade_with_them(method, scale):
    """ρ is 1 for equal gradients and √((1−β1)/(1+β1)) for noise, at any scale of gradients.

    Without gradients ‖M‖ falls by β1 a step, and √e by √β1."""
    generator = torch.Generator().manual_seed(0)
    (W,) = params = parameters([torch.zeros(6, 5)])
    optimizer = METHODS[method](params, lr=0.1, betas=(0.9, 0.95), **SIZED, **OWN.get(method, {}))
    G = scale * torch.randn(6, 5, generator=generator)
    noise = [[scale * torch.randn(6, 5, generator=generator)] for _ in range(100)]
    equal = sizes(optimizer, params, [[G]] * 20)[method == "SOAP" :]  # its first one observes
    assert equal == pytest.approx([AGREED_RMS] * len(equal), rel=1e-3)
    random = sizes(optimizer, params, noise)[30:]
    assert sum(random) / len(random) == pytest.approx(AGREED_RMS * math.sqrt(0.1 / 1.9), rel=0.15)
    faded = sizes(optimizer, params, [[torch.zeros(6, 5)]] * 100)
    assert faded[-1] < 2 * faded[0] * 0.9**50
    assert W.isfinite().all()


def test_with_a_number_every_block_with_a_basis_moves_by_that_root_mean_square():
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


@pytest.mark.parametrize("rms", ["auto", 0.4])
def test_an_update_of_zero_stays_zero(rms):
    (p,) = parameters([torch.ones(3, 3)])
    optimizer = EShampoo([p], rms=rms, frequency=1, weight_decay=0.0)
    feed([p], [torch.zeros(3, 3)])
    optimizer.step()
    assert torch.equal(p.detach(), torch.ones(3, 3))
