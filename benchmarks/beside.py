"""Is a refactoring as fast as before? Steps of EShampoo in two checkouts, side by side.

    python -m benchmarks.beside OTHER_CHECKOUT [--only vit_64,vit_192,vit_s]

For every model and both checkouts a process takes plain steps, steps that only check, and steps
that refresh every basis, in blocks that alternate as A B B A, so that the noise of the machine hits
both. A ratio is the median step of this checkout over that of the other one within one alternation.
Several pairs of processes, because milliseconds depend on where a process happens to lie in memory.

On a machine that others use too, set OMP_WAIT_POLICY=PASSIVE: a thread that spins until the others
have come keeps them from the processor, and steps take ten times as long.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

from . import shapes
from .environment import HERE, ROOT
from .timing import quartiles

KINDS = ("plain", "check", "refresh")
BLOCK = 0.1
"""Seconds that a block of steps should take; at least one step, at most MOST."""
MOST = 20


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


@dataclass
class Times:
    """All steps of one kind on one model, alternation by alternation."""

    new: list[list[float]] = field(default_factory=list)  # seconds of every step of an alternation
    old: list[list[float]] = field(default_factory=list)
    pairs: list[int] = field(default_factory=list)  # the pair of processes of an alternation
    bases: tuple[int, int] = (0, 0)  # computed in all steps, new and old
    spent: float = 0.0  # seconds, with what is not timed

    def ratios(self, pair: int | None = None) -> list[float]:
        """New / old of every alternation, or of those of one pair of processes."""
        numbers = zip(self.new, self.old, self.pairs, strict=True)
        return [median(new) / median(old) for new, old, which in numbers if pair in (None, which)]

    def alternate_(self, children: Sequence[Child], kind: str, steps: int, pair: int) -> None:
        """A B B A, and B A A B the next time; the first child is the new one."""
        begin = time.perf_counter()
        seconds: tuple[list[float], list[float]] = ([], [])
        bases = list(self.bases)
        first = len(self.new) % 2
        for which in (first, 1 - first, 1 - first, first):
            found = children[which].ask({"kind": kind, "steps": steps})
            seconds[which].extend(found["seconds"])
            bases[which] += found["bases"]
        self.new.append(seconds[0])
        self.old.append(seconds[1])
        self.pairs.append(pair)
        self.bases = (bases[0], bases[1])
        self.spent += time.perf_counter() - begin


def measure(name: str, trees: Sequence[Path], options: argparse.Namespace) -> dict[str, Times]:
    """All kinds of steps on one model, each for about the same time; at least one alternation."""
    found = {kind: Times() for kind in KINDS}
    work = {"shapes": shapes.named(name), "threads": options.threads}
    for pair in range(options.pairs):
        with ExitStack() as stack:
            children = [stack.enter_context(Child(tree, work)) for tree in trees]
            # The first step of a kind is slow and says only how many make a block.
            first = {
                kind: min(child.ask({"kind": kind, "steps": 1})["seconds"][0] for child in children)
                for kind in KINDS
            }
            steps = {kind: min(max(round(BLOCK / first[kind]), 1), MOST) for kind in KINDS}
            begin = time.perf_counter()
            while (
                waiting := [kind for kind in KINDS if pair not in found[kind].pairs]
            ) or time.perf_counter() - begin < options.seconds:
                kind = min(waiting or KINDS, key=lambda kind: found[kind].spent)
                found[kind].alternate_(children, kind, steps[kind], pair)
    return found


def line(name: str, kind: str, times: Times) -> str:
    """One row of the table."""
    low, middle, high = quartiles(times.ratios())
    new, old = list(chain(*times.new)), list(chain(*times.old))
    pairs = [f"{median(times.ratios(pair)):.3f}" for pair in sorted(set(times.pairs))]
    return (
        f"{name:<9} {kind:<8} {1e3 * median(new):>8.2f} {1e3 * median(old):>8.2f} {middle:>8.3f}   "
        f"{low:.3f} … {high:.3f} {min(new) / min(old):>8.3f} {len(times.pairs):>13}   "
        f"{' '.join(pairs)}"
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.beside",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("other", type=Path, help="another checkout of the repository")
    parser.add_argument("--only", default="vit_64,vit_192,vit_s", help="models, by commas")
    parser.add_argument("--seconds", type=float, default=20.0, help="per model and pair")
    parser.add_argument("--pairs", type=int, default=3, help="pairs of processes per model")
    parser.add_argument("--threads", type=int, default=2)
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
        f"{'fastest':>8} {'alternations':>13}   by pair of processes"
    )
    for name in options.only.split(","):
        for kind, times in measure(name, trees, options).items():
            print(line(name, kind, times), flush=True)
            new, old = times.bases
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
