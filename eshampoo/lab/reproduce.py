"""``eshampoo reproduce``: run what is missing, then draw from the logs alone."""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from eshampoo.lab.catalogue import workload
from eshampoo.lab.checkpoint import discard_checkpoints
from eshampoo.lab.commands import finished
from eshampoo.lab.compare import Group
from eshampoo.lab.draw import draw, figure_table
from eshampoo.lab.errors import UserError
from eshampoo.lab.figures import FIGURES, Curve, Figure
from eshampoo.lab.files import make_directory, write_atomic
from eshampoo.lab.optimizers import check_options
from eshampoo.lab.runlog import FILE_NAME, compact, read_log
from eshampoo.lab.runs import Run, Scale, typed

POLL = 0.2  # seconds between looks at the running jobs


@dataclass(frozen=True)
class Point:
    """The runs of one curve of a panel at one learning rate, one per seed."""

    panel: int
    curve: Curve
    runs: tuple[Run, ...]


def scaled_frequency(frequency: int, steps: int, paper_steps: int) -> int:
    """F for a run of another length: the same share of the run, at least 1."""
    return max(1, round(frequency * steps / paper_steps))


def plan(figure: Figure, scale: Scale, seeds: int | None, steps: int | None) -> list[Point]:
    """Every run of a figure."""
    points = []
    for index, panel in enumerate(figure.panels):
        row = workload(panel.workload)
        length = steps or figure.steps.get(scale) or row.settings[scale].steps
        for curve in panel.curves:
            options = dict(curve.options)
            if curve.frequency is not None:
                paper = row.settings["paper"].steps
                options["frequency"] = scaled_frequency(curve.frequency, length, paper)
            check_options(curve.optimizer, options)
            for rate in curve.rates.get(scale, (None,)):
                chosen = options if rate is None else {**options, "lr": rate}
                runs = tuple(
                    row.run(curve.optimizer, chosen, scale=scale, seed=seed, steps=length)
                    for seed in range(seeds or (1 if scale == "tiny" else figure.seeds))
                )
                points.append(Point(index, curve, runs))
    return points


def run_directory(out: Path, run: Run) -> Path:
    """Where a run of any figure lies; figures share the runs that they have in common."""
    return out / "logs" / f"{run.workload}-{run.scale}" / run.name


def reproduce(known: argparse.Namespace, console: Console) -> int:
    """Run what is missing, draw the figure, write the table."""
    if known.figure not in FIGURES:
        names = ", ".join(FIGURES)
        raise UserError(f"unknown figure {known.figure!r}; choose one of: {names}")
    figure = FIGURES[known.figure]
    out = make_directory(known.out or Path("runs") / "figures")
    points = plan(figure, known.scale, known.seeds, known.steps)
    runs = {run_directory(out, run): run for point in points for run in point.runs}
    missing = {place: run for place, run in runs.items() if not finished(place)}
    console.print(
        f"{figure.name}: {len(runs)} runs, {len(runs) - len(missing)} of them finished before"
    )
    if missing:
        for run in missing.values():
            workload(run.workload).locate(known.data)
        if not run_all(missing, known, console):
            console.print("interrupted and saved; the same command continues")
            return 130
    groups = [
        (
            point.panel,
            point.curve,
            Group(
                point.curve.label,
                tuple(read_log(run_directory(out, run) / FILE_NAME) for run in point.runs),
            ),
        )
        for point in points
    ]
    command = f"eshampoo reproduce {figure.name} --scale {known.scale}"
    stem = f"{figure.name}-{known.scale}"
    targets = [out] if known.export is None else [out, make_directory(known.export)]
    for target in targets:
        write_atomic(target / f"{stem}.png", draw(figure, groups))
        write_atomic(target / f"{stem}.md", figure_table(figure, groups, command).encode())
        console.print(f"figure: {target / stem}.png, table: {target / stem}.md")
    if known.export is not None:
        for place, run in runs.items():
            compact(place / FILE_NAME, run_directory(known.export, run))
    return 0


def run_command(run: Run, place: Path, threads: int, data: Path | None) -> list[str]:
    """The command that trains one run in a process of its own."""
    words = [sys.executable, "-m", "eshampoo.lab", "train", run.workload, "--resume"]
    words += ["--optimizer", run.optimizer, "--scale", run.scale, "--seed", str(run.seed)]
    words += ["--steps", str(run.steps), "--threads", str(threads), "--out", str(place)]
    words += [f"--data={data}"] if data is not None else []
    return words + [f"--{key}={typed(option)}" for key, option in run.options.items()]


def run_all(missing: dict[Path, Run], known: argparse.Namespace, console: Console) -> bool:
    """Train runs in parallel processes; False when interrupted, an error when one failed."""
    threads = known.threads or max(1, (os.cpu_count() or 1) // known.jobs)
    waiting = list(missing)
    active: dict[Path, subprocess.Popen[str]] = {}
    failures: list[str] = []
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), *columns, console=console) as progress:
        task = progress.add_task("runs", total=len(missing))
        try:
            while waiting or active:
                while waiting and len(active) < known.jobs:
                    place = make_directory(waiting.pop(0))
                    words = run_command(missing[place], place, threads, known.data)
                    active[place] = start(words)
                time.sleep(POLL)
                for place in [place for place, job in active.items() if job.poll() is not None]:
                    job = active.pop(place)
                    failures += outcome(job, place, progress.console)
                    progress.advance(task)
        except KeyboardInterrupt:
            stop(list(active.values()))
            return False
    if failures:
        raise UserError(f"{len(failures)} runs failed, the first with: {failures[0]}")
    return True


def start(words: Sequence[str]) -> subprocess.Popen[str]:
    """Start a run; only its errors are of interest."""
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def stop(jobs: Sequence[subprocess.Popen[str]]) -> None:
    """Ask the runs to save and end, and wait for them."""
    for job in jobs:
        job.terminate()
    for job in jobs:
        job.communicate()


def outcome(job: subprocess.Popen[str], place: Path, console: Console) -> list[str]:
    """Tell how a run ended; its last line of complaint if it failed."""
    complaint = job.communicate()[1].strip()
    if job.returncode != 0:
        return [complaint.splitlines()[-1] if complaint else f"exit code {job.returncode}"]
    discard_checkpoints(place)
    end = read_log(place / FILE_NAME).end or {}
    loss = end.get("final_loss")
    text = "diverged" if loss is None else f"loss {loss:.4f}"
    console.print(f"{place.name}: {text}, {end.get('seconds', 0):.0f} s", highlight=False)
    return []
