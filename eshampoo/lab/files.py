"""Files that are either complete or absent, whatever kills the process."""

import os
from pathlib import Path

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


def make_directory(path: Path) -> Path:
    """Create ``path`` and check that it can be written to before any work is done."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"cannot create {path}: {reason}; choose another --out") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise UserError(f"cannot write to {path}: permission denied; choose another --out")
    return path
