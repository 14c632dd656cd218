"""What a workload is: a model, a data set, a loss, a metric and three scales."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Generator, Tensor, nn

from eshampoo.lab.data import Batch, Dataset
from eshampoo.lab.optimizers import Option, keywords
from eshampoo.lab.run.runs import Run, Scale

# What a model starts from, where that is more than chance.
Start = Callable[[nn.Module, Dataset], nn.Module]


def options(lr: float, weight_decay: float, beta2: float = 0.999) -> Mapping[str, Option]:
    """Return the options that every optimizer of a setting shares, with ε as in the paper."""
    return {"lr": lr, "betas": (0.9, beta2), "eps": 1e-10, "weight_decay": weight_decay}


@dataclass(frozen=True)
class Setting:
    """One scale of a workload."""

    model: Callable[[int], nn.Module]  # builds the network for a number of outputs
    data: Callable[[Path | None], Dataset]
    steps: int
    batch: int
    options: Mapping[str, Option]  # of every optimizer that takes them
    # an optimizer's own keywords, which override those of every optimizer
    tuned: Mapping[str, Mapping[str, Option]] = field(default_factory=dict)
    warmup: float = 0.05  # share of the run, before a cosine to zero; the paper has 353 of 7,050
    clip: float | None = 1.0
    evaluations: int = 4
    threads: int | None = None  # None takes all cores; small matrices are not worth sharing
    start: Start | None = None

    def record(self) -> dict[str, Any]:
        """Return the setting as JSON data."""
        parts = {}
        for name, part in (("model", self.model), ("data", self.data), ("start", self.start)):
            if part is None:
                continue
            if not isinstance(part, partial):
                raise TypeError(f"the {name} of a setting must be a functools.partial")
            parts[name] = {"name": part.func.__name__, **part.keywords}
        return {**parts, "batch": self.batch, "warmup": self.warmup, "clip": self.clip}


@dataclass(frozen=True)
class Workload:
    """A model, its data, its loss and its metric."""

    name: str
    title: str
    origin: str
    locate: Callable[[Path | None], Path | None]  # raises an error if the data are missing
    loss: Callable[[nn.Module, Batch], Tensor]
    metric: Callable[[nn.Module, Iterable[Batch]], float]
    metric_name: str
    trivial: Callable[[Dataset], float]
    settings: Mapping[Scale, Setting]
    higher_is_better: bool = True
    # the loss with labels sampled from the model, for statistics="observe"
    sampled: Callable[[nn.Module, Batch, Generator], Tensor] | None = None

    def run(
        self,
        optimizer: str,
        options: Mapping[str, Option],
        *,
        scale: Scale = "small",
        seed: int = 0,
        steps: int | None = None,
        evaluations: int | None = None,
    ) -> Run:
        """Return a run with the workload's values, the optimizer's tuned ones and ``options``."""
        setting = self.settings[scale]
        taken = keywords(optimizer)
        shared = {key: value for key, value in setting.options.items() if key in taken}
        merged = {**shared, **setting.tuned.get(optimizer, {}), **options}
        return Run(self.name, scale, optimizer, merged, seed, steps or setting.steps, evaluations)
