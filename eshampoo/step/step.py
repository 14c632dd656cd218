"""One step of any method, for all parameters at once.

`take_step` is the whole step; an observation is a step in which nothing moves. One process and many
ranks go through the same lines: the route of a bucket is local, or an exchange with other ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..options import GraftScope, Options, Statistics
from ..state.bucket import Bucket
from ..state.route import Part
from ..torch_names import foreach_add_, foreach_copy_
from ..validate import Failure
from . import phases
from .refresh import refresh_


@dataclass
class Task:
    """What one bucket does in one step, known before anything changes."""

    bucket: Bucket
    call: Statistics  # step(), or observe(), in which nothing moves
    options: Options
    unfinished: list[Part]  # of those with blocks that may have a gradient
    clock: list[int]  # calls that each block has seen after this one, as far as the host knows
    due: dict[int, float]  # τ of the blocks that are checked at this t, as far as the host knows
    factors_see: bool  # whether the factors see the gradients
    graft: GraftScope | None  # what norms are taken over; None where nothing is grafted
    waiting: list[Part] = field(default_factory=list)  # parts that wait for their bases

    @property
    def key(self) -> tuple[Any, ...]:
        """Parts of tasks that agree in this have their coefficients computed together.

        Gradients from other ranks arrive bucket by bucket.
        """
        bucket, p = self.bucket, self.bucket.method.exponent or self.options.exponent
        alone = bucket.route.team is not None or bucket.state.observations is not None
        averaged = bucket.state.exp_avg_sq is not None
        return bucket.group, bucket.memory, averaged, p, bucket if alone else None

    def waits(self, part: Part) -> bool:
        """Whether the basis of a block may change between the statistics and the update."""
        before = self.bucket.method.refreshes == "before"
        return before and not self.due.keys().isdisjoint(range(part.start, part.stop))


def plan(call: Statistics, buckets: Sequence[Bucket], options: Sequence[Options]) -> list[Task]:
    """The tasks of a step or of an observation; nothing has changed yet."""
    tasks = []
    for bucket in buckets:
        o, observed = options[bucket.group], bucket.state.observations is not None
        if call == "observe" and not observed:
            continue
        present = bucket.route.present()
        clock = [t + now for t, now in zip(bucket.clocks[call], present, strict=True)]
        due = {}
        if bucket.modes and o.statistics == call:
            pairs = [(t, b.check_offset) for t, b in zip(clock, bucket.blocks, strict=True)]
            checked = {pair for pair in set(pairs) if o.checks_at(*pair)}
            at = [i for i, now in enumerate(present) if now and pairs[i] in checked]
            due = {i: o.threshold(clock[i]) if callable(o.tau) else o.tau for i in at}
        # A block that was checked has been observed, so its statistics ignore steps.
        ignored = call == "step" and observed and all(were_checked(bucket, 0, len(present)))
        scope = None if call == "observe" or o.graft is None else o.graft_scope
        scope = None if bucket.elementwise else scope if bucket.several else scope and "block"
        parts = [part for part in bucket.parts if any(present[part.start : part.stop])]
        tasks.append(Task(bucket, call, o, parts, clock, due, not ignored, scope))
    return tasks


def were_checked(bucket: Bucket, start: int, stop: int) -> list[bool]:
    """Which blocks have had their first check: until then, Shampoo's graft works alone."""
    k = len(bucket.modes)
    return [checks > 0 for checks in bucket.counters.checks[start * k : stop * k : k]]


def take_step(tasks: Sequence[Task]) -> tuple[list[Failure], list[Tensor]]:
    """Take one step; return which bases failed too often and whose gradients were skipped.

    Gradients leave for the ranks that work on them. Part by part, they are gathered, masked where
    they are not finite, and observed by the factors. A part whose basis stands still is updated at
    once: momentum and scale see the gradient, and the update is divided, rotated back, given its
    size and delivered. At a check, a part waits until the bases of all blocks have been refreshed;
    with grafting, until the norms of its whole parameter are known. Updates leave for the ranks
    that hold the parameters, in the order of the tasks, and arrive there.
    """
    for task in tasks:
        task.bucket.clocks[task.call] = task.clock
        task.bucket.route.send_gradients(vote=task.options.nonfinite == "skip")
    grafted = [task for task in tasks if task.graft == "parameter"]
    compared: list[tuple[Task, Part]] = []  # parts that wait for the norms of their parameters
    for batch in batches(tasks):
        admit_(batch)
        for task, part in batch:
            o, row = task.options, task.bucket.method
            phases.observe_(part.state, part.G, part.c, o, row, task.factors_see)
            if task.waits(part):
                task.waiting.append(part)
            else:
                update_(task, part, compared)
        for task in [] if grafted else tasks:  # all ranks send in this order
            if task.unfinished:
                break
            task.bucket.route.send_updates()
    outcome = refresh_(tasks) if any(task.due for task in tasks) else ([], [])
    for task in tasks:
        for part in task.waiting:
            update_(task, part, compared)
    if grafted:
        sum_over_parameters_(grafted, compared)
    for task, part in compared:
        phases.rescale_(part.G, part.norms)
        deliver_(task, part)
    for task in tasks:
        task.bucket.route.send_updates()
    for task in tasks:
        task.bucket.route.apply_updates_(task.options.rate * task.options.weight_decay)
    return outcome


def batches(tasks: Sequence[Task]) -> list[list[tuple[Task, Part]]]:
    """Parts with gradients, some at a time: what is known per block is computed once for them.

    Small operations take as long on one block as on a thousand. A batch stays in the cache.
    """
    joined: list[list[tuple[Task, Part]]] = []
    size, last = 0, None  # of the last batch: its bytes and its key
    for task in tasks:
        key = task.key
        for part in task.unfinished:
            if key != last or size + part.nbytes > task.bucket.room:
                joined.append([])
                size, last = 0, key
            joined[-1].append((task, part))
            size += part.nbytes
    return joined


def admit_(batch: Sequence[tuple[Task, Part]]) -> None:
    """Gather the gradients of a batch, leave out what is not finite, and count the call."""
    task = batch[0][0]
    o, observing = task.options, task.call == "observe"
    states, sizes = [part.state for _, part in batch], [part.stop - part.start for _, part in batch]
    present = gather_(batch)
    step, e = join([s.step for s in states]), join([s.norm_sq for s in states])
    live, skipped, norm = phases.mask_([part.G for _, part in batch], present, step, o)
    t = step if observing else step + live
    averaged = states[0].exp_avg_sq is not None
    counted = [s.observations for s in states if s.observations is not None]
    foreach_add_(counted if observing else [s.step for s in states], torch.split(live, sizes))
    n = join(counted) if counted else None  # such a bucket is in a batch by itself
    c, e = phases.coefficients(t, live, o, task.bucket.method, averaged, norm, e, n, observing)
    foreach_copy_([s.norm_sq for s in states], torch.split(e, sizes))
    for (task, part), its_c in zip(batch, c.split(sizes), strict=True):
        part.c = its_c
        if observing:
            phases.restart_statistics_(part.state, part.c.live)
        if task.graft is not None:
            phases.update_graft_moment_(part.state, part.G, part.c, o)
    if skipped is not None:
        foreach_add_([s.skipped for s in states], torch.split(skipped, sizes))


def gather_(batch: Sequence[tuple[Task, Part]]) -> Tensor | None:
    """Bring the gradients to their parts; which blocks have one [N], or None if all have."""
    masks = []
    for task, part in batch:
        part.G, mask = task.bucket.route.gather(part)
        masks.append(mask)
        if task.options.maximize:
            part.G.neg_()
    if all(mask is None for mask in masks):
        return None
    ones = [torch.ones(len(part.G), dtype=torch.bool, device=part.G.device) for _, part in batch]
    return join([one if mask is None else mask for mask, one in zip(masks, ones, strict=True)])


def join(stacks: list[Tensor]) -> Tensor:
    """Stacks of several parts as one."""
    return stacks[0] if len(stacks) == 1 else torch.cat(stacks)


def update_(task: Task, part: Part, compared: list[tuple[Task, Part]]) -> None:
    """Momentum and scale see the gradient, and the parameters move, or wait in `compared`."""
    s, G, o = part.state, part.G, task.options
    checked = were_checked(task.bucket, part.start, part.stop) if task.graft is not None else []
    part.G = phases.direction_(s, G, part.c, o, task.bucket.method)
    if task.graft is not None:
        part.G, part.norms = phases.compare(s, G, part.G, part.c, o, checked)
        if task.graft == "parameter":
            compared.append((task, part))
            return
        phases.rescale_(part.G, part.norms)
    elif o.rms is not None and task.bucket.modes:
        phases.set_size_(s, part.G, part.c, o)
    deliver_(task, part)


def deliver_(task: Task, part: Part) -> None:
    """W ← W − α (U + λW), here or on the ranks that hold W."""
    o = task.options
    if task.bucket.method.decay == "after" and o.weight_decay != 0:
        part.G.mul_(1 - o.rate * o.weight_decay)
    task.bucket.route.deliver_(part, o.weight_decay)
    task.unfinished.remove(part)
    del part.G, part.c


# -------------------------------------------------------------------- grafting over parameters


def sum_over_parameters_(tasks: "Sequence[Task]", compared: "Sequence[tuple[Task, Part]]") -> None:
    """Replace the norms [2, N] of blocks by the norms of the matrices that they are cut from.

    `tasks` are all tasks with grafting, the same on every rank, also on ranks with no norm to add.
    """
    places: dict[Any, list[Bucket]] = {}
    for task in tasks:
        bucket = task.bucket
        places.setdefault((bucket.route.team, *bucket.memory), []).append(bucket)
    for here in places.values():
        blocks = [block for bucket in here for block in bucket.route.blocks]
        matrices = dict.fromkeys((block.parameter, block.matrix) for block in blocks)
        numbers = {matrix: number for number, matrix in enumerate(matrices)}
        totals = here[0].state.step.new_zeros(2, len(numbers))
        parts = [part for task, part in compared if task.bucket in here]
        columns = [
            torch.tensor([numbers[b.parameter, b.matrix] for b in part.blocks]).to(totals.device)
            for part in parts
        ]
        for part, its_columns in zip(parts, columns, strict=True):
            totals.index_add_(1, its_columns, part.norms)
        if here[0].route.team is not None:
            here[0].route.team.add_up_(totals)
        for part, its_columns in zip(parts, columns, strict=True):
            part.norms = totals[:, its_columns]
