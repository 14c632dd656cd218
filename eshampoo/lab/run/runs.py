"""A run: the plain data that define a training curve."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from eshampoo.lab.optimizers import OPTIMIZERS, Option

Scale = Literal["tiny", "small", "paper"]
SCALES: tuple[Scale, ...] = get_args(Scale)


@dataclass(frozen=True)
class Run:
    """Workload, scale, optimizer and options, seed, length: equal runs give equal curves."""

    workload: str
    scale: Scale
    optimizer: str
    options: Mapping[str, Option]
    seed: int
    steps: int
    evaluations: int | None = None  # of the metric; None: as many as the setting has

    @property
    def name(self) -> str:
        """Return a name that identifies the run: ``eshampoo,frequency=10,lr=0.001,seed=0``."""
        options = [f"{key}={written(self.options[key])}" for key in sorted(self.options)]
        if self.evaluations is not None:
            options.append(f"evaluations={self.evaluations}")
        return ",".join([self.optimizer, *options, f"steps={self.steps}", f"seed={self.seed}"])

    @property
    def place(self) -> Path:
        """Return the place of the run in a directory of runs."""
        return Path(f"{self.workload}-{self.scale}") / self.name

    @property
    def rate(self) -> float:
        """Return the learning rate."""
        return float(str(self.options["lr"]))

    def record(self) -> dict[str, Any]:
        """Return the run as JSON data."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def typed(option: Option) -> str:
    """Write an option as it is typed on the command line, with the nine digits that logs keep."""
    if isinstance(option, tuple):
        return ",".join(f"{part:.9g}" for part in option)
    return f"{option:.9g}" if isinstance(option, float) else str(option).lower()


def written(option: Option) -> str:
    """Write an option for a file name, where commas separate options."""
    return typed(option).replace(",", "_")


def label(run: Run, others: Sequence[Run]) -> str:
    """Return the optimizer's name, with the options in which runs of the same optimizer differ."""
    namesakes = [other for other in others if other.optimizer == run.optimizer]
    keys = sorted({key for other in namesakes for key in other.options})
    told = [key for key in keys if len({repr(other.options.get(key)) for other in namesakes}) > 1]
    # a log may come from a version with other optimizers
    known = OPTIMIZERS.get(run.optimizer)
    name = run.optimizer if known is None else known.__name__
    return " ".join([name, *(f"{key}={written(run.options.get(key))}" for key in told)])


def run_from_record(record: Mapping[str, Any]) -> Run:
    """Read what ``Run.record`` wrote."""
    options = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in record["options"].items()
    }
    return Run(**{**record, "options": options})
