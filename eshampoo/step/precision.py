"""Full float32 for the products of a step, whatever the process is set to.

The setting belongs to the process, not to a thread. So the steps of all threads share one guard:
the first that finds the precision lowered raises it, and the last to leave puts it back.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock
from typing import Any

import torch

# Since torch 2.9: the settings of backends, and what each of them follows while it says "none".
_BACKENDS: tuple[tuple[Any, Any], ...] = ()
if torch.__version__ >= "2.9":
    _BACKENDS = (
        (torch.backends.cuda.matmul, torch.backends.cudnn),
        (torch.backends.mkldnn.matmul, torch.backends.mkldnn),  # type: ignore[attr-defined]
    )

_lock = Lock()
_inside = 0  # how many steps need full precision at this moment
_before: tuple[str, list[str]] | None = None  # what the last of them puts back


@contextmanager
def guarded(devices: Iterable[str], highest: bool) -> Iterator[None]:
    """No autocast on these types of devices, and with `highest` no products in lower precision."""
    with ExitStack() as stack:
        for device in devices:
            if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if highest:
            stack.enter_context(_full_products())
        yield


@contextmanager
def _full_products() -> Iterator[None]:
    global _inside, _before
    with _lock:
        _inside += 1
        if lowered():
            _before = _raise()
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0 and _before is not None:
                if not lowered():  # otherwise another thread has set it since
                    _put_back(*_before)
                _before = None


def lowered() -> bool:
    """Whether products of float32 may be computed from fewer bits at this moment."""
    if _BACKENDS:
        return any(backend.fp32_precision in ("tf32", "bf16") for backend, _ in _BACKENDS)
    return torch.get_float32_matmul_precision() != "highest"


def _raise() -> tuple[str, list[str]]:
    """Set full precision; return what was set before, for all backends and for each of them."""
    each = []
    for backend, above in _BACKENDS:
        inherited = backend.fp32_precision == above.fp32_precision
        each.append("none" if inherited else backend.fp32_precision)
        backend.fp32_precision = "ieee"  # torch cannot answer below while backends contradict it
    everywhere = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    return everywhere, each


def _put_back(everywhere: str, each: list[str]) -> None:
    torch.set_float32_matmul_precision(everywhere)
    for (backend, _), value in zip(_BACKENDS, each, strict=True):
        backend.fp32_precision = value
