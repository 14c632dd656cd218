"""Train missing runs, each in a process of its own."""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from eshampoo.lab.errors import UserError
from eshampoo.lab.run.checkpoint import discard_checkpoints
from eshampoo.lab.run.runlog import FILE_NAME, read_log
from eshampoo.lab.run.runs import Run, typed

POLL = 0.2  # seconds between looks at the running jobs


def run_command(run: Run, place: Path, threads: int, known: argparse.Namespace) -> list[str]:
    """Return the command that trains one run in a process of its own."""
    words = [sys.executable, "-m", "eshampoo.lab", "train", run.workload, "--resume"]
    words += ["--optimizer", run.optimizer, "--scale", run.scale, "--seed", str(run.seed)]
    words += ["--steps", str(run.steps), "--threads", str(threads), "--out", str(place)]
    words += [f"--data={known.data}"] if known.data is not None else []
    words += ["--device", known.device] if known.device != "cpu" else []
    words += [f"--evaluations={run.evaluations}"] if run.evaluations is not None else []
    return words + [f"--{key}={typed(option)}" for key, option in run.options.items()]


def run_all(missing: dict[Path, Run], known: argparse.Namespace, console: Console) -> bool:
    """Train runs in parallel processes; return False when interrupted, raise when one failed."""
    # parallel runs have one thread each, so that their CPU seconds are comparable on any machine
    threads = known.threads or (1 if known.jobs > 1 else os.cpu_count() or 1)
    waiting = list(missing)
    active: dict[Path, subprocess.Popen[str]] = {}
    failures: list[str] = []
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), *columns, console=console) as progress:
        task = progress.add_task("runs", total=len(missing))
        try:
            while waiting or active:
                while waiting and len(active) < known.jobs:
                    place = waiting.pop(0)
                    words = run_command(missing[place], place, threads, known)
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
    """Start a run, and keep only its errors of what it prints."""
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def stop(jobs: Sequence[subprocess.Popen[str]]) -> None:
    """Ask the runs to save and end, and wait for them."""
    for job in jobs:
        job.terminate()
    for job in jobs:
        job.communicate()


def outcome(job: subprocess.Popen[str], place: Path, console: Console) -> list[str]:
    """Print the result of a run, or return the last line of its errors if it failed."""
    complaint = job.communicate()[1].strip()
    if job.returncode != 0:
        return [complaint.splitlines()[-1] if complaint else f"exit code {job.returncode}"]
    discard_checkpoints(place)
    end = read_log(place / FILE_NAME).end or {}
    loss = end.get("final_loss")
    text = "diverged" if loss is None else f"loss {loss:.4f}"
    console.print(f"{place.name}: {text}, {end.get('seconds', 0):.0f} s", highlight=False)
    return []
