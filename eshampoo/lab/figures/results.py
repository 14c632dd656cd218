"""The results in the repository: one compressed file of logs for each workload and scale.

A file holds the compact logs of its runs one after another, sorted by the names of the runs; each
log begins with its ``run`` record. Equal logs give equal bytes, with the same zlib.
"""

import gzip
import io
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from eshampoo.lab.errors import UserError
from eshampoo.lab.files import make_directory, write_atomic
from eshampoo.lab.run.runlog import CPU_TIMES, TIMES, Log, Record, encode, log_of, parse_records
from eshampoo.lab.run.runs import Run, run_from_record

POINTS, SAMPLES = 84, 20  # about how many step and basis records a compact log has
REMEDY = "the file is damaged, take it from the repository again"


def results_file(directory: Path, run: Run) -> Path:
    """Return the file in which a run's log belongs."""
    return directory / f"{run.workload}-{run.scale}.jsonl.gz"


def stored_logs(directory: Path, runs: Iterable[Run]) -> dict[Path, Log]:
    """Read the logs of the runs that are among the results, by the runs' places."""
    files: dict[Path, dict[str, list[Record]]] = {}
    logs = {}
    for run in runs:
        path = results_file(directory, run)
        if path not in files:
            files[path] = read_results(path)
        if run.name in files[path]:
            logs[run.place] = log_of(files[path][run.name], path, REMEDY)
    return logs


def add_results(directory: Path, logs: Iterable[tuple[Run, Sequence[Record]]]) -> list[Path]:
    """Add logs in their compact form, in place of those of equal runs, and return the files."""
    make_directory(directory)
    changed: dict[Path, dict[str, list[Record]]] = {}
    for run, records in logs:
        path = results_file(directory, run)
        if path not in changed:
            changed[path] = read_results(path)
        changed[path][run.name] = compact(records)
    for path, content in changed.items():
        write_results(path, content)
    return list(changed)


def read_results(path: Path) -> dict[str, list[Record]]:
    """Read the records of each run by its name; a file that does not exist has none."""
    if not path.exists():
        return {}
    try:
        lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the results {path}: {error}; {REMEDY}") from error
    logs: dict[str, list[Record]] = {}
    records: list[Record] = []
    for record in parse_records(lines, path, REMEDY):
        if record["kind"] == "run":
            records = logs.setdefault(run_from_record(record["run"]).name, [])
        records.append(record)
    return logs


def write_results(path: Path, logs: Mapping[str, Sequence[Record]]) -> None:
    """Write the logs sorted by name; neither a date nor a file name goes into the bytes."""
    text = "".join(f"{encode(record)}\n" for name in sorted(logs) for record in logs[name])
    buffer = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=buffer, mtime=0) as file:
        file.write(text.encode())
    write_atomic(path, buffer.getbuffer())


def compact(
    records: Sequence[Record], points: int = POINTS, samples: int = SAMPLES
) -> list[Record]:
    """Shorten a log to about ``points`` step records, with losses averaged and times summed.

    Of the ``basis`` records about ``samples`` are kept, the first and the last among them. A
    compact log stays as it is.
    """
    steps = [record for record in records if record["kind"] == "step"]
    basis = [record for record in records if record["kind"] == "basis"]
    ends = [record for record in records if record["kind"] == "end"]
    others = [record for record in records if record["kind"] not in ("step", "basis", "end")]
    stride = max(1, math.ceil((len(basis) - 1) / samples))  # the last record is kept in any case
    width = max(1, math.ceil(len(steps) / points))
    merged = [merge(steps[start : start + width]) for start in range(0, len(steps), width)]
    return [*others, *basis[:-1:stride], *basis[-1:], *merged, *ends]


def merge(steps: Sequence[Record]) -> Record:
    """Make one step record of several."""
    losses = [record["loss"] for record in steps if record["loss"] is not None]
    times = [name for name in (*TIMES, *CPU_TIMES) if all(name in record for record in steps)]
    return {
        "kind": "step",
        "step": steps[-1]["step"],
        "steps": sum(record.get("steps", 1) for record in steps),
        "loss": round(sum(losses) / len(losses), 5) if losses else None,
        "computations": steps[-1]["computations"],
        **{name: round(sum(record[name] for record in steps), 4) for name in times},
    }
