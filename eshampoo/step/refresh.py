"""New bases where they are due: all criteria first, one copy to the host, one solve per size."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from math import log, prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.linalg import vector_norm

from ..math.lean import pack, unpack
from ..math.linalg import off_norm, off_share, orthonormalize, rotate_mode, take
from ..math.solvers import Change, least_cost, solve
from ..options import Options
from ..state.blocks import blocks_at_once
from ..state.bucket import Bucket
from ..state.state import State
from ..torch_names import foreach_copy_
from ..validate import Failure
from .phases import inverse_root, product_rounding, spectrum
from .precision import guarded

if TYPE_CHECKING:
    from .step import Task

# After this many changes Q is made orthonormal again: each adds an error of up to 1e-6 in float32.
# Where Q is kept in fewer bits, one change adds as much as is tolerable, so Q is made orthonormal
# at every change, before it is rounded.
REORTHONORMALIZE = 8

# An error is raised after this many failed decompositions of a factor in a row.
MAX_FAILURES = 3

# From the first block that is due, criteria [mode][block] and steps [block].
Read = tuple[list[list[float]], list[float]]


@dataclass
class Check:
    """One factor of the blocks of one bucket at a check."""

    task: "Task"
    state: State  # with Λ̂ for factors
    mode: int
    initial: bool  # the first basis of a method that starts with one: eigh, columns descending
    due: dict[int, float] = field(default_factory=dict)  # blocks that get a new basis, and their τ
    renewed: list[int] = field(default_factory=list)  # blocks that get a new inverse root

    def entry(self, position: int) -> int:
        """The entry of this factor of a block in the counters."""
        modes = self.task.bucket.modes
        return position * len(modes) + modes.index(self.mode)

    @property
    def key(self) -> tuple[Any, ...]:
        """Factors that agree in this are solved together."""
        o, step = self.task.options, self.state.step
        d = self.task.bucket.shape[self.mode]
        return (d, step.dtype, step.device, self.initial, o.solver, o.qr_iterations)


@guarded((), {"highest"})
def refresh_(tasks: "Sequence[Task]") -> tuple[list[Failure], list[Tensor]]:
    """Recompute the bases whose criterion is above τ (Eq. criterion, Alg. 2 l.6).

    Returns which bases failed too often, and the parameters whose gradients were skipped since the
    host last read anything. Bases are products of all their changes, so all of this is in full
    precision.
    """
    due = [task for task in tasks if task.due]
    states, read, skipped = _read(due, [task.bucket for task in tasks])
    solved: dict[tuple[Any, ...], list[Check]] = defaultdict(list)
    checks: list[Check] = []
    for task, state, values in zip(due, states, read, strict=True):
        for check in _plan_(task, state, values):
            checks.append(check)
            if check.due:
                solved[check.key].append(check)
    failures = [failure for same in solved.values() for failure in _solve_(same)]
    for check in checks:
        if check.renewed and check.state.roots:
            _renew_root_(check)
    return failures, skipped


def _read(
    due: "Sequence[Task]", every: Sequence[Bucket]
) -> tuple[list[State], list[Read], list[Tensor]]:
    """States with Λ̂, and what is read of the blocks that are due: one copy per device and dtype.

    The counts of skipped gradients travel in the same copies, also those of blocks without a basis.
    """
    states = [task.bucket.state.in_basis() for task in due]
    runs = [(min(task.due), max(task.due) + 1) for task in due]
    some = [state.narrow(*run) for state, run in zip(states, runs, strict=True)]
    off, inside, counts = (defaultdict[Any, list[Tensor]](list) for _ in range(3))
    for task, state in zip(due, some, strict=True):
        memory = task.bucket.memory
        inside[memory] += [vector_norm(view, dim=1) for view in state.diagonals.values()]
        off[memory] += [off_norm(view) for view in state.off_diagonals.values()]
        counts[memory].append(state.step if state.observations is None else state.observations)
    counted = [bucket for bucket in every if bucket.memory in counts]
    for bucket in counted:
        counts[bucket.memory].append(bucket.state.skipped)
    values = {}
    for memory, tensors in counts.items():
        shares = off_share(torch.cat(off[memory]), torch.cat(inside[memory]))
        values[memory] = iter(torch.cat([shares, *tensors]).tolist())

    def take_numbers(s: State) -> list[float]:
        return list(islice(values[s.step.device, s.step.dtype], len(s.step)))

    criteria = [[take_numbers(state) for _ in state.factors] for state in some]
    read = list(zip(criteria, map(take_numbers, some), strict=True))
    skipped = []
    for bucket in counted:
        before, bucket.skipped = bucket.skipped, take_numbers(bucket.state)
        blocks = zip(bucket.blocks, bucket.skipped, before, strict=True)
        skipped += [block.parameter for block, now, then in blocks if now > then]
    return states, read, list(dict.fromkeys(skipped))


def _plan_(task: "Task", state: State, read: Read) -> list[Check]:
    """Decide which bases are due."""
    criteria, steps = read
    bucket, o, counters = task.bucket, task.options, task.bucket.counters
    clock, first = bucket.clocks[task.call], min(task.due)
    checks: dict[tuple[int, bool], Check] = {}
    for position, tau in task.due.items():
        t = int(steps[position - first])
        if t != clock[position]:  # gradients were skipped: the check comes later
            clock[position] = t
            continue
        initial = t == 0
        for k, mode in enumerate(bucket.modes):
            check = checks.setdefault((mode, initial), Check(task, state, mode, initial))
            entry, value = check.entry(position), criteria[k][position - first]
            wanted = initial or (tau < 1 and (value > tau or tau == 0))
            due = wanted and (o.budget is None or _has_credit(check, entry, o.budget, t))
            counters.waited[entry] += wanted - due
            if due:
                check.due[position] = tau
            # The first check gives a block its first root, even if it keeps Q = I as the basis.
            if due or o.eigenvalues == "fresh" or counters.checks[entry] == 0:
                check.renewed.append(position)
            counters.checks[entry] += 1
            counters.criterion[entry] = value
            if o.record:
                counters.history[entry].append((t, value, due))
    return list(checks.values())


def _has_credit(check: Check, entry: int, budget: float, t: int) -> bool:
    """Whether a factor may have another basis at step t.

        computations ≤ A(t) = (1 + ln νt)/ν   or   spent + cost ≤ budget · t · 3 d ∏d_i

    An average with infinite memory (β2 = 1) would be checked A(t) times by step t, and at every
    step while νt < 1. So many bases a factor may always have.
    A plain step rotates G, averages the factor, and rotates U back: 3 d ∏d_i multiply-adds on the
    side of size d. Work is counted per factor and not in seconds, so all ranks decide the same.
    """
    bucket, counters = check.task.bucket, check.task.bucket.counters
    novelty = check.task.options.novelty
    allowance = (1 + log(max(1.0, novelty * t))) / novelty
    if counters.computations[entry] + 1 <= allowance:
        return True
    d = bucket.shape[check.mode]
    cost = least_cost(check.task.options.solver, d, bucket.memory[0].type)
    return float(counters.spent[entry]) + cost <= budget * t * (3 * d * prod(bucket.shape))


def _solve_(same: Sequence[Check]) -> list[Failure]:
    """Solve for the due factors of one size, some at a time, and carry out the changes found."""
    members = [(check, position) for check in same for position in check.due]
    thresholds = [tau for check in same for tau in check.due.values()]
    o, step = same[0].task.options, same[0].state.step
    size = same[0].task.bucket.shape[same[0].mode] ** 2 * step.element_size()
    count = blocks_at_once(size, step.device) if len(members) > 1 else 1
    failures = []
    for start in range(0, len(members), count):
        some = members[start : start + count]
        stacks = [check.state.factors[check.mode][run] for check, run in _runs(some)]
        # Some groups may have a lean state and others not.
        stacks = [A if A.dim() == 3 else unpack(A) for A in stacks]
        A = stacks[0] if len(stacks) == 1 else torch.cat(stacks)
        solver, taus = "eigh" if same[0].initial else o.solver, thresholds[start : start + count]
        changes, failed = solve(A, solver, taus, o.qr_iterations, descending=same[0].initial)
        for change in changes:
            done = 0
            for check, run in _runs([some[number] for number in change.members]):
                size = run.stop - run.start
                _change_(check, run, _narrowed(change, done, done + size))
                done += size
        failures += [failure for number in failed for failure in _failed_(*some[number])]
    return failures


def _runs(members: Sequence[tuple[Check, int]]) -> Iterator[tuple[Check, slice]]:
    """Blocks next to each other that belong to one check: their state can be seen as a view."""
    numbered = enumerate(members)
    for _, run in groupby(numbered, key=lambda pair: (id(pair[1][0]), pair[1][1] - pair[0])):
        pairs = [member for _, member in run]
        yield pairs[0][0], slice(pairs[0][1], pairs[-1][1] + 1)


def _change_(check: Check, run: slice, change: Change) -> None:
    """Carry out Q ← QV for some blocks of a bucket.

    Everything that changes is computed first and then written by one operation, so that Q, Λ̂, M̃ and
    D fit together whatever raises an error on the way.
    """
    mode, counters = check.mode, check.task.bucket.counters
    state = check.state.narrow(run.start, run.stop)
    pairs = changed(state, mode, change, check.task.options)
    # The G̃ that wait for this basis turn along.
    for part in () if state.roots else check.task.waiting:
        start, stop = max(run.start, part.start), min(run.stop, part.stop)
        if start < stop:
            here = _narrowed(change, start - run.start, stop - run.start)
            G = part.G[start - part.start : stop - part.start]
            pairs.append((G, rotate_mode(G, mode, here.V, here.subset)))
    entries = [check.entry(position) for position in range(run.start, run.stop)]
    after = [counters.computations[entry] + 1 for entry in entries]
    every = 1 if check.state.lean else REORTHONORMALIZE
    worn = [number for number, count in enumerate(after) if count % every == 0]
    if worn:
        Q = pairs[0][1]
        Q[worn] = orthonormalize(Q[worn])
    foreach_copy_([target for target, _ in pairs], [value for _, value in pairs])
    for entry, cost in zip(entries, change.costs, strict=True):
        counters.spent[entry] += cost
        counters.computations[entry] += 1
        counters.work[entry] += change.V.shape[-1] ** 3
        counters.failures[entry] = 0


def changed(s: State, mode: int, change: Change, o: Options) -> list[tuple[Tensor, Tensor]]:
    """Q ← QV: the tensors of the state that change, and their new values; `s` has Λ̂ for factors.

    Q comes first. Nothing is written yet, so that one operation can write everything.
    """
    V, subset, D = change.V, change.subset, s.exp_avg_sq
    Q, factor = s.bases[mode], s.factors[mode]
    kept = change.factor if factor.dim() == 3 else pack(change.factor)
    pairs = [(Q, rotate_mode(Q.to(s.step.dtype), 1, V, subset))]
    pairs += [(s.has_basis, torch.ones_like(s.has_basis)), (factor, kept)]
    if not s.roots:
        M = s.exp_avg
        pairs.append((M, rotate_mode(M.to(s.step.dtype), mode, V, subset)))
    if s.full is not None:
        order = s.exp_avg.dim() - 1
        A = s.full.view(-1, *s.exp_avg.shape[1:], *s.exp_avg.shape[1:])
        pairs.append((A, rotate_mode(rotate_mode(A, mode, V, subset), order + mode, V, subset)))
    if D is None or D.shape[mode + 1] != s.exp_avg.shape[mode + 1]:  # a mean stays
        return pairs
    if o.correction == "basis_aware":
        # D ← V^{⊙2}ᵀ D: exact if the full matrix was diagonal in the old basis.
        pairs.append((D, rotate_mode(D, mode, V.square(), subset)))
    elif change.permutation is not None:
        pairs.append((D, take(D, change.permutation, mode)))
    return pairs


def _narrowed(change: Change, start: int, stop: int) -> Change:
    """The change for the members from `start` to `stop` only."""
    return Change(*(None if X is None else X[start:stop] for X in change))  # type: ignore[arg-type]


def _failed_(check: Check, position: int) -> list[Failure]:
    """Count a basis that failed; return the failure if it is one too many in a row."""
    bucket, entry = check.task.bucket, check.entry(position)
    failures = bucket.counters.failures
    failures[entry] += 1
    if failures[entry] < MAX_FAILURES:
        return []
    return [(bucket.blocks[position].parameter, check.mode, failures[entry])]


def _renew_root_(check: Check) -> None:
    """Inverse roots of the factors, from the basis and the diagonal of Λ̂ at this check."""
    s, mode, at, o = check.state, check.mode, check.renewed, check.task.options
    k, p = len(s.factors), check.task.bucket.method.exponent or o.exponent
    n = s.observations
    age = (s.step if n is None else torch.where(n > 0, n, s.step))[at].unsqueeze(1)
    eigenvalues = spectrum(s.diagonals[mode][at], age, k, o, product_rounding(s, o))
    root = inverse_root(s.bases[mode][at].to(s.step.dtype), eigenvalues, k, o, p)
    s.roots[mode][at] = pack(root) if s.lean else root
