"""README's table, from the logs in results/: `python docs/readme_table.py` writes it again.

EShampoo has its default and AdamW's learning rate; the others have the best rate of their search.
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
START, END = "<!-- table: python docs/readme_table.py -->\n", "<!-- end of table -->\n"


def losses(logs: list[Log]) -> list[float]:
    """The final losses; a run that diverged counts as infinite."""
    ends = [log.end["final_loss"] for log in logs if log.end is not None]
    return [math.inf if loss is None else float(loss) for loss in ends]


def pairs(workload: str, steps: int) -> dict[str, list[list[Log]]]:
    """The runs of each optimizer with both seeds and shared options, by optimizer."""
    path = ROOT / "results" / f"{workload}-small.jsonl.gz"
    found: dict[str, dict[str, list[Log]]] = {}
    betas = "text" if workload.startswith("text") else (0.9, 0.999)
    for name, records in read_results(path).items():
        log = log_of(records, path, "")
        run = log.run
        fits = betas == "text" or tuple(run.options.get("betas", betas)) == betas
        default = run.options.get("rms") == "auto" and "factors" not in run.options
        wanted = default if run.optimizer == "eshampoo" else fits
        frequency = run.options.get("frequency", 10)
        wanted = wanted and (run.optimizer not in ("soap", "klshampoo") or frequency == 10)
        if run.seed in (0, 1) and run.steps == steps and wanted and log.finished:
            key = name.rpartition(",seed=")[0]
            found.setdefault(run.optimizer, {}).setdefault(key, []).append(log)
    return {
        optimizer: [logs for logs in groups.values() if len(logs) == 2]
        for optimizer, groups in found.items()
    }


def way(logs: list[Log], target: float) -> tuple[float, float]:
    """Steps to the target, and their cost in gradients; means over the seeds that reach it."""
    ways = []
    for log in logs:
        steps = first_reached(log, target)[0]
        assert log.end is not None
        if math.isfinite(steps):
            ways.append((steps, steps / (1 - float(log.end["cpu_optimizer_share"]))))
    return fmean(steps for steps, _ in ways), fmean(cost for _, cost in ways)


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
    whole = steps * fmean(1 / (1 - float(log.end["cpu_optimizer_share"])) for log in adamw)
    for name, logs in (("adamw", adamw), ("eshampoo", ours)):
        reached, cost = way(logs, numbers["adamw"])
        numbers[f"{name} steps"], numbers[f"{name} time"] = reached / steps, cost / whole
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
