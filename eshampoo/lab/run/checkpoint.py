"""Checkpoints: everything from which a run continues bit for bit; the last two are kept."""

import io
import zipfile
from pathlib import Path
from typing import Any

import torch

from eshampoo.lab.errors import UserError
from eshampoo.lab.files import write_atomic

KEPT = 2


def checkpoints(directory: Path) -> list[Path]:
    """List the checkpoints of a run, newest first."""
    return sorted(directory.glob("checkpoint-*.pt"), reverse=True)


def save_checkpoint(directory: Path, step: int, state: dict[str, Any]) -> None:
    """Write ``state`` after ``step`` steps and drop all but the last two.

    The order of the data and of the augmentation is a function of (seed, step), and so are the
    learning rate and τ: the step number is their state. Dropout draws from torch's generator.
    """
    buffer = io.BytesIO()
    torch.save({**state, "step": step, "generator": torch.get_rng_state()}, buffer)
    write_atomic(directory / f"checkpoint-{step:08d}.pt", buffer.getbuffer())
    for old in checkpoints(directory)[KEPT:]:
        old.unlink()


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a file, checked bit by bit, without executing any code in it.

    torch.load looks at no checksum: of single bits that were flipped it lets every fourth through
    as another state. The checksums are in the file, so they are compared first.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
            # An entry that is marked as a folder has no content to torch, whatever its checksum.
            folders = [entry.filename for entry in archive.infolist() if entry.external_attr & 0x10]
            damaged = damaged or next(iter(folders), None)
        if damaged is not None:
            raise zipfile.BadZipFile(f"{damaged} is damaged")
        state: dict[str, Any] = torch.load(path, weights_only=True)
        state["step"], state["generator"]
    except Exception as error:  # a damaged file fails in more ways than can be listed
        raise UserError(f"{path} is not a complete checkpoint: {error}") from error
    return state


def load_checkpoint(directory: Path) -> dict[str, Any] | None:
    """Load the newest checkpoint that can be read, or return None where there is none at all."""
    found = checkpoints(directory)
    for path in found:
        try:
            state = read_checkpoint(path)
        except UserError:  # the checkpoint before this one serves as well
            continue
        torch.set_rng_state(state["generator"])
        return state
    if found:
        raise UserError(f"no checkpoint in {directory} can be read; delete it and start again")
    return None


def discard_checkpoints(directory: Path) -> None:
    """Remove the checkpoints of a finished run."""
    for path in checkpoints(directory):
        path.unlink()
