"""A checksum of a state, for users who write their own files."""

import ctypes
import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .state.blocks import local

if TYPE_CHECKING:
    from hashlib import _Hash


def digest(state: object) -> str:
    """The SHA-256 of a `state_dict`: of every name, number and bit of every tensor in it.

    Save it beside the state, and compare after loading: `torch.load` does not notice flipped bits.
    Devices and the order of names do not count. Of a DTensor, only what this rank holds counts.
    """
    total = hashlib.sha256()
    _add(total, state)
    return total.hexdigest()


def _add(total: "_Hash", value: Any) -> None:  # noqa: ANN401 - whatever a state holds
    """Add a value, with its kind and size, so that no two states read the same."""
    if isinstance(value, Tensor):
        held = local(value).detach().cpu().contiguous()
        total.update(f"tensor {held.dtype} {tuple(held.shape)}:".encode())
        size = held.numel() * held.element_size()
        if size:
            total.update((ctypes.c_char * size).from_address(held.data_ptr()))
    elif isinstance(value, Mapping):
        total.update(f"map {len(value)}:".encode())
        for key in sorted(value, key=lambda key: (type(key).__name__, repr(key))):
            _add(total, key)
            _add(total, value[key])
    elif isinstance(value, list | tuple):
        total.update(f"list {len(value)}:".encode())
        for entry in value:
            _add(total, entry)
    elif value is None or isinstance(value, bool | int | float | str):
        words = f"{type(value).__name__} {value!r}".encode()
        total.update(f"{len(words)} ".encode() + words)
    else:
        raise TypeError(
            f"a state holds a {type(value).__name__}, which has no digest; it must consist of "
            "tensors, numbers, strings, None, lists and dictionaries: take it out first"
        )
