"""The benchmark page of a machine with a GPU: `python -m benchmarks.gpu [--device cuda]`.

The cases of `benchmarks.run` on another device, with our optimizers and those of torch; peers have
an environment of their own, which is one for CPUs. We have no GPU and have measured none.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from . import environment, report
from .command import command_line
from .contenders import CONTENDERS
from .run import Spec, full_plan, run_case

WHO = tuple(name for name, c in CONTENDERS.items() if c.package in ("eshampoo", "torch"))


def plan(device: str, repetitions: int | None) -> list[Spec]:
    """Every case that needs no peer and no data."""
    more = {"device": device} | ({} if repetitions is None else {"repetitions": repetitions})
    return [{**spec, **more} for _, spec in full_plan(None, 1) if spec.get("contender") in WHO]


def name_of(device: str) -> str:
    """What a device is called."""
    place = torch.device(device)
    if place.type == "cpu":
        return environment.cpu_model()
    return str(torch.get_device_module(place).get_device_name(place))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and write JSON, page and figure; 1 if a case failed."""
    parser = command_line("gpu", __doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", help="only cases whose title contains this")
    parser.add_argument("--repetitions", type=int, help="instead of those of benchmarks.run")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"))
    o = parser.parse_args(arguments)
    machine = environment.machine(sys.executable, o.threads) | {"device": name_of(o.device)}
    cases = []
    for spec in plan(o.device, o.repetitions):
        if o.only in report.title(spec):
            cases.append({"round": 0, **run_case(sys.executable, spec, o.threads)})
            print(report.title(spec), cases[-1].get("skipped", "done"), flush=True)
    record = {
        "command": f"python -m benchmarks.gpu --device {o.device}",
        "machine": machine,
        "cases": cases,
    }
    o.output.mkdir(parents=True, exist_ok=True)
    path = o.output / "results.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    report.main(str(path), str(o.output))
    return 1 if any(case.get("skipped", "").startswith("failed") for case in cases) else 0


if __name__ == "__main__":
    sys.exit(main())
