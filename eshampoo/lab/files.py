"""Files that are either complete or absent, whatever kills the process."""

import fcntl
import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from eshampoo.lab.errors import UserError


def write_atomic(path: Path, content: bytes | memoryview) -> None:
    """Replace ``path`` by ``content``: temporary file, fsync, rename, fsync of the directory."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error.strerror}; choose another --out") from error


def save_tensors(path: Path, state: Mapping[str, Any]) -> None:
    """Write ``state`` with ``torch.save``, atomically."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    write_atomic(path, buffer.getbuffer())


def load_tensors(path: Path) -> dict[str, Any]:
    """Read what ``save_tensors`` wrote, without executing code in it."""
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True)
    except Exception as error:  # a foreign file can fail in many ways
        raise UserError(
            f"{path} is damaged or foreign: {error}; delete it and start again"
        ) from error
    return state


def make_directory(path: Path) -> Path:
    """Create ``path``, and check that it is writable before any work begins."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"cannot create {path}: {reason}; choose another --out") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise UserError(f"cannot write to {path}: permission denied; choose another --out")
    return path


@contextmanager
def made(directory: Path) -> Iterator[None]:
    """Create a directory, and remove it at the end if it is still empty."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    make_directory(directory)
    try:
        yield
    finally:
        for path in missing:
            try:
                path.rmdir()
            except OSError:  # it is not empty, and neither are those above
                break


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Keep other processes out of a directory.

    The lock is on the directory itself, so no file is left behind. The system releases it when
    the process ends, even if it is killed.
    """
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise UserError(
            f"another process is training into {directory}; wait for it or choose another --out"
        ) from error
    except OSError:  # some network file systems cannot lock a directory
        pass
    try:
        yield
    finally:
        os.close(handle)
