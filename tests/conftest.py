"""One thread, and a seeded generator for every test."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def generator():
    """A generator of its own, seeded."""
    return torch.Generator().manual_seed(0)
