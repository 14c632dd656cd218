"""Loaders of the published formats; each returns a ``Dataset``."""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

Batch = tuple[Tensor, ...]


class Dataset(Protocol):
    """Training examples by index, and a fixed validation set."""

    @property
    def outputs(self) -> int:
        """Return the width of the model's last layer: classes, tasks, vocabulary or channels."""
        ...

    def __len__(self) -> int:
        """Return the number of training examples."""
        ...

    def batch(self, indices: Tensor, generator: torch.Generator) -> Batch:
        """Return training examples, augmented with draws from ``generator`` and no other."""
        ...

    def validation(self) -> Iterator[Batch]:
        """Go through the validation set, which is always the same."""
        ...


def batch_indices(size: int, batch: int, seed: int, step: int) -> Tensor:
    """Return the examples of a step; an epoch is a permutation that depends on (seed, epoch)."""
    per_epoch = max(1, size // batch)
    epoch, position = divmod(step, per_epoch)
    order = torch.randperm(size, generator=seeded(seed, epoch))
    return order[position * batch : (position + 1) * batch]


def seeded(*numbers: int) -> torch.Generator:
    """Return a generator whose draws depend only on a few numbers."""
    state = 0
    for number in numbers:
        # mix in each number fully, so that (0, 1) and (1, 0) are unrelated
        state = ((state ^ (number + 1)) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) % 2**63
        state ^= state >> 29
    return torch.Generator().manual_seed(state)
