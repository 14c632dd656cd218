"""Torch's own tests of optimizers, with the classes of this library in the place of torch's.

    python tests/torch_suite.py CHECKOUT/test [options of pytest]

runs `TestOptimRenewed` of `test_optim.py`, which wheels do not have, from a checkout of PyTorch
near the version that is installed (only its folder `test` is needed), on the CPU. It takes
expecttest beside pytest. What is known to fail, and why, is in `EXPECTED`; it is reported as such,
and as a failure if it passes one day.
"""

import os
import sys
import unittest
from pathlib import Path

import pytest
import torch
from torch.testing._internal import common_optimizers
from torch.testing._internal.common_methods_invocations import DecorateInfo
from torch.testing._internal.common_optimizers import OptimizerInfo, OptimizerInput

from eshampoo.classes import CLASSES

# What is true of all; every class with a basis adds some of its own.
INPUTS = (
    {},
    {"lr": 0.01},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "maximize": True},
    {"lr": torch.tensor(0.001)},
)
WITH_BASES = ({"frequency": 2, "tau": 0.0, "weight_decay": 0.1}, {"lr": 0.01, "max_dim": 4})
OWN = {
    "FullMatrixAdam": ({"frequency": 2, "tau": 0.0, "weight_decay": 0.1},),
    "Muon": ({"nesterov": False, "weight_decay": 0.1},),
}

# Torch's tests know its optimizers by name.
DECAY = (
    "test_step_is_noop_for_zero_grads"  # excuses a default decay where the name is AdamW or Muon
)
RATE = "test_load_state_dict_post_hook"  # takes lr = 0.003 for the mark of another test's hook
EXPECTED = {
    DECAY: {"EShampoo", "Shampoo", "KLShampoo", "FullMatrixAdam", "CASPR"},
    RATE: {"SOAP"},
}


def inputs_of(name):
    """The function that torch's tests ask for sets of keywords, fresh ones each time."""

    def inputs(device, dtype=None):
        own = OWN.get(name, WITH_BASES)
        sets = [
            {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
            for kwargs in (*INPUTS, *own)
        ]
        return [OptimizerInput(params=None, kwargs=kwargs, desc=str(kwargs)) for kwargs in sets]

    return inputs


def database():
    """Our classes, described as torch describes its own."""
    return [
        OptimizerInfo(
            cls,
            optim_inputs_func=inputs_of(cls.__name__),
            optim_error_inputs_func=common_optimizers.get_error_inputs_for_all_optims,
            supported_impls=(),
            not_og_supported_flags=("maximize",),
            supports_complex=False,
            skips=tuple(
                DecorateInfo(unittest.expectedFailure, "TestOptimRenewed", test)
                for test, names in EXPECTED.items()
                if cls.__name__ in names
            ),
        )
        for cls in CLASSES
    ]


def main():
    """Run the suite; the exit code is pytest's."""
    folder, *options = sys.argv[1:]
    suite = Path(folder) / "test_optim.py"
    if not suite.exists():
        sys.exit(f"{suite} does not exist: pass the folder `test` of a checkout of PyTorch")
    common_optimizers.optim_db[:] = database()
    sys.path.insert(0, folder)
    settings = ["-q", "-c", os.devnull, "--rootdir", folder, "-p", "no:cacheprovider"]
    sys.exit(pytest.main([*settings, f"{suite}", "-k", "TestOptimRenewed", *options]))


if __name__ == "__main__":
    main()
