"""The JSONL log of a run: written whole and atomically, read back as arrays.

There is one record per line. Its ``kind`` says what it is:

    run         the run's data, its setting, layer kinds, command, versions, machine
    factors     parameter, shape, block, mode, size, kind and letter (L, R, A) of each factor
    step        loss; wall seconds for the data, forward and backward, optimizer; CPU seconds of
                the step and of the optimizer (not in older logs); basis computations
    basis       Σ|S|³ so far; per factor: checks, computations so far and the last criterion
    evaluation  the metric on the validation set
    end         the results of the run

The results of the repository are compact logs. These have fewer ``step`` records, each the mean or
sum over ``steps`` of them, and fewer ``basis`` records.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eshampoo.lab.errors import UserError
from eshampoo.lab.files import write_atomic
from eshampoo.lab.run.runs import Run, run_from_record

Record = Mapping[str, Any]
Array = NDArray[np.float64]

FILE_NAME = "log.jsonl"
TIMES = ("data", "forward_backward", "optimizer")  # the parts of a step, in wall seconds
CPU_TIMES = ("cpu", "cpu_optimizer")  # a whole step and its optimizer, in CPU seconds
# every field in which the logs of equal runs may differ
MEASURED = (
    *TIMES,
    *CPU_TIMES,
    "seconds",
    "optimizer_share",
    "cpu_seconds",
    "cpu_optimizer_share",
    "logging_share",
)


class RunLog:
    """Records in memory; ``save`` replaces the file, so a reader never sees half a line."""

    def __init__(self, directory: Path, records: Iterable[Record] = ()) -> None:
        self.path = directory / FILE_NAME
        self.lines = [encode(record) for record in records]

    def add(self, record: Record) -> None:
        """Append a record; ``save`` writes it."""
        self.lines.append(encode(record))

    def save(self) -> None:
        """Write all records."""
        write_atomic(self.path, ("\n".join(self.lines) + "\n").encode())


def encode(record: Record) -> str:
    """Write strict JSON on one line, with nine digits, which keep a float32 exactly."""
    return json.dumps(plain(record), separators=(",", ":"), allow_nan=False)


def plain(value: Any) -> Any:  # noqa: ANN401 - JSON data have no useful type
    """Return JSON data: floats to nine digits, those that are not finite as null."""
    if isinstance(value, float):
        return float(f"{value:.9g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


@dataclass(frozen=True)
class Factor:
    """One Kronecker factor: where it belongs and how large it is."""

    parameter: str
    kind: str
    letter: str
    block: int
    mode: int
    size: int


@dataclass(frozen=True)
class Log:
    """A log read back; arrays run over the ``step`` records, or over ``basis`` × factors."""

    path: Path
    header: Record
    run: Run
    step: Array
    loss: Array
    times: Mapping[str, Array]
    cpu_times: Mapping[str, Array]  # NaN in logs that are older than CPU seconds
    computations: Array
    evaluations: tuple[tuple[int, float], ...]
    factors: tuple[Factor, ...]
    basis_step: Array
    basis_work: Array
    basis_checks: Array
    basis_computations: Array
    basis_criterion: Array
    end: Record | None

    @property
    def seconds(self) -> Array:
        """Return the training time up to the end of each step, without evaluation and logging."""
        return np.asarray(np.cumsum(np.sum([self.times[name] for name in TIMES], axis=0)))

    @property
    def gradients(self) -> Array:
        """Return the CPU time up to the end of each step, in gradients of the same run.

        A gradient takes what a step does without its optimizer. So the time does not depend on how
        fast the machine was at that hour.
        """
        whole, update = (np.cumsum(self.cpu_times[name]) for name in CPU_TIMES)
        return np.asarray(self.step * whole / (whole - update))

    @property
    def processor(self) -> str:
        """Return the kind of processor that the run had."""
        return str(self.header["environment"]["processor"])

    @property
    def finished(self) -> bool:
        """Tell whether the run has finished."""
        return self.end is not None


def read_records(path: Path) -> list[Record]:
    """Read the records of a log, or say in one line what is wrong with it."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the log {path}: {error}; give a directory of runs") from error
    return parse_records(lines, path, repeat(path))


def repeat(path: Path) -> str:
    """Say what to do about a damaged log."""
    return f"the log is damaged, delete {path.parent} and repeat the run"


def parse_records(lines: Iterable[str], path: Path, remedy: str) -> list[Record]:
    """Read one record from each line; ``remedy`` ends the complaint about a damaged one."""
    records: list[Record] = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or "kind" not in record:
            raise UserError(f"{path}, line {number}: not a record of a run; {remedy}")
        records.append(record)
    return records


def read_log(path: Path) -> Log:
    """Read the log of a run."""
    return log_of(read_records(path), path, repeat(path))


def log_of(records: Iterable[Record], path: Path, remedy: str) -> Log:
    """Turn the records of one run into arrays; path and ``remedy`` are for complaints of damage."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record["kind"], []).append(record)
    try:
        header = groups["run"][0]
        steps, basis = groups.get("step", []), groups.get("basis", [])
        factors = groups.get("factors", [{"factors": []}])[0]["factors"]
        return Log(
            path=path,
            header=header,
            run=run_from_record(header["run"]),
            step=column(steps, "step"),
            loss=column(steps, "loss"),
            times={name: column(steps, name) for name in TIMES},
            # older logs lack them
            cpu_times={name: as_array([r.get(name) for r in steps], None) for name in CPU_TIMES},
            computations=column(steps, "computations"),
            evaluations=tuple(
                (record["step"], math.nan if record["metric"] is None else record["metric"])
                for record in groups.get("evaluation", [])
            ),
            factors=tuple(Factor(**factor) for factor in factors),
            basis_step=column(basis, "step"),
            basis_work=column(basis, "work"),
            basis_checks=column(basis, "checks", len(factors)),
            basis_computations=column(basis, "computations", len(factors)),
            basis_criterion=column(basis, "criterion", len(factors)),
            end=groups["end"][0] if "end" in groups else None,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: a record lacks or spoils {error}; {remedy}") from error


def column(records: Sequence[Record], key: str, width: int | None = None) -> Array:
    """Return one field of all records, NaN where it is null; ``width`` if it is a list."""
    return as_array([record[key] for record in records], width)


def as_array(values: Sequence[Any], width: int | None) -> Array:
    """Return values as an array; without any, it still has ``width`` columns."""
    if values:
        return np.array(values, dtype=np.float64)
    return np.zeros(0 if width is None else (0, width))


def find_logs(directory: Path) -> list[Log]:
    """Read all logs below a directory, in the order of their paths."""
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory; give one that holds runs")
    paths = sorted(directory.rglob(FILE_NAME))
    if not paths:
        raise UserError(f"no {FILE_NAME} below {directory}; give a directory that holds runs")
    return [read_log(path) for path in paths]


def finished(out: Path, run: Run) -> bool:
    """Tell whether ``run`` has finished in a directory; refuse a directory of another run."""
    path = out / FILE_NAME
    if not path.exists():
        return False
    log = read_log(path)
    refuse_another(out, log.header["run"], run)
    return log.finished


def refuse_another(out: Path, record: Record, run: Run) -> None:
    """Refuse the log of another run."""
    if plain(record) != plain(run.record()):
        raise UserError(
            f"{out} holds another run ({run_from_record(record).name}), not {run.name};"
            " give the same options or another --out"
        )


def refuse_other_data(out: Path, examples: int, here: int) -> None:
    """Refuse to go on with another number of training examples than a run was begun with."""
    if examples != here:
        raise UserError(
            f"{out} holds a run on {examples} training examples, and there are {here} here; give"
            " the same --data or another --out"
        )
