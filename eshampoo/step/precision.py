"""Full float32 for the products of a step, whatever the process is set to.

The setting belongs to the process, not to a thread. So the steps of all threads share one guard:
the first that finds the precision lowered raises it, and the last to leave puts it back. A signal
can end a step anywhere, also while the guard goes up or down; then the next step of that thread
puts the setting back.
"""

from collections.abc import Iterable
from threading import Lock, get_ident
from typing import Any, final

import torch

# Since torch 2.9: the settings of backends, and what each of them follows while it says "none".
_BACKENDS: tuple[tuple[Any, Any], ...] = ()
if torch.__version__ >= "2.9":
    _BACKENDS = (
        (torch.backends.cuda.matmul, torch.backends.cudnn),
        (torch.backends.mkldnn.matmul, torch.backends.mkldnn),  # type: ignore[attr-defined]
    )

_lock = Lock()
_inside: set[int] = set()  # the threads whose steps need full precision at this moment
# What was set before they raised it, and what is to be put back now: the setting of each backend,
# and then that of all, unless a signal came before it was read.
_noted: list[str] = []
_owed: list[str] = []


@final
class guarded:  # noqa: N801 - used like a function
    """No autocast on these types of devices, and with `highest` no products in lower precision.

    Not a generator: one that a signal ends halfway would finish at some later moment.
    """

    def __init__(self, devices: Iterable[str], highest: bool) -> None:
        available = filter(torch.amp.is_autocast_available, devices)
        self.cast = [device for device in available if torch.is_autocast_enabled(device)]
        self.highest = highest

    def __enter__(self) -> None:
        try:
            for device in self.cast:
                torch.set_autocast_enabled(device, False)
            if self.highest:
                _enter()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        for device in self.cast:
            torch.set_autocast_enabled(device, True)
        if self.highest:
            _leave()


def _enter() -> None:
    """Raise the precision if it is lowered."""
    with _lock:
        _settle()
        _inside.add(get_ident())
        if lowered():
            _raise()


def _leave() -> None:
    """Put back what was set before, once no thread needs full precision any more."""
    with _lock:
        _settle()


def _settle() -> None:
    """End the last step of this thread for the guard, if that has not been done."""
    global _noted, _owed
    _inside.discard(get_ident())
    if _inside:
        return
    if _noted:
        # If all was noted and the precision is low again, another thread has set it since.
        stays = len(_noted) > len(_BACKENDS) and lowered()
        _owed, _noted = [] if stays else _noted, []  # no signal comes between assignments
    for everywhere in _owed[len(_BACKENDS) :]:
        torch.set_float32_matmul_precision(everywhere)
    for (backend, _), value in zip(_BACKENDS, _owed, strict=False):
        backend.fp32_precision = value
    _owed = []


def lowered() -> bool:
    """Whether products of float32 may be computed from fewer bits at this moment."""
    if _BACKENDS:
        return any(backend.fp32_precision in ("tf32", "bf16") for backend, _ in _BACKENDS)
    return torch.get_float32_matmul_precision() != "highest"


def _raise() -> None:
    """Set full precision, and note what was set before."""
    _noted.clear()
    for backend, above in _BACKENDS:
        inherited = backend.fp32_precision == above.fp32_precision
        _noted.append("none" if inherited else backend.fp32_precision)
        backend.fp32_precision = "ieee"  # torch cannot answer below while backends contradict it
    _noted.append(torch.get_float32_matmul_precision())
    torch.set_float32_matmul_precision("highest")
