"""What a GPU would feel, counted on a CPU: reads by the host, dispatched operations, float64."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

READS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "numpy")
"""Methods by which Python waits for a device; on a CPU some of them dispatch nothing."""


@dataclass
class Counts:
    """What one step did."""

    reads: list[str] = field(default_factory=list)  # by the host, in order
    uploads: list[str] = field(default_factory=list)  # tensors made from Python's numbers
    operations: list[str] = field(default_factory=list)  # dispatched, views left out
    doubles: list[str] = field(default_factory=list)  # operations that made a float64 tensor


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own has no annotations
    def __init__(self, counts: Counts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = counts

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        out = func(*args, **(kwargs or {}))
        name = str(func)
        if name.startswith("aten._local_scalar_dense"):
            self.counts.reads.append(name)
        elif name.startswith("aten.lift_fresh"):
            self.counts.uploads.append(name)
        elif not func.is_view:
            self.counts.operations.append(name)
        made = out if isinstance(out, list | tuple) else [out]
        if any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in made):
            self.counts.doubles.append(name)
        return out


@contextmanager
def _patched(counts: Counts) -> Iterator[None]:
    """Count the outermost call of every method that reads a tensor."""
    originals = {name: getattr(Tensor, name) for name in READS}
    depth = 0

    def watch(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def read(self: Tensor, *args: Any) -> Any:  # noqa: ANN401
            nonlocal depth
            depth += 1
            before = len(counts.reads)
            try:
                value = original(self, *args)
            finally:
                depth -= 1
            # `item` also dispatches: one read, counted once.
            del counts.reads[before:]
            if depth == 0:
                counts.reads.append(name)
            return value

        return read

    for name, original in originals.items():
        setattr(Tensor, name, watch(name, original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(Tensor, name, original)


def count(action: Callable[[], object]) -> Counts:
    """Run it and count."""
    counts = Counts()
    with _patched(counts), _Mode(counts):
        action()
    return counts
