"""README's table, from the logs in results/: `python docs/readme_table.py` writes it again.

EShampoo has its default and AdamW's learning rate. The others have the best rate of their search,
and the better of the problem's β2 and 0.95 where both were run.
All numbers are means over seeds 0 and 1. Steps and time to AdamW's final loss are shares of AdamW's
whole run. Time counts gradients: a step costs 1/(1 − s) of them, where s is the optimizer's share
of the CPU time of the same run. So it does not depend on the machine or the hour of a run.
"""

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from eshampoo.lab.figures.results import read_results  # noqa: E402
from eshampoo.lab.report.compare import first_reached  # noqa: E402
from eshampoo.lab.run.runlog import Log, log_of  # noqa: E402

# The rate at which EShampoo ran: AdamW's best, on the molecules a rate that is level with it.
PROBLEMS = {
    "digits-vit": ("digits", 300, 3e-3),
    "imagewoof-vit": ("Imagewoof, ViT", 300, 1e-3),
    "imagewoof-convnext": ("Imagewoof, ConvNeXt", 150, 3e-3),
    "molecules-gnn": ("molecules", 150, 3e-2),
    "mri-unet": ("U-Net", 120, 1e-2),
    "text-char": ("characters", 500, 3e-3),
    "text-llama": ("WikiText-2", 120, 3e-3),
    "pinn-poisson": ("Poisson equation", 1000, 3e-2),
}
OTHERS = ("muon", "soap", "klshampoo")
BETA2 = {"text-char": 0.99, "text-llama": 0.95}  # of a problem, where it is not 0.999
START, END = "<!-- table: python docs/readme_table.py -->\n", "<!-- end of table -->\n"


def losses(logs: list[Log]) -> list[float]:
    """The final losses; a run that diverged counts as infinite."""
    ends = [log.end["final_loss"] for log in logs if log.end is not None]
    return [math.inf if loss is None else float(loss) for loss in ends]


def pairs(workload: str, steps: int) -> dict[str, list[list[Log]]]:
    """The runs of each optimizer with both seeds and shared options, by optimizer."""
    path = ROOT / "results" / f"{workload}-small.jsonl.gz"
    found: dict[str, dict[str, list[Log]]] = {}
    for name, records in read_results(path).items():
        log = log_of(records, path, "")
        run, options = log.run, log.run.options
        if run.optimizer == "eshampoo":
            wanted = options.get("rms") == "auto" and "factors" not in options
        else:
            betas = [(0.9, beta2) for beta2 in (BETA2.get(workload, 0.999), 0.95)]
            wanted = options.get("betas") in betas
            wanted = wanted and options.get("frequency", 10) == 10
        if wanted and run.seed in (0, 1) and run.steps == steps and log.finished:
            key = name.rpartition(",seed=")[0]
            found.setdefault(run.optimizer, {}).setdefault(key, []).append(log)
    return {
        optimizer: [logs for logs in groups.values() if len(logs) == 2]
        for optimizer, groups in found.items()
    }


def cost(log: Log) -> float:
    """What a step costs, in gradients."""
    assert log.end is not None
    return 1 / (1 - float(log.end["cpu_optimizer_share"]))


def way(logs: list[Log], target: float) -> tuple[float, float]:
    """Steps to the target, and their cost in gradients; means over the seeds that reach it."""
    steps = {log.run.seed: first_reached(log, target)[0] for log in logs}
    there = [log for log in logs if math.isfinite(steps[log.run.seed])]
    return (
        fmean(steps[log.run.seed] for log in there),
        fmean(steps[log.run.seed] * cost(log) for log in there),
    )


def row(workload: str) -> dict[str, float]:
    """The numbers of one problem."""
    _, steps, rate = PROBLEMS[workload]
    runs = pairs(workload, steps)
    best = {
        name: min(groups, key=lambda logs: fmean(losses(logs))) for name, groups in runs.items()
    }
    (ours,) = (logs for logs in runs["eshampoo"] if logs[0].run.options["lr"] == rate)
    adamw = best["adamw"]
    numbers = {name: fmean(losses(best[name])) for name in ("adamw", *OTHERS) if name in best}
    numbers["eshampoo"] = fmean(losses(ours))
    whole = steps * fmean(map(cost, adamw))
    for name, logs in (("adamw", adamw), ("eshampoo", ours)):
        reached, time = way(logs, numbers["adamw"])
        numbers[f"{name} steps"], numbers[f"{name} time"] = reached / steps, time / whole
    return numbers


def table(rows: Mapping[str, Mapping[str, float]]) -> str:
    """The rows in Markdown; the lowest loss is bold."""
    lines = [
        "| | AdamW | best of Muon, SOAP, KL-Shampoo | EShampoo | steps | time |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for workload, numbers in rows.items():
        best = min(numbers[name] for name in OTHERS if name in numbers)
        values = (numbers["adamw"], best, numbers["eshampoo"])
        digits = 4 if numbers["adamw"] > 1 else 3
        cells = [f"{value:.{digits}g}" for value in values]
        lowest = values.index(min(values))
        cells[lowest] = f"**{cells[lowest]}**"
        for kind in ("steps", "time"):
            cells.append(f"{numbers[f'eshampoo {kind}']:.2f} ({numbers[f'adamw {kind}']:.2f})")
        lines.append(f"| {PROBLEMS[workload][0]} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def written(readme: str, rows: Mapping[str, Mapping[str, float]]) -> str:
    """README with this table."""
    before, _, rest = readme.partition(START)
    return before + START + table(rows) + END + rest.partition(END)[2]


if __name__ == "__main__":
    path = ROOT / "README.md"
    rows = {workload: row(workload) for workload in PROBLEMS}
    print(table(rows))
    if START in path.read_text():
        path.write_text(written(path.read_text(), rows))
