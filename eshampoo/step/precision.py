"""How many bits the products of a step have, whatever the process is set to."""

from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..options import Precision

# Since torch 2.9: the settings of backends, and what each of them follows while it says "none".
_BACKENDS: tuple[tuple[Any, Any], ...] = ()
if torch.__version__ >= "2.9":
    _BACKENDS = (
        (torch.backends.cuda.matmul, torch.backends.cudnn),
        (torch.backends.mkldnn.matmul, torch.backends.mkldnn),  # type: ignore[attr-defined]
    )


@contextmanager
def guarded(devices: Iterable[str], precisions: Container[Precision]) -> Iterator[None]:
    """No autocast on these types of devices, and products in the highest of these precisions.

    "highest" is full float32. "high" has operands of 10 bits on a GPU (TF32), and of 7 bits
    (bfloat16) on a CPU that is faster with them. "inherit" is what the process is set to.
    """
    available = filter(torch.amp.is_autocast_available, devices)
    cast = [device for device in available if torch.is_autocast_enabled(device)]
    before = None
    if "highest" in precisions:
        before = _set("highest") if lowered() else None
    elif "high" in precisions:
        before = _set("medium")
    for device in cast:
        torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        for device in cast:
            torch.set_autocast_enabled(device, True)
        if before is not None:
            *backends, everywhere = before
            torch.set_float32_matmul_precision(everywhere)
            for (backend, _), value in zip(_BACKENDS, backends, strict=True):
                backend.fp32_precision = value


def lowered() -> bool:
    """Whether products of float32 may be computed from fewer bits at this moment."""
    if _BACKENDS:
        return any(backend.fp32_precision in ("tf32", "bf16") for backend, _ in _BACKENDS)
    return torch.get_float32_matmul_precision() != "highest"


def _set(everywhere: str) -> list[str]:
    """Set one precision; return what was set before, for each backend and then for all."""
    before = []
    for backend, above in _BACKENDS:
        inherited = backend.fp32_precision == above.fp32_precision
        before.append("none" if inherited else backend.fp32_precision)
        backend.fp32_precision = "ieee"  # torch cannot answer below while backends contradict it
    before.append(torch.get_float32_matmul_precision())
    torch.set_float32_matmul_precision(everywhere)
    return before
