"""Run everything: `python -m benchmarks.run [--quick] [--data DIR] [--only TEXT,…] [--update]`."""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from . import environment, shapes
from .bars import Bar, Results, all_bars
from .command import command_line
from .contenders import OURS, PEERS
from .report import case_table, depths, title, widths

Spec = dict[str, Any]


def full_plan(data: str | None, rounds: int) -> list[tuple[int, Spec]]:
    """Every case; those whose processes are compared with each other come in rounds."""
    plan: list[tuple[int, Spec]] = []
    for name in shapes.MODELS:
        large = name in ("vit_s", "llama", "unet")
        # Compiling takes minutes on a CPU, and torch's Muon takes matrices only.
        left_out = {"vit_s": (), "unet": ("heavyball_soap_compiled", "torch_muon")}
        without = left_out.get(name, ("heavyball_soap_compiled",))
        peers = [peer for peer in PEERS if peer not in without]
        effort = {"repetitions": 12 if large else 150, "budget": 40.0 if large else 10.0}
        for number in range(rounds if name == "vit_s" else 1):
            plan += [
                (number, {"kind": "measure", "shapes": name, "contender": who, **effort})
                for who in (*OURS, *peers)
            ]
        # Milliseconds depend on where a process happens to lie in memory: several processes.
        again = 0 if large else 4
        spec = {"kind": "measure", "shapes": name, "contender": "eshampoo", **effort}
        plan += [(number, spec) for number in range(1, 1 + again)]
    for name in ("vit_s", "vit_192"):
        effort = {"repetitions": 5, "budget": 60.0}
        plan.append((0, {"kind": "partial", "shapes": name, **effort}))
    plan.append((0, {"kind": "training", "data": data}))
    plan.append((0, {"kind": "even", "shapes": "vit_192", "steps": 120}))
    plan += [
        (0, {"kind": "measure", "shapes": name, "contender": who, "repetitions": 15, "budget": 10})
        for name in dict.fromkeys([*widths(), *depths()])
        for who in ("eshampoo", "adamw_foreach")
    ]
    return plan


def quick_plan() -> list[tuple[int, Spec]]:
    """Seconds instead of minutes: one small model, few repetitions, no peers."""
    effort = {"shapes": "vit_64", "repetitions": 3, "budget": 3.0}
    measured = [(0, {"kind": "measure", "contender": who, **effort}) for who in OURS]
    even = {"kind": "even", "shapes": "layers:16:3", "steps": 10}
    return [*measured, (0, {"kind": "partial", **effort}), (0, even)]


def run_case(python: str, spec: Spec, threads: int) -> Spec:
    """One case in a process of its own: its result, or the reason why there is none."""
    shown = {key: value for key, value in spec.items() if key != "data"}
    if spec["kind"] == "training" and not spec["data"]:
        reason = "no --data DIR with Imagewoof was given"
        return {"spec": shown, "skipped": reason}
    command = [python, "-m", "benchmarks.case", json.dumps({**spec, "threads": threads})]
    done = subprocess.run(command, cwd=environment.ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        reason = last if last.startswith("not done") else "failed: " + last
        return {"spec": shown, "skipped": re.sub(r"(/[\w.+-]+)+/", "…/", reason)}
    return {"spec": shown, "result": json.loads(done.stdout.splitlines()[-1])["result"]}


def show_bars(bars: list[Bar]) -> None:
    print(f"\n{'case':<58} {'value':>7} {'bar':>6} {'reach':>6}  verdict")
    for bar in bars:
        value = "–" if bar.value is None else f"{bar.value:.2f}"
        print(f"{bar.case:<58} {value:>7} {bar.bar:>6} {bar.reach:>6}  {bar.verdict} {bar.detail}")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = command_line("run", __doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke test, without peers")
    parser.add_argument("--data", help="directory with Imagewoof, or its archive")
    parser.add_argument("--only", help="only cases whose title contains one of these, by commas")
    parser.add_argument(
        "--update", action="store_true", help="put the cases into the results that are there"
    )
    parser.add_argument("--rounds", type=int, default=1, help="rounds of the ViT-S processes")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="results here instead of benchmarks/ and docs/")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the tables, write JSON, page and figure; 1 if a case failed."""
    options = parse(arguments)
    python = sys.executable if options.quick else environment.python_with_peers()
    plan = quick_plan() if options.quick else full_plan(options.data, options.rounds)
    wanted = [""] if options.only is None else options.only.split(",")
    plan = [(n, spec) for n, spec in plan if any(text in title(spec) for text in wanted)]
    machine = environment.machine(python, options.threads)
    print(", ".join(f"{key} {value}" for key, value in machine.items()), flush=True)
    cases = []
    for number, spec in plan:
        case = {"round": number, **run_case(python, spec, options.threads)}
        cases.append(case)
        print(f"{title(spec):<50} {_line(case)}", flush=True)
    if options.update:
        done = {(case["round"], title(case["spec"])) for case in cases}
        before = json.loads(
            (options.output or environment.HERE).joinpath("results.json").read_text()
        )
        kept = [c for c in before["cases"] if (c["round"], title(c["spec"])) not in done]
        cases = kept + [{**case, "again": True} for case in cases]
    results = Results(cases)
    print("\n" + case_table(results, list(shapes.MODELS)))
    show_bars(all_bars(results))
    command = "python -m benchmarks.run --data DIR" if options.data else "python -m benchmarks.run"
    record = {"command": command, "machine": machine, "cases": cases}
    _write(record, options, python)
    return 1 if any(case.get("skipped", "").startswith("failed") for case in cases) else 0


def _line(case: Spec) -> str:
    if "skipped" in case:
        return f"skipped: {case['skipped']}"
    timed = {k: v["wall"] for k, v in case["result"].items() if isinstance(v, dict) and "wall" in v}
    return "  ".join(f"{name} {wall * 1e3:.2f} ms" for name, wall in timed.items())


def _write(record: Spec, options: argparse.Namespace, python: str) -> None:
    """The JSON always; page and figure only of a whole run, or where --output says."""
    folder = options.output or environment.HERE
    partial = options.quick or (options.only is not None and not options.update)
    if partial and options.output is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "results.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    if not options.quick:
        docs = options.output or environment.ROOT / "docs"
        command = [python, "-m", "benchmarks.report", str(path.resolve()), str(docs.resolve())]
        subprocess.run(command, cwd=environment.ROOT, check=True)


if __name__ == "__main__":
    sys.exit(main())
