"""Decoded data, kept outside the repository so that only the first run pays for decoding."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from eshampoo.lab.errors import UserError
from eshampoo.lab.files import read_sealed, write_sealed


def cached(key: str, build: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors under ``key``; the first call builds and, if it can, stores them."""
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "eshampoo"
    path = Path(os.environ.get("ESHAMPOO_CACHE", default)).expanduser() / f"{key}.pt"
    if path.exists():
        try:
            return read_sealed(path)
        except UserError:
            path.unlink(missing_ok=True)  # a damaged file is built again
    tensors = build()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_sealed(path, tensors)
    except (OSError, UserError):
        pass  # a home that is read-only costs time, but not the run
    return tensors


def fingerprint(source: Path) -> str:
    """Tell editions of a source apart by names, sizes and dates of its files, not by contents."""
    files = sorted(source.rglob("*")) if source.is_dir() else [source]
    marks = [(file.name, file.stat()) for file in files if file.is_file()]
    text = "\n".join(f"{name} {mark.st_size} {mark.st_mtime_ns}" for name, mark in marks)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
