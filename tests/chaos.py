"""Runs of the lab killed with SIGKILL at random moments, then resumed to the same end bit for bit.

    python tests/chaos.py [--kills 50] [--seed S]

Every run is the lab's own training loop on the digits in a process of its own, with a checkpoint
every few steps. It is killed at a random point, be it starting, training or writing, and then
resumed; some are killed several times. Its losses, basis computations, criteria and the two
checkpoints that it leaves must be those of a run that was left alone, in every bit.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from cases import assert_same

from eshampoo.lab.catalogue import setting, workload
from eshampoo.lab.data import Dataset
from eshampoo.lab.run.checkpoint import checkpoints, read_checkpoint
from eshampoo.lab.run.runlog import FILE_NAME, MEASURED, read_records
from eshampoo.lab.run.runs import Run
from eshampoo.lab.run.training import train

STEPS, EVERY = 48, 4
METHODS = ("eshampoo", "shampoo", "soap", "klshampoo")


def described(method: str) -> Run:
    options = {"frequency": 3, "merge_dims": False}
    return workload("digits-vit").run(method, options, scale="tiny", steps=STEPS)


def start(run: Run, data: Dataset, out: Path, resume: bool) -> int:
    """A process that trains; its number. It shares nothing with this one but what is on disk."""
    process = os.fork()
    if process == 0:
        try:
            train(run, data, out, resume=resume, checkpoint_every=EVERY)
            os._exit(0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
    return process


def kill(process: int, out: Path, step: int, seconds: float) -> int:
    """Kill a run a moment after its last checkpoint before some step; how it ended."""
    while step >= EVERY and not (out / f"checkpoint-{step // EVERY * EVERY:08d}.pt").exists():
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:  # it had come further before it was killed the last time, and is done
            return status
        time.sleep(1e-4)
    time.sleep(seconds * EVERY / STEPS)
    os.kill(process, signal.SIGKILL)
    return os.waitpid(process, 0)[1]


def finish(process: int) -> None:
    _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == 0, "the run failed"


def left_behind(out: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Everything that must be equal: the log without its times, and the checkpoints."""
    log = [
        {key: value for key, value in record.items() if key not in MEASURED}
        for record in read_records(out / FILE_NAME)
    ]
    files = {path.name: read_checkpoint(path) for path in checkpoints(out)}
    for state in files.values():
        del state["logging"]  # seconds
    return log, files


def trials(kills: int, methods: Sequence[str], seed: int, folder: Path) -> Iterator[str]:
    """Kill that often in all; what happened, run by run."""
    chance = random.Random(seed)
    whole = {}
    killed = 0
    while killed < kills:
        method = methods[killed % len(methods)]
        if method not in whole:
            run = described(method)
            data = setting(run).data(None)
            out = folder / method
            out.mkdir()
            begin = time.monotonic()
            finish(start(run, data, out, resume=False))
            whole[method] = run, data, left_behind(out), time.monotonic() - begin
        run, data, expected, seconds = whole[method]
        out = folder / "trial"
        out.mkdir()
        lives = []
        for life in range(min(chance.choice((1, 1, 1, 2, 3)), kills - killed)):
            process = start(run, data, out, resume=life > 0)
            status = kill(process, out, chance.randrange(STEPS), chance.random() * seconds)
            if os.waitstatus_to_exitcode(status) == -signal.SIGKILL:
                killed += 1
                newest = checkpoints(out)
                lives.append(newest[0].stem[-2:] if newest else "–")
        finish(start(run, data, out, resume=True))
        assert_same(expected, left_behind(out), f"{method}, killed after checkpoints {lives}")
        shutil.rmtree(out)
        yield f"{method}: killed with the newest checkpoint of step {', '.join(lives) or 'none'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 1_000_000)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{arguments.kills} kills, seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for line in trials(arguments.kills, arguments.methods, arguments.seed, Path(folder)):
            print(line, flush=True)
    print(f"{arguments.kills} kills: every run came to the same end, bit for bit", flush=True)


if __name__ == "__main__":
    main()
