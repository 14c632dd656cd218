"""What bases cost over a whole run: the optimizer's time beside that of as many plain steps.

    python -m benchmarks.overhead [--workloads digits-vit,molecules-gnn] [--data PATH] [--seeds 1]

Every workload at its own length, EShampoo with its defaults. A plain step is one in which no basis
was computed; CPU seconds of one thread.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

from eshampoo.lab.catalogue import setting, workload
from eshampoo.lab.optimizers import Option
from eshampoo.lab.run.runlog import FILE_NAME, Log, read_log
from eshampoo.lab.run.training import train

from .command import command_line

WORKLOADS = "digits-vit,imagewoof-vit,imagewoof-convnext,molecules-gnn,mri-unet,text-llama"


def trained(
    name: str,
    options: Mapping[str, Option],
    data: Path | None,
    seed: int,
    steps: int | None = None,
) -> Log:
    """The log of EShampoo on a workload."""
    run = workload(name).run("eshampoo", options, seed=seed, steps=steps)
    with tempfile.TemporaryDirectory() as folder:
        train(run, setting(run).data(data), Path(folder))
        return read_log(Path(folder) / FILE_NAME)


def overhead(log: Log) -> float:
    """Seconds of all steps over those that plain steps would have taken."""
    seconds = log.cpu_times["cpu_optimizer"]
    plain = np.diff(log.computations, prepend=0) == 0
    return float(seconds.mean() / seconds[plain].mean())


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row per workload."""
    parser = command_line("overhead", __doc__)
    parser.add_argument("--workloads", default=WORKLOADS, help="by commas")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, help="instead of the workload's own")
    o = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name in o.workloads.split(","):
        logs = [trained(name, {}, o.data, seed, o.steps) for seed in range(o.seeds)]
        ratio = fmean(overhead(log) for log in logs)
        bases = fmean(float(log.computations[-1]) for log in logs)
        print(
            f"{name:<20} {logs[0].run.steps:>5} steps {bases:>6.0f} bases {ratio:>6.2f}", flush=True
        )


if __name__ == "__main__":
    main()
