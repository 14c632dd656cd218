"""A run: the plain data that decide a training curve."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from eshampoo.lab.errors import UserError
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

    @property
    def name(self) -> str:
        """A directory name that tells runs apart: ``eshampoo,frequency=10,lr=0.001,seed=0``."""
        options = [f"{key}={written(self.options[key])}" for key in sorted(self.options)]
        return ",".join([self.optimizer, *options, f"steps={self.steps}", f"seed={self.seed}"])

    @property
    def place(self) -> Path:
        """Where the run lies in a directory of runs."""
        return Path(f"{self.workload}-{self.scale}") / self.name

    def record(self) -> dict[str, Any]:
        """The run as JSON data."""
        return asdict(self)


def typed(option: Option) -> str:
    """An option as it is typed on the command line."""
    if isinstance(option, tuple):
        return ",".join(f"{part:g}" for part in option)
    return f"{option:g}" if isinstance(option, float) else str(option).lower()


def written(option: Option) -> str:
    """An option in a file name, where commas separate options."""
    return typed(option).replace(",", "_")


def label(run: Run, others: Sequence[Run]) -> str:
    """The optimizer's name, with the options in which its namesakes differ."""
    namesakes = [other for other in others if other.optimizer == run.optimizer]
    keys = sorted({key for other in namesakes for key in other.options})
    told = [key for key in keys if len({repr(other.options.get(key)) for other in namesakes}) > 1]
    # a log may be of an optimizer that this version does not have
    known = OPTIMIZERS.get(run.optimizer)
    name = run.optimizer if known is None else known.__name__
    return " ".join([name, *(f"{key}={written(run.options.get(key))}" for key in told)])


def run_from_record(record: Mapping[str, Any]) -> Run:
    """The inverse of ``Run.record``."""
    try:
        options = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in record["options"].items()
        }
        fields = {key: record[key] for key in ("workload", "scale", "optimizer", "seed", "steps")}
        return Run(options=options, **fields)
    except (AttributeError, KeyError) as error:
        raise UserError(f"the run record of the log has no {error}; repeat that run") from error
