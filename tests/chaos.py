"""Runs killed with SIGKILL at random moments, then resumed to the same end bit for bit.

    python tests/chaos.py [--kills 100] [--seed S]

Every run is a process of its own, with a checkpoint every few steps: in turn the lab's training
loop on the digits, and a plain loop with `torch.save` and a rename, as a user would write it. It is
killed at a random point, be it starting, training or writing, and then resumed; some are killed
several times. What it leaves must be what a run leaves that was left alone, in every bit: of the
lab losses, basis computations, criteria and two checkpoints, of the plain loop losses, parameters
and state.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import nn
from training import assert_same

from eshampoo.classes import CLASSES as ALL
from eshampoo.lab.catalogue import setting, workload
from eshampoo.lab.run.checkpoint import checkpoints, read_checkpoint
from eshampoo.lab.run.runlog import FILE_NAME, MEASURED, read_records
from eshampoo.lab.run.training import train

STEPS, EVERY = 48, 4
METHODS = ("eshampoo", "shampoo", "soap", "klshampoo")
CLASSES = {cls.__name__.lower(): cls for cls in ALL}
OPTIONS = {"frequency": 3, "merge_dims": False}

# Trains in a folder, from the start or from what is there; and what it leaves there.
Train = Callable[[Path, bool], None]
Left = Callable[[Path], object]


def in_the_lab(method: str) -> tuple[Train, Left]:
    """The lab's own training loop."""
    run = workload("digits-vit").run(method, OPTIONS, scale="tiny", steps=STEPS)
    data = setting(run).data(None)
    return (
        lambda out, resume: train(run, data, out, resume=resume, checkpoint_every=EVERY),
        left_by_the_lab,
    )


def in_a_plain_loop(method: str) -> tuple[Train, Left]:
    """A loop that a user might write."""
    return lambda out, resume: plain_loop(method, out), left_by_a_plain_loop


LOOPS = {"lab": in_the_lab, "plain": in_a_plain_loop}


def plain_loop(method: str, out: Path) -> None:
    """Fit a small network to noise, saving every few steps; continue from what was saved."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 10), nn.LayerNorm(10))
    optimizer = CLASSES[method](model.parameters(), **OPTIONS)
    losses: list[float] = []
    saved = checkpoints(out)
    if saved:
        state = torch.load(saved[0], weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        losses = state["losses"]
    for step in range(len(losses) + 1, STEPS + 1):
        generator = torch.Generator().manual_seed(step)
        x, y = (torch.randn(32, size, generator=generator) for size in (12, 10))
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "losses": losses}, out / "writing")
            (out / "writing").rename(out / f"checkpoint-{step:08d}.pt")


def left_by_a_plain_loop(out: Path) -> object:
    """Every file that it wrote since its beginning."""
    return {path.name: torch.load(path, weights_only=True) for path in checkpoints(out)}


def start(run: Train, out: Path, resume: bool) -> int:
    """A process that trains; its number. It shares nothing with this one but what is on disk."""
    process = os.fork()
    if process == 0:
        try:
            run(out, resume)
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


def left_by_the_lab(out: Path) -> object:
    """Everything that must be equal: the log without its times, and the checkpoints."""
    log = [
        {key: value for key, value in record.items() if key not in MEASURED}
        for record in read_records(out / FILE_NAME)
    ]
    files = {path.name: read_checkpoint(path) for path in checkpoints(out)}
    for state in files.values():
        del state["logging"]  # seconds
    return log, files


def trials(
    kills: int, loops: Sequence[str], methods: Sequence[str], seed: int, folder: Path
) -> Iterator[str]:
    """Kill that often in all; what happened, run by run."""
    chance = random.Random(seed)
    subjects = [(loop, method) for method in methods for loop in loops]
    whole = {}
    killed = trial = 0
    while killed < kills:
        subject = subjects[trial % len(subjects)]
        trial += 1
        if subject not in whole:
            run, left = LOOPS[subject[0]](subject[1])
            out = folder / "-".join(subject)
            out.mkdir()
            begin = time.monotonic()
            finish(start(run, out, resume=False))
            whole[subject] = run, left, left(out), time.monotonic() - begin
        run, left, expected, seconds = whole[subject]
        out = folder / "trial"
        out.mkdir()
        lives = []
        for life in range(min(chance.choice((1, 1, 1, 2, 3)), kills - killed)):
            process = start(run, out, resume=life > 0)
            status = kill(process, out, chance.randrange(STEPS), chance.random() * seconds)
            if os.waitstatus_to_exitcode(status) == -signal.SIGKILL:
                killed += 1
                newest = checkpoints(out)
                lives.append(newest[0].stem[-2:] if newest else "–")
        finish(start(run, out, resume=True))
        name = f"{subject[1]}, {subject[0]} loop"
        assert_same(expected, left(out), f"{name}, killed after checkpoints {lives}")
        shutil.rmtree(out)
        yield f"{name}: killed with the newest checkpoint of step {', '.join(lives) or 'none'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 1_000_000)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--loops", nargs="+", choices=[*LOOPS], default=[*LOOPS])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{arguments.kills} kills, seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        chosen = arguments.kills, arguments.loops, arguments.methods, arguments.seed
        for line in trials(*chosen, Path(folder)):
            print(line, flush=True)
    print(f"{arguments.kills} kills: every run came to the same end, bit for bit", flush=True)


if __name__ == "__main__":
    main()
