"""Stopwatch: wall and CPU seconds, alternating between what is compared, and memory."""

import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor

Action = Callable[[], object]

# Where what is timed runs.
_device = torch.device("cpu")


def use_device(name: str) -> None:
    """Wait for this device, and ask it for its memory, from now on."""
    global _device
    _device = torch.device(name)


def wait() -> None:
    """Until all that was started is done."""
    if _device.type != "cpu":
        torch.get_device_module(_device).synchronize()


@dataclass
class Clock:
    """Wall and CPU seconds of one thing, run by run."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def time(self, action: Action) -> None:
        wait()
        cpu, wall = time.process_time(), time.perf_counter()
        action()
        wait()
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)

    def summary(self) -> dict[str, Any]:
        """Median and quartiles, least, and every wall time."""
        low, middle, high = quartiles(self.wall)
        return {
            "wall": middle,
            "cpu": median(self.cpu),
            "least": min(self.wall),
            "quartiles": [low, high],
            "runs": len(self.wall),
            "mean": sum(self.wall) / len(self.wall),
        }


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """25 %, 50 % and 75 %, also of a single value."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return low, middle, high


def race(
    actions: Mapping[str, Action],
    repetitions: int,
    budget: float,
    before: Mapping[str, Action] | None = None,
    least: int = 3,
) -> dict[str, dict[str, Any]]:
    """Run the actions in turn, so that noise hits all of them; stop after `budget` seconds.

    `before` prepares an action and is not timed.
    """
    clocks = {name: Clock() for name in actions}
    started = time.perf_counter()
    for done in range(repetitions):
        if done >= least and time.perf_counter() - started > budget:
            break
        for name, action in actions.items():
            if before and name in before:
                before[name]()
            clocks[name].time(action)
    return {name: clock.summary() for name, clock in clocks.items()}


def resident() -> int:
    """Bytes of memory that this process holds now, on the device that it runs on."""
    if _device.type != "cpu":
        return int(torch.get_device_module(_device).memory_allocated())
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def peak() -> int:
    """Most bytes of memory that this process has held, on the device that it runs on."""
    if _device.type != "cpu":
        return int(torch.get_device_module(_device).max_memory_allocated())
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def tensors(value: object, seen: set[int] | None = None) -> Iterable[Tensor]:
    """All tensors inside nested containers and objects, each object once."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from tensors(inner, seen)
    elif isinstance(value, list | tuple | set):
        for inner in value:
            yield from tensors(inner, seen)
    elif getattr(type(value), "__module__", "builtins") != "builtins" and not callable(value):
        yield from tensors(getattr(value, "__dict__", {}), seen)


def state_bytes(state: object, parameters: Iterable[Tensor]) -> int:
    """Bytes of the storages that a state refers to; views of one stack count once."""
    own = {id_of(x) for p in parameters for x in (p, p.grad) if x is not None}
    storages = {id_of(x): x.untyped_storage().nbytes() for x in tensors(state)}
    return sum(size for place, size in storages.items() if place not in own)


def id_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def use_threads(count: int) -> None:
    """So many threads for every case."""
    torch.set_num_threads(count)


def warm_up() -> None:
    """Load what torch loads late (LAPACK, thread pools), so that it counts for nobody's memory."""
    X = torch.randn(64, 64, device=_device)
    torch.linalg.eigh(X @ X.t())
    torch.linalg.qr(torch.bmm(X.expand(4, 64, 64), X.expand(4, 64, 64)))
    p = torch.randn(1 << 16, device=_device).requires_grad_()
    p.grad = torch.randn_like(p)
    torch.optim.AdamW([p]).step()
