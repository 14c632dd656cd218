"""Where does a null space begin? Training with other thresholds than 8 u λ_max, in float32.

    python -m benchmarks.claims.level [--workload digits-vit] [--data PATH] [--seeds 3] [--steps N]

Eigenvalues up to LEVEL · u · λ_max count as zero, and their columns stay near to the old ones
(`eshampoo/math/null_space.py`). 0 turns the rule off; a large threshold freezes directions that
matter. The final loss of EShampoo with its defaults for every threshold and seed.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from unittest.mock import patch

import torch

from eshampoo.lab.run.runlog import Log

from ..command import command_line
from ..overhead import trained

LEVELS = (0.0, 8.0, 64.0, 1024.0, 4096.0)


def final_loss(log: Log) -> float:
    """What a run came to."""
    assert log.end is not None
    return float(log.end["final_loss"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row per threshold."""
    parser = command_line("claims.level", __doc__)
    parser.add_argument("--workload", default="digits-vit")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int)
    o = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for level in LEVELS:
        with patch("eshampoo.math.solvers.LEVEL", level):
            logs = [trained(o.workload, {"lr": 3e-3}, o.data, n, o.steps) for n in range(o.seeds)]
        losses = [final_loss(log) for log in logs]
        shown = ", ".join(f"{loss:.4g}" for loss in losses)
        print(f"λ ≤ {level:>5g} u λ_max: {fmean(losses):.4g} ({shown})", flush=True)


if __name__ == "__main__":
    main()
