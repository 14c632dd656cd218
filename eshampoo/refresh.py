"""New bases where they are due: all criteria first, one copy to the host, one solve per size."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import linalg, phases
from .bucket import Stacks, together
from .work import Task

REORTHONORMALIZE = 50
"""After so many changes Q is made orthonormal again: each adds about 1e-7 in float32."""


class Failure(NamedTuple):
    """A factor whose basis could not be computed too often in a row."""

    parameter: Tensor
    mode: int
    in_a_row: int


@dataclass
class Check:
    """One factor of the blocks of one bucket at a check."""

    task: Task
    mode: int
    factor: Tensor  # [N, d, d]: Λ̂
    initial: bool = False  # a delayed method's first basis: eigh, columns descending
    due: list[int] = field(default_factory=list)  # blocks whose basis is to be computed
    thresholds: list[float] = field(default_factory=list)  # τ of each
    rooted: list[int] = field(default_factory=list)  # blocks whose inverse root is computed anew

    @property
    def key(self) -> tuple[Any, ...]:
        """Factors that agree in this are solved together."""
        o = self.task.options
        d, dtype, device = self.factor.shape[1], self.factor.dtype, self.factor.device
        return (d, dtype, device, self.initial, o.solver, o.slots, o.refresh_to, o.qr_iterations)


def refresh_(tasks: Sequence[Task], every: Sequence[Task]) -> tuple[list[Failure], list[Tensor]]:
    """Recompute the bases whose criterion is above τ (Eq. criterion, Alg. 2 l.6).

    What failed too often, and the parameters of every task of the step whose gradients were skipped
    since the last time that the host read anything.
    """
    seen = [phases.seen_from_basis(task.bucket.stacks, task.bucket.method) for task in tasks]
    batches: dict[tuple[Any, ...], list[Check]] = defaultdict(list)
    checks: list[Check] = []
    read, skipped = _read(tasks, seen, every)
    for task, s, values in zip(tasks, seen, read, strict=True):
        for check in _plan(task, s.factors, *values):
            checks.append(check)
            if check.due:
                batches[check.key].append(check)
    failures = [failure for batch in batches.values() for failure in _solve_(batch)]
    for check in checks:
        if check.rooted and not check.task.bucket.method.rotated:
            _root_(check)
    return failures, skipped


def _read(
    tasks: Sequence[Task], seen: Sequence[Stacks], every: Sequence[Task]
) -> tuple[list[tuple[list[list[float]], list[float]]], list[Tensor]]:
    """Criteria [mode][block] and steps [block] of each task: one copy per device and dtype.

    The counts of skipped gradients travel in the same copies, also those of blocks without a basis.
    """
    off, diagonal, counts = (defaultdict[Any, list[Tensor]](list) for _ in range(3))
    for task, s in zip(tasks, seen, strict=True):
        off[task.memory] += [linalg.norm(view) for view in s.off_diagonals.values()]
        diagonal[task.memory] += [view.norm(dim=1) for view in s.diagonals.values()]
        counts[task.memory].append(s.step)
    counted = [task for task in every if task.memory in counts]
    for task in counted:
        counts[task.memory].append(task.bucket.stacks.skipped)
    values = {}
    for memory, parts in counts.items():
        shares = linalg.off_share(torch.cat(off[memory]), torch.cat(diagonal[memory]))
        values[memory] = iter(torch.cat([shares, *parts]).tolist())

    def take(task: Task) -> list[float]:
        return [next(values[task.memory]) for _ in task.bucket.blocks]

    criteria = [[take(task) for _ in s.factors] for task, s in zip(tasks, seen, strict=True)]
    read = list(zip(criteria, [take(task) for task in tasks], strict=True))
    found = []
    for task in counted:
        bucket, now_skipped = task.bucket, [int(count) for count in take(task)]
        pairs = zip(bucket.blocks, now_skipped, bucket.skipped, strict=True)
        found += [block.parameter for block, now, before in pairs if now > before]
        bucket.skipped = now_skipped
    return read, list(dict.fromkeys(found))


def _plan(
    task: Task, factors: dict[int, Tensor], criteria: list[list[float]], steps: list[float]
) -> list[Check]:
    """Decide which bases are due, and write it into the books."""
    bucket, o, books = task.bucket, task.options, task.bucket.books
    checks: dict[tuple[int, bool], Check] = {}
    for slot, tau in task.checks.items():
        t = int(steps[slot])
        if t != bucket.clock[slot]:  # gradients were skipped: the check comes later
            bucket.clock[slot] = t
            continue
        initial = t == 0
        for k, mode in enumerate(bucket.modes):
            check = checks.setdefault((mode, initial), Check(task, mode, factors[mode], initial))
            entry, value = bucket.entry(slot, mode), criteria[k][slot]
            due = initial or (tau < 1 and (value > tau or tau == 0))
            if due:
                check.due.append(slot)
                check.thresholds.append(tau)
            # A basis that holds at the first check is the first basis, with its eigenvalues.
            if due or o.eigenvalues == "fresh" or books.checks[entry] == 0:
                check.rooted.append(slot)
            books.checks[entry] += 1
            books.criterion[entry] = value
            if o.record:
                bucket.remember(entry, (t, value, due))
    return list(checks.values())


def _solve_(batch: Sequence[Check]) -> Iterator[Failure]:
    """Solve for the due factors of one size, some at a time, and change the bases found."""
    owners = [(check, slot) for check in batch for slot in check.due]
    thresholds = [tau for check in batch for tau in check.thresholds]
    factor, o = batch[0].factor, batch[0].task.options
    count = together(factor[0].numel() * factor.element_size(), factor.device)
    for start in range(0, len(owners), count):
        part = owners[start : start + count]
        factors = [check.factor[run] for check, run in _runs(part)]
        A = factors[0] if len(factors) == 1 else torch.cat(factors)
        if batch[0].initial:
            solution = linalg.eigh(A, descending=True)
        else:
            taus = thresholds[start : start + count]
            solution = linalg.solve(A, o.solver, o.slots, taus, o.refresh_to, o.qr_iterations)
        for change in solution.changes:
            done = 0
            for check, run in _runs([part[position] for position in change.which]):
                size = run.stop - run.start
                _change_(check, run, change.part(done, done + size))
                done += size
        for position in solution.failed:
            check, slot = part[position]
            bucket, failures = check.task.bucket, check.task.bucket.books.failures
            entry = bucket.entry(slot, check.mode)
            failures[entry] += 1
            if failures[entry] >= check.task.options.max_failures:
                yield Failure(bucket.blocks[slot].parameter, check.mode, failures[entry])


def _runs(owners: Sequence[tuple[Check, int]]) -> Iterator[tuple[Check, slice]]:
    """Blocks next to each other that belong to one check: their state can be seen as a view."""
    numbered = enumerate(owners)
    for _, run in groupby(numbered, key=lambda pair: (id(pair[1][0]), pair[1][1] - pair[0])):
        pairs = [owner for _, owner in run]
        yield pairs[0][0], slice(pairs[0][1], pairs[-1][1] + 1)


def _change_(check: Check, run: slice, change: linalg.Change) -> None:
    """Carry out Q ← QV for some blocks of a bucket."""
    task, bucket, mode = check.task, check.task.bucket, check.mode
    s, books = bucket.stacks.narrow(run.start, run.stop), bucket.books
    phases.change_basis_(s, mode, change, task.options, bucket.method)
    if not bucket.method.rotated:
        check.factor[run] = change.factor
    for part, G, _ in task.observed:  # the G̃ that wait for their basis move along
        start, stop = max(run.start, part.start), min(run.stop, part.stop)
        if start < stop and bucket.method.rotated:
            here = change.part(start - run.start, stop - run.start)
            inside = G[start - part.start : stop - part.start]
            phases.turn_(inside, mode, here.V, here.subset)
    worn = []
    for slot in range(run.start, run.stop):
        entry = bucket.entry(slot, mode)
        books.computations[entry] += 1
        books.work[entry] += change.V.shape[-1] ** 3
        books.failures[entry] = 0
        if books.computations[entry] % REORTHONORMALIZE == 0:
            worn.append(slot)
    if worn:
        Q = bucket.stacks.bases[mode]
        Q[worn] = linalg.orthonormalize(Q[worn])


def _root_(check: Check) -> None:
    """Inverse roots of the factors, from the basis and the diagonal of Λ̂ at this check."""
    bucket, slots, o = check.task.bucket, check.rooted, check.task.options
    s, order = bucket.stacks, len(bucket.modes)
    diagonal = phases.diagonal(check.factor[slots])
    eigenvalues = phases.spectrum(diagonal, s.step[slots], order, o)
    s.roots[check.mode][slots] = phases.root(s.bases[check.mode][slots], eigenvalues, order, o)
