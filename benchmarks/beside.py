"""Is a refactoring as fast as before? Steps of EShampoo in two checkouts, side by side.

    python -m benchmarks.beside OTHER_CHECKOUT [--only vit_64,vit_192,vit_s]

For every model and both checkouts a process takes plain steps, steps that only check, and steps
that refresh every basis, in blocks that alternate as A B B A, so that the noise of the machine hits
both. A ratio is the median step of this checkout over that of the other one within one alternation.
Several pairs of processes, because milliseconds depend on where a process happens to lie in memory.

On a machine that others use too, set OMP_WAIT_POLICY=PASSIVE: a thread that spins until the others
have come keeps them from the processor, and a step can take many times as long. CPU seconds
depend less on what else runs, but they too need many alternations. With --count there is no noise:
equal numbers of operations on equal shapes take equal time but for the Python between them.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, NamedTuple

from . import shapes
from .command import command_line
from .environment import HERE, ROOT
from .timing import quartiles

KINDS = ("plain", "check", "refresh")
BLOCK = 0.1
"""Seconds that a block of steps should take; at least one step, at most MOST."""
MOST = 20
ENOUGH = 6
"""Alternations from which on their quartiles say something about the noise."""


class Child:
    """A process that takes steps with the library of one source tree."""

    def __init__(self, tree: Path, work: Mapping[str, object]) -> None:
        self.tree = tree
        paths = [str(tree), *filter(None, [os.environ.get("PYTHONPATH")])]
        # Safe path: the folder of the script, benchmarks/, does not come before the tree.
        variables = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "beside_steps.py")],
            env=os.environ | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        source = Path(self.ask(work)["source"])
        if not source.is_relative_to(tree):
            self.__exit__(None, None, None)
            raise SystemExit(f"{source} was imported, not the library in {tree}: is it complete?")

    def ask(self, request: Mapping[str, object]) -> dict[str, Any]:
        """Send one line, wait for the line that answers it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError) as error:
            raise SystemExit(f"the process of {self.tree} ended; see its error above") from error
        return answer

    def __enter__(self) -> "Child":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """The process ends with its input."""
        self.process.communicate()


Sides = tuple[list[float], list[float]]
"""Seconds of every step: those of the new checkout, those of the old one."""


class Alternation(NamedTuple):
    """Blocks A B B A of one kind of step."""

    pair: int  # the pair of processes that it ran in
    wall: Sides
    cpu: Sides
    bases: tuple[int, int]  # computed in all steps, new and old

    @classmethod
    def run(
        cls, children: Sequence[Child], kind: str, steps: int, pair: int, first: int
    ) -> "Alternation":
        """Begin and end with child `first`; child 0 is the new one."""
        wall: Sides = ([], [])
        cpu: Sides = ([], [])
        bases = [0, 0]
        for which in (first, 1 - first, 1 - first, first):
            found = children[which].ask({"kind": kind, "steps": steps})
            wall[which].extend(found["wall"])
            cpu[which].extend(found["cpu"])
            bases[which] += found["bases"]
        return cls(pair, wall, cpu, (bases[0], bases[1]))


Times = list[Alternation]


def measure(name: str, trees: Sequence[Path], options: argparse.Namespace) -> dict[str, Times]:
    """All kinds of steps on one model, each for about the same time; at least one alternation."""
    times: dict[str, Times] = {kind: [] for kind in KINDS}
    spent = dict.fromkeys(KINDS, 0.0)
    work = {"shapes": shapes.named(name), "threads": options.threads}
    for pair in range(options.pairs):
        with ExitStack() as stack:
            children = [stack.enter_context(Child(tree, work)) for tree in trees]
            # The first step of a kind is slow and says only how many make a block.
            seconds = {
                kind: min(child.ask({"kind": kind, "steps": 1})["wall"][0] for child in children)
                for kind in KINDS
            }
            end = time.perf_counter() + options.seconds
            waiting = list(KINDS)
            while waiting or time.perf_counter() < end:
                kind = waiting.pop(0) if waiting else min(KINDS, key=lambda kind: spent[kind])
                steps = min(max(round(BLOCK / seconds[kind]), 1), MOST)
                begin = time.perf_counter()
                first = len(times[kind]) % 2  # A B B A, then B A A B
                times[kind].append(Alternation.run(children, kind, steps, pair, first))
                spent[kind] += time.perf_counter() - begin
    return times


def operations(name: str, trees: Sequence[Path], threads: int) -> dict[str, list[int]]:
    """How many operations each kind of step takes, new and old; no clock is involved."""
    work = {"shapes": shapes.named(name), "threads": threads}
    counts: dict[str, list[int]] = {kind: [] for kind in KINDS}
    for tree in trees:
        with Child(tree, work) as child:
            child.ask({"kind": "plain", "steps": 1})  # the first step has more to do
            for kind in KINDS:
                counts[kind].append(child.ask({"kind": kind})["operations"])
    return counts


def ratios(sides: Iterable[Sides]) -> list[float]:
    """New / old of alternations, each of the median step.

    >>> ratios([([1.0, 3.0], [4.0, 4.0]), ([3.0, 3.0], [1.0, 3.0])])
    [0.5, 1.5]
    """
    return [median(new) / median(old) for new, old in sides]


def line(name: str, kind: str, times: Times) -> str:
    """One row of the table."""
    new, old = (median(chain(*(a.wall[side] for a in times))) for side in (0, 1))
    low, middle, high = quartiles(ratios(a.wall for a in times))
    spread = f"{low:.3f} … {high:.3f}" if len(times) >= ENOUGH else "too few"
    cpu = median(ratios(a.cpu for a in times))
    pairs = [
        f"{median(ratios(a.wall for a in times if a.pair == pair)):.3f}"
        for pair in sorted({a.pair for a in times})
    ]
    return (
        f"{name:<9} {kind:<8} {1e3 * new:>8.2f} {1e3 * old:>8.2f} {middle:>8.3f}   "
        f"{spread:<13} {cpu:>8.3f} {len(times):>13}   {' '.join(pairs)}"
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = command_line("beside", __doc__)
    parser.add_argument("other", type=Path, help="another checkout of the repository")
    parser.add_argument("--only", default="vit_64,vit_192,vit_s", help="models, by commas")
    parser.add_argument("--seconds", type=float, default=20.0, help="per model and pair")
    parser.add_argument("--pairs", type=int, default=3, help="pairs of processes per model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--count", action="store_true", help="count operations instead of seconds")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Measure and print new / old."""
    options = parse(arguments)
    trees = [ROOT, options.other.resolve()]
    if not (trees[1] / "eshampoo").is_dir():
        raise SystemExit(f"{options.other} has no eshampoo/; name a checkout of the repository")
    begin = time.perf_counter()
    print(
        f"{'model':<9} {'step':<8} {'new ms':>8} {'old ms':>8} {'new/old':>8}   {'quartiles':<13} "
        f"{'CPU':>8} {'alternations':>13}   by pair of processes"
    )
    for name in options.only.split(","):
        if options.count:
            for kind, (new, old) in operations(name, trees, options.threads).items():
                print(
                    f"{name:<9} {kind:<8} {new:>8} {old:>8} operations, without views", flush=True
                )
            continue
        for kind, times in measure(name, trees, options).items():
            print(line(name, kind, times), flush=True)
            new, old = (sum(a.bases[side] for a in times) for side in (0, 1))
            if new != old:
                print(
                    f"  not the same work: {new} bases computed here, {old} in the other checkout"
                )
    print(
        f"{time.perf_counter() - begin:.0f} s, {options.threads} threads, "
        f"load {os.getloadavg()[0]:.1f} at the end"
    )


if __name__ == "__main__":
    main()
