"""One case in one process: `python -m benchmarks.case '{"kind": …}'` prints one line of JSON."""

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from . import even, limit, partial, shapes, timing, training
from .contenders import CONTENDERS, NEVER, Contender, Stepper

Result = dict[str, Any]
LIMIT = 400
"""Seconds for one case: enough for all that docs/benchmarks.md has, not for an 8192 × 8192 eigh."""


def settings(optimizer: Any, **values: object) -> None:  # noqa: ANN401 - any of ours
    """Write into the param groups of one of our optimizers; they are read at every step."""
    for group in optimizer.param_groups:
        group.update(values)


def measure(spec: Result) -> Result:
    """Everything about one optimizer on one set of shapes."""
    contender: Contender = CONTENDERS[spec["contender"]]
    timing.warm_up()
    params = shapes.parameters(spec["shapes"], device=spec["device"])
    parameters = sum(p.numel() for p in params)
    renew = shapes.renewer(params)
    before, first = timing.resident(), timing.Clock()
    optimizer = contender.build(params)
    first.time(optimizer.step)
    result: Result = {"parameters": parameters, "first": first.summary()}
    slow = first.wall[0] > spec["budget"] / 2 and contender.cycle == 1
    for _ in range(1 if slow else 2):
        renew()
        optimizer.step()
    result["peak_bytes_per_parameter"] = (timing.peak() - before) / parameters
    result["state_bytes_per_parameter"] = timing.state_bytes(optimizer.state, params) / parameters
    if contender.cycle > 1:
        return result | _cycles(optimizer, renew, contender.cycle, spec)
    if contender.units:
        return result | _ours(optimizer, params, renew, contender, spec)
    return result | timing.race(
        {"plain": optimizer.step},
        spec["repetitions"],
        spec["budget"],
        before={"plain": renew},
        least=1 if slow else 3,
    )


def _cycles(optimizer: Stepper, renew: timing.Action, length: int, spec: Result) -> Result:
    """Steps of whole cycles: the median is a plain step, the longest of a cycle its refresh."""
    clock = timing.Clock()
    cycles = max(2, spec["repetitions"] // length)
    budget = spec["budget"]
    while len(clock.wall) < cycles * length:
        renew()
        clock.time(optimizer.step)
        if len(clock.wall) % length == 0 and sum(clock.wall) > budget:
            break
    wall = clock.wall
    runs = [wall[start : start + length] for start in range(0, len(wall), length)]
    return {
        "plain": clock.summary(),
        "refresh": {"wall": median(map(max, runs)), "runs": len(runs)},
        "cycle": {"wall": median(sum(run) / length for run in runs), "runs": len(runs)},
    }


def _ours(
    optimizer: Stepper,
    params: Sequence[Tensor],
    renew: timing.Action,
    contender: Contender,
    spec: Result,
) -> Result:
    """Steps at which every factor is due, then plain and check-only steps beside the limit."""

    def plain() -> None:
        renew()
        settings(optimizer, frequency=NEVER)

    def check_only() -> None:
        renew()
        settings(optimizer, frequency=1, tau=0.999)

    result = _refresh(optimizer, sum(p.numel() for p in params), renew, spec)
    found = limit.blocks(params)
    bare = limit.Limit(found, contender.units, spec["device"])
    stacked = limit.StackedLimit(found, contender.units, spec["device"])
    actions: dict[str, Callable[[], object]] = {
        "plain": optimizer.step,
        "limit": bare.run,
        "check": optimizer.step,
        "stacked_limit": stacked.run,
    }
    plain()
    optimizer.step()
    bare.run()
    stacked.run()
    times = timing.race(
        actions,
        spec["repetitions"],
        spec["budget"],
        before={"plain": plain, "check": check_only},
    )
    return result | times | {"multiply_adds": limit.multiply_adds(found, contender.units)}


def _refresh(optimizer: Stepper, parameters: int, renew: timing.Action, spec: Result) -> Result:
    """Steps at which every factor is due, and the memory that they take beyond other steps."""

    def every() -> None:
        renew()
        settings(optimizer, frequency=1, tau=0.0)

    before = timing.peak()
    result: Result = timing.race(
        {"refresh": optimizer.step},
        min(spec["repetitions"], 5),
        spec["budget"] / 4,
        before={"refresh": every},
        least=1,
    )
    extra = (timing.peak() - before) / parameters
    return result | {"refresh_extra_peak_bytes_per_parameter": extra}


KINDS: dict[str, Callable[[Result], Result]] = {
    "measure": measure,
    "partial": partial.measure,
    "even": even.measure,
    "training": training.measure,
}


def give_up(_signal: int, _frame: object) -> None:
    """Leave at once: an exception would be caught and explained by compilers."""
    sys.stderr.write(f"not done after {LIMIT} s\n")
    sys.stderr.flush()
    os._exit(1)


def main(argument: str) -> None:
    defaults = {"repetitions": 9, "budget": 30.0, "threads": 2, "device": "cpu"}
    spec: Result = {**defaults, **json.loads(argument)}
    timing.use_threads(spec["threads"])
    timing.use_device(spec["device"])
    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(LIMIT)
    result = KINDS[spec["kind"]](spec)
    result |= {"torch": torch.__version__, "threads": torch.get_num_threads()}
    sys.stdout.write(json.dumps({"spec": spec, "result": result}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
