"""Checkpoints: all that a run needs to continue bit for bit. The last one is kept."""

from pathlib import Path
from typing import Any

import torch

from eshampoo.lab.files import load_tensors, save_tensors


def checkpoints(directory: Path) -> list[Path]:
    """List the checkpoints of a run, newest first."""
    return sorted(directory.glob("checkpoint-*.pt"), reverse=True)


def save_checkpoint(directory: Path, step: int, state: dict[str, Any]) -> None:
    """Write ``state`` after ``step`` steps, and then remove the checkpoint before it.

    The order of the data and of the augmentation is a function of (seed, step), and so are the
    learning rate and τ: the step number is their state. Dropout draws from torch's generator.
    """
    whole = {**state, "step": step, "generator": torch.get_rng_state()}
    save_tensors(directory / f"checkpoint-{step:08d}.pt", whole)
    for old in checkpoints(directory)[1:]:
        old.unlink()


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint."""
    return load_tensors(path)


def discard_checkpoints(directory: Path) -> None:
    """Remove the checkpoints of a finished run."""
    for path in checkpoints(directory):
        path.unlink()
