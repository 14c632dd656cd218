"""A cache of decoded data outside the repository, so that only the first run decodes."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from eshampoo.lab.errors import UserError
from eshampoo.lab.files import load_tensors, save_tensors


def cached(key: str, build: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors under ``key``; the first call builds and, if it can, stores them."""
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "eshampoo"
    path = Path(os.environ.get("ESHAMPOO_CACHE", default)).expanduser() / f"{key}.pt"
    if path.exists():
        return load_tensors(path)
    tensors = build()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(path, tensors)
    except (OSError, UserError):
        pass  # a read-only home costs time, but does not stop the run
    return tensors


def fingerprint(source: Path) -> str:
    """Distinguish editions of a source by names, sizes and dates of its files, not by contents."""
    files = sorted(source.rglob("*")) if source.is_dir() else [source]
    marks = [(file.name, file.stat()) for file in files if file.is_file()]
    text = "\n".join(f"{name} {mark.st_size} {mark.st_mtime_ns}" for name, mark in marks)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
