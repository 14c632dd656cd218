"""One large model: `python -m benchmarks.large [full] [lean]`, the state in full or lean.

The Llama of the paper with 324 million parameters, on one thread: CPU seconds of plain steps
beside AdamW's, and the memory of the process, a process for each. Needs 12 GB for the full state.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from eshampoo import EShampoo

from . import environment, shapes, timing
from .command import command_line
from .contenders import NEVER

STATES: dict[str, dict[str, Any]] = {"full": {}, "lean": {"state": "lean"}}


def build(who: str, params: list[Tensor]) -> torch.optim.Optimizer:
    """EShampoo with one of the states, without any check, or torch's AdamW."""
    if who in STATES:
        return EShampoo(params, frequency=NEVER, **STATES[who])
    fused = who == "adamw fused"
    return torch.optim.AdamW(params, fused=fused, foreach=not fused)


def measure(who: str, model: str, steps: int) -> dict[str, float]:
    """CPU seconds of a plain step, and bytes of the process; the first step does not count."""
    timing.use_threads(1)
    timing.warm_up()
    start = timing.resident()
    params = shapes.parameters(model)
    held = timing.resident()
    optimizer = build(who, params)
    optimizer.step()
    clock = timing.Clock()
    for _ in range(steps):
        clock.time(optimizer.step)
    return {
        "parameters": sum(p.numel() for p in params),
        "seconds": median(clock.cpu),
        "state": timing.state_bytes(optimizer.state, params),
        "model": held - start,
        "resident": timing.resident(),
        "peak": timing.peak(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table, every row from a process of its own."""
    parser = command_line("large", __doc__)
    parser.add_argument("states", nargs="*", help="full, lean, or both")
    parser.add_argument("--model", default="llama-324m")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    o = parser.parse_args(arguments)
    if o.only:
        print(json.dumps(measure(o.only, o.model, o.steps)))
        return
    rows = {}
    for who in ("adamw", "adamw fused", *(o.states or ["full"])):
        command = [sys.executable, "-m", "benchmarks.large", "--only", who]
        command += ["--model", o.model, "--steps", str(o.steps)]
        done = subprocess.run(command, cwd=environment.ROOT, stdout=subprocess.PIPE, check=True)
        rows[who] = json.loads(done.stdout)
    count = rows["adamw"]["parameters"]
    print(
        f"{o.model}, {count / 1e6:.0f} million parameters, one thread, {environment.cpu_model()}\n"
    )
    print("| | CPU s per plain step | state GB | state B/param | process GB | peak GB |")
    print("|---|--:|--:|--:|--:|--:|")
    for who, row in rows.items():
        sizes = [row["state"] / 1e9, row["state"] / count, row["resident"] / 1e9, row["peak"] / 1e9]
        cells = " | ".join(f"{size:.1f}" for size in sizes)
        print(f"| {who} | {row['seconds']:.3g} | {cells} |")


if __name__ == "__main__":
    main()
