"""What bases cost on a device: `python -m benchmarks.gpu [--device cuda]`.

Prints the seconds of a product, of `eigh` and of `qr`, for several sizes and stacks, and the line
that sets the cost which `budget` charges. With --page it also measures the cases of
`benchmarks.run` there, for our optimizers and those of torch, and writes a page like
docs/benchmarks.md. We have no GPU and have measured none.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from . import costs, environment, report
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


def print_costs(o: argparse.Namespace) -> None:
    """Print the costs of bases row by row, and how to set them."""
    torch.set_num_threads(o.threads)
    torch.set_float32_matmul_precision(o.precision)
    print(
        f"{name_of(o.device)}, torch {torch.__version__}, CUDA {torch.version.cuda}, {o.precision}"
    )
    print("| d | stack | product s | eigh s | products | qr s | products |")
    print("|--:|--:|--:|--:|--:|--:|--:|")
    found = []
    for cost in costs.measure(o.device, o.sizes, costs.STACKS, o.limit):
        found.append(cost)
        print(costs.row(cost), flush=True)
    print("\nSet the cost on all ranks, before the optimizer is built:\n")
    print(f"    {costs.advice(found, o.device)}")


def write_page(o: argparse.Namespace) -> int:
    """Measure all cases, and write JSON, page and figure; 1 if a case failed."""
    machine = environment.machine(sys.executable, o.threads) | {"device": name_of(o.device)}
    cases = []
    for spec in plan(o.device, o.repetitions):
        if o.only in report.title(spec):
            cases.append({"round": 0, **run_case(sys.executable, spec, o.threads)})
            print(report.title(spec), cases[-1].get("skipped", "done"), flush=True)
    record = {
        "command": f"python -m benchmarks.gpu --device {o.device} --page",
        "machine": machine,
        "cases": cases,
    }
    o.output.mkdir(parents=True, exist_ok=True)
    path = o.output / "results.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    report.main(str(path), str(o.output))
    return 1 if any(case.get("skipped", "").startswith("failed") for case in cases) else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the costs, and write the page if it is asked for; 1 if a case of it failed."""
    parser = command_line("gpu", __doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sizes", type=sizes, default=costs.SIZES, help="d, by commas")
    parser.add_argument("--quick", action="store_const", dest="sizes", const=costs.QUICK_SIZES)
    parser.add_argument("--limit", type=float, default=20.0, help="the longest solve in seconds")
    parser.add_argument("--precision", default="highest", help="of products in float32, or high")
    parser.add_argument("--page", action="store_true", help="also write the benchmark page")
    parser.add_argument("--only", default="", help="only cases whose title contains this")
    parser.add_argument("--repetitions", type=int, help="instead of those of benchmarks.run")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"))
    o = parser.parse_args(arguments)
    print_costs(o)
    return write_page(o) if o.page else 0


def sizes(words: str) -> tuple[int, ...]:
    """Numbers by commas."""
    return tuple(int(word) for word in words.split(","))


if __name__ == "__main__":
    sys.exit(main())
