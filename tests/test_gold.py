"""The recorded trajectories of the authors' implementations, to their own rounding.

The library and its oracles follow them, each on its own.
"""

from pathlib import Path

import numpy as np
import oracles
import pytest
import torch
from beside_oracles import Pair
from keyword_table import METHODS, PAPER
from training import feed, parameters

GOLD = Path(__file__).parent / "fixtures" / "gold"
TOLERANCE = 2e-5  # float32 recordings

BLOCKS = {"lr": 1e-2, "betas": (0.9, 0.95), "tau": 0.0, "max_dim": 16, "merge_dims": True}
RECORDED = {
    "eshampoo_f4": ("EShampoo", {**BLOCKS, **PAPER, "frequency": 4}),
    "eshampoo_blocks_conv": ("EShampoo", {**BLOCKS, **PAPER, "frequency": 5}),
    "shampoo_adamgraft_f5": ("Shampoo", {**BLOCKS, "frequency": 5}),
    "soap_f10": ("SOAP", {}),
}


class Recording:
    """Initial parameters, given gradients, and where the parameters went."""

    def __init__(self, name):
        data = np.load(GOLD / f"{name}.npz")
        self.names = [key.removeprefix("init.") for key in data.files if key.startswith("init.")]
        self.init = [torch.tensor(data[f"init.{n}"]) for n in self.names]
        self.steps = data["steps"].tolist()
        gradients = [torch.tensor(data[f"grad.{n}"]) for n in self.names]
        self.grads = list(zip(*gradients, strict=True))
        recorded = [torch.tensor(data[f"param.{n}"]) for n in self.names]
        self.params = {t: [W[k] for W in recorded] for k, t in enumerate(self.steps)}
        assert 0 < min(self.steps) <= max(self.steps) <= len(self.grads)

    def assert_reached(self, t, params):
        """Parameters are after step t where they were recorded, if they were."""
        if t not in self.params:
            return
        for name, W, expected in zip(self.names, params, self.params[t], strict=True):
            torch.testing.assert_close(
                W.detach().float(),
                expected,
                rtol=0,
                atol=TOLERANCE,
                msg=lambda m, name=name: f"{name} after step {t}: {m}",
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", RECORDED)
def test_the_library_follows_the_recorded_trajectories(name, dtype):
    recording = Recording(name)
    method, options = RECORDED[name]
    params = parameters(recording.init, dtype)
    optimizer = METHODS[method](params, **options)
    for t, grads in enumerate(recording.grads, start=1):
        feed(params, grads)
        optimizer.step()
        recording.assert_reached(t, params)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORDED)
def test_in_float64_the_library_is_the_oracle_on_the_recorded_gradients(name):
    recording = Recording(name)
    method, options = RECORDED[name]
    pair = Pair(method, recording.init, **options)
    for t, grads in enumerate(recording.grads, start=1):
        pair.step([G.double() for G in grads])
        pair.assert_equal(1e-9, f"after step {t}")


@pytest.mark.parametrize("name", RECORDED)
def test_the_oracles_follow_the_recorded_trajectories(name):
    recording = Recording(name)
    method, options = RECORDED[name]
    oracle = getattr(oracles, method)(recording.init, **options)
    for t, grads in enumerate(recording.grads, start=1):
        oracle.step(grads)
        recording.assert_reached(t, oracle.params)
