"""A run on several ranks to which things happen, for as long as you like.

    python tests/soak.py [--minutes 60] [--seed S]

Runs of forty steps, sharded (FSDP2's placements) or with a process group, in turn with all methods;
some gradients have NaN. In most lives of a run something happens to one of its ranks: it is killed,
runs out of memory in a step, has other options than the rest, or reads a damaged state. All ranks
must then end by themselves, with the error that belongs to the fault. The run continues from its
last checkpoint on another number of ranks, and must end where one process ends that nothing
happened to, to 1e-9 in float64. The command ends with code 1 at the first thing that is wrong.
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "ranks"))

import lives
from worlds import RankError, Ranks

METHODS = ("EShampoo", "adaptive", "partial", "auto", "Shampoo", "KLShampoo", "CASPR", "Muon")
SIZES = (1, 2, 2, 2, 3)
LIMIT = 1e-9
# What the error of the ranks must say, on all of them or on the victim alone.
ON_ALL = {"other options": "lr of param group 0 is", "refused state": "has negative numbers"}
ON_ONE = {"killed": "ended with code -9", "out of memory": "MemoryError: out of memory"}


def chosen(chance, size, start):
    """A fault that can strike now, whom and when."""
    possible = ["none", "killed", "out of memory"]
    possible += ["other options"] * (size > 1) + ["refused state"] * (start > 0)
    at = chance.randint(start + 1, lives.STEPS)
    return chance.choice(possible), chance.randrange(size), at


def must_say(fault, size, text):
    """Refuse an end that does not belong to the fault."""
    answers = text.split("\nrank ")[1:]
    if any("hangs" in answer for answer in answers):
        raise SystemExit(f"a rank hangs after {fault!r}\n{text}")
    word, least = (ON_ALL.get(fault), size) if fault in ON_ALL else (ON_ONE.get(fault), 1)
    if word is None or sum(word in answer for answer in answers) < least:
        raise SystemExit(f"the ranks ended otherwise than {fault!r} would have it\n{text}")


def one_run(chance, worlds, method, folder, seen):
    """From the first step to the last, in as many lives as it takes; the largest difference."""
    sharded = chance.random() < 0.5
    story = []
    while True:
        start, size = lives.newest(folder), chance.choice(SIZES)
        fault, victim, at = chosen(chance, size, start)
        what = {"method": method, "sharded": sharded, "fault": fault, "victim": victim, "at": at}
        seen[fault] += 1
        seen["lives"] += 1
        story.append(f"{size}: {fault}" if fault != "none" else f"{size}")
        try:
            gap = worlds[size].run(lives.live, folder=folder, **what)
        except RankError as error:
            must_say(fault, size, str(error))
            continue
        if fault != "none":
            raise SystemExit(f"{fault!r} at step {at} of {method} left no trace: {story}")
        if not gap <= LIMIT:
            raise SystemExit(f"{method} ended {gap:.3g} from one process: {story}")
        kind = "sharded" if sharded else "process group"
        print(f"{method}, {kind}, ranks {', '.join(story)}: {gap:.1e}", flush=True)
        return gap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 1_000_000)
    arguments = parser.parse_args()
    print(f"soaking for {arguments.minutes:g} minutes, seed {arguments.seed}", flush=True)
    chance, seen, worst, runs = random.Random(arguments.seed), Counter(), 0.0, 0
    until = time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory() as folder:
        worlds = {size: Ranks(size, Path(folder), patience=300) for size in set(SIZES)}
        try:
            while runs == 0 or time.monotonic() < until:
                own = Path(folder) / f"run-{runs}"
                own.mkdir()
                method = METHODS[runs % len(METHODS)]
                worst = max(worst, one_run(chance, worlds, method, own, seen))
                runs += 1
        finally:
            for ranks in worlds.values():
                ranks.stop()
    faults = ", ".join(f"{seen[fault]} {fault}" for fault in lives.FAULTS[1:])
    print(f"{runs} runs in {seen['lives']} lives ({faults}): at most {worst:.1e} from one process")


if __name__ == "__main__":
    main()
