"""One step of any method, for all parameters at once.

`take_step` is the whole step, and `take_in` is what remains of it if gradients are only observed.
One process and many ranks go through the same lines: the route of a bucket is local, or an exchange
with other ranks.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from ..math.at_once import at_once, call
from ..options import Statistics
from ..state.blocks import Move, Part
from ..state.bucket import Batch, Bucket
from .grafting import average_lent_, compare_, rescale_, sum_over_parameters_
from .nonfinite import admit_, believe_
from .phases import (
    Coefficients,
    begin_,
    coefficients,
    direction_,
    observe_,
    see_,
)
from .refresh import refresh_
from .settling import SETTLE_EVERY, settle_
from .task import Compared, Outcome, Task, Work

Take = Callable[[Sequence[Task], Sequence[Batch]], Outcome]

# The least ‖U‖ that `rms` scales to its full size. When gradients stop, M̃ and U fade by β1 a step;
# scaled up, U would go on at full size until M̃ underflows. Training shows 0.003 and more.
FADED = 1e-4


def or_uncount(take: Take) -> Take:
    """After an error, uncount the call for every block that did not reach its end."""

    @wraps(take)
    def taken(tasks: Sequence[Task], batches: Sequence[Batch]) -> Outcome:
        try:
            return take(tasks, batches)
        except BaseException:
            uncount_(tasks)
            raise

    return taken


@or_uncount
def take_step(tasks: Sequence[Task], batches: Sequence[Batch]) -> Outcome:
    """Take one step; return which bases failed too often and whose gradients were skipped."""
    by_bucket = {task.bucket: task for task in tasks}
    grafted = [task for task in tasks if task.graft == "parameter"]
    waiting: list[Work] = []  # for their bases
    compared: list[Compared] = []  # waiting for the norms of their parameters
    # Gradients leave for the ranks that work on them.
    for task in tasks:
        task.bucket.clocks["step"] = task.clock
        task.bucket.route.start()
    # Gradients are gathered, admitted and observed. Blocks whose basis stands still move at once.
    for batch in batches:
        for work in admit(batch, by_bucket):
            task, part, G, c = work
            observe_(part.state, G, c, task.options, task.statistic)
            if task.waits and not task.due.keys().isdisjoint(range(part.start, part.stop)):
                waiting.append(work)
            else:
                update_(work, compared)
        for task in tasks:  # finished updates leave, in this order on all ranks
            if grafted or not task.bucket.route.depart(unfinished=False):
                break
    # Bases are refreshed, and the blocks that waited for them move.
    due = [task for task in tasks if task.due]
    outcome = refresh_(due, tasks, waiting) if due else ([], [])
    for work in waiting:
        update_(work, compared)
    # Blocks that take the norm of their whole parameter move now.
    if grafted:
        sum_over_parameters_(grafted, compared)
    for (task, part, U, c), norms in compared:
        rescale_(U, norms)
        deliver_(task, part, U, c)
    # The other updates leave, and all arrive at the ranks that hold the parameters.
    for task in tasks:
        task.bucket.route.depart(unfinished=True)
    for task in tasks:
        task.bucket.route.arrive_(task.options.rate * task.options.weight_decay)
    return outcome


@or_uncount
def take_in(tasks: Sequence[Task], batches: Sequence[Batch]) -> Outcome:
    """Let the statistics see gradients, and move nothing; the outcome is that of `take_step`."""
    by_bucket = {task.bucket: task for task in tasks}
    for task in tasks:
        task.bucket.clocks["observe"] = task.clock
        task.bucket.route.start()
    seen = [work for batch in batches for work in admit(batch, by_bucket)]
    for task, part, G, c in seen:
        begin_(part.state, c.live)
        observe_(part.state, G, c, task.options, task.statistic)
    due = [task for task in tasks if task.due]
    outcome = refresh_(due, tasks, seen) if due else ([], [])
    for task, part, G, c in seen:
        see_(part.state, G, c, task.options)
        del task.begun[part]
    for task in tasks:
        task.bucket.route.rest()
    return outcome


# What each call of an optimizer does with the current gradients.
TAKE: Mapping[Statistics, Take] = {"step": take_step, "observe": take_in}


def admit(batch: Batch, tasks: Mapping[Bucket, Task]) -> list[Work]:
    """Gather the gradients of a batch, leave out what is not finite, and count the step."""
    here = [(tasks[bucket], part) for bucket, part in batch.parts if bucket in tasks]
    here = [(task, part) for task, part in here if any(task.present[part.start : part.stop])]
    if len(batch.parts) > 1 and not (
        len(here) == len(batch.parts)
        and all(task.verdicts is None and all(task.present) for task, _ in here)
        and len({task.bucket.method.exponent(task.options) for task, _ in here}) == 1
    ):  # what is known per block differs: one part at a time
        return [work for single in batch.alone() for work in admit(single, tasks)]
    if not here:
        return []
    o, method = here[0][0].options, here[0][0].bucket.method
    averaged = here[0][1].state.exp_avg_sq is not None
    gathered = [gather(task, part) for task, part in here]
    grads, masks = [G for G, _ in gathered], [mask for _, mask in gathered if mask is not None]
    present = torch.cat(masks) if masks else None  # of joined parts, all or none have one
    step, n = batch.step, batch.observations
    count = n if n is not None and here[0][0].call == "observe" else step
    live = admit_(count, batch.skipped, grads, present, o)
    p = method.exponent(o)
    t, seen = (count + live, n) if count is step else (step, count + live)
    age = t if seen is None else torch.where(seen > 0, seen, t)
    c = coefficients(t, live, o, method.moves, method.epsilon, averaged, p, age)
    if n is not None and count is step:  # once a block is observed, its statistics ignore steps
        unseen = (n == 0).unsqueeze(1)
        c = c._replace(share2=c.share2 * unseen, share3=c.share3 * unseen)
    each = zip(here, grads, c.split([len(G) for G in grads]), strict=True)
    admitted = [(task, part, G, its_c) for (task, part), G, its_c in each]
    for task, part, G, its_c in admitted:
        if task.clock[part.start] % SETTLE_EVERY == 0:
            settle_(part.state, its_c.live)
        if task.graft is not None:
            average_lent_(part.state, G, its_c, o)
    calls: list[partial[Any]] = [partial(count.add_, live)]
    calls += [partial(task.begun.__setitem__, part, c.live) for task, part, _, c in admitted]
    at_once(map(call, calls))
    return admitted


def gather(task: Task, part: Part) -> tuple[Tensor, Tensor | None]:
    """The gradients of a part, and which of its blocks have one; None: all."""
    o, run = task.options, slice(part.start, part.stop)
    # G̃ of all parts waits at a check. With F = 1 that is every step, so its memory stays.
    stays = task.waits and o.frequency == 1
    G, present = task.bucket.route.gather(part, task.present[run], stays)
    if task.verdicts is not None:
        present = believe_(G, present, task.verdicts[run])
    return G.neg_() if o.maximize else G, present


def update_(work: Work, compared: list[Compared]) -> None:
    """Update momentum, scale and parameters; `compared` collects what must wait for norms."""
    task, part, G, c = work
    method = task.bucket.method
    p = method.exponent(task.options)
    U = direction_(part.state, G, c, task.options, method.divide_, p)
    if task.graft is not None:
        U, norms = compare_(task, part, U, G, c)
        if task.graft == "parameter":
            compared.append(((task, part, U, c), norms))
            return
        rescale_(U, norms)
    elif task.options.rms is not None and not task.bucket.elementwise:
        fix_rms_(U, part.state.turned, task.options.rms, FADED * task.options.scale_free)
    deliver_(task, part, U, c)


def fix_rms_(U: Tensor, turned: Tensor, rms: float, faded: float) -> None:
    """U ← U · rms / RMS(U) per block whose basis has `turned`; ‖U‖ counts as at least `faded`."""
    U = U.view(len(U), -1)
    # ‖U‖ counts as 0 while Q = I, and U then keeps its size.
    norms = torch.linalg.vector_norm(U, dim=1, keepdim=True).mul_(turned.unsqueeze(1))
    ratio = norms.clamp_min(faded).reciprocal_().mul_(rms * math.sqrt(U.shape[1]))
    U.mul_(torch.where(norms > 0, ratio, 1.0))


def deliver_(task: Task, part: Part, U: Tensor, c: Coefficients) -> None:
    """W ← W − α (U + λW), here or on the ranks that hold W."""
    bucket, o, here = task.bucket, task.options, task.present[part.start : part.stop]
    if bucket.method.decay == "after" and o.weight_decay != 0:
        U.mul_(1 - o.rate * o.weight_decay)
    note = partial(task.begun.pop, part)
    bucket.route.deliver_(part, U, Move(c.pace, c.moving, here, o.weight_decay, note))


def uncount_(tasks: Sequence[Task]) -> None:
    """After an error, take the call off the counts of all blocks that did not reach its end."""
    for task in tasks:
        for part, live in task.begun.items():
            part.state.count(task.call).sub_(live.squeeze(1))
        counts = task.bucket.state.count(task.call)
        task.bucket.clocks[task.call] = [int(t) for t in counts.tolist()]
