"""Checkpoints: all that a run needs to continue bit for bit. The last two are kept."""

from pathlib import Path
from typing import Any

import torch

from eshampoo.lab.errors import UserError
from eshampoo.lab.files import read_sealed, write_sealed

KEPT = 2


def checkpoints(directory: Path) -> list[Path]:
    """List the checkpoints of a run, newest first."""
    return sorted(directory.glob("checkpoint-*.pt"), reverse=True)


def save_checkpoint(directory: Path, step: int, state: dict[str, Any]) -> None:
    """Write ``state`` after ``step`` steps and drop all but the last two.

    The order of the data and of the augmentation is a function of (seed, step), and so are the
    learning rate and τ: the step number is their state. Dropout draws from torch's generator.
    """
    whole = {**state, "step": step, "generator": torch.get_rng_state()}
    write_sealed(directory / f"checkpoint-{step:08d}.pt", whole)
    for old in checkpoints(directory)[KEPT:]:
        old.unlink()


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a file without executing code in it; refuse any changed bit."""
    state = read_sealed(path)
    if not {"step", "generator"} <= state.keys():
        raise UserError(f"{path} is not a checkpoint: it has no step or no generator")
    return state


def load_checkpoint(directory: Path) -> dict[str, Any] | None:
    """Load the newest checkpoint that can be read; return None if there is no checkpoint."""
    found = checkpoints(directory)
    for path in found:
        try:
            return read_checkpoint(path)
        except UserError:  # the checkpoint before this one will do
            continue
    if found:
        raise UserError(f"no checkpoint in {directory} can be read; delete it and start again")
    return None


def discard_checkpoints(directory: Path) -> None:
    """Remove the checkpoints of a finished run."""
    for path in checkpoints(directory):
        path.unlink()
