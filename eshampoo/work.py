"""What is done in one step: the phases in order, on parts that fit a cache.

Every part goes through `advance`. Where bases may change at this step it stops half-way, waits for
the criteria of the whole model, and goes on in `finish`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import phases
from .bucket import Bucket, Part, Wave
from .options import Options
from .phases import Weights

if TYPE_CHECKING:
    from .layout import Exchange


@dataclass
class Task:
    """What one bucket does in one step."""

    bucket: Bucket
    options: Options
    present: list[bool]  # which blocks have a gradient
    clock: list[int]  # t of each block after this step, as far as the host knows
    checks: dict[int, float]  # τ of the blocks for which t mod F = 0, as far as the host knows
    arrived: tuple[Tensor, Tensor] | None = None  # [N, …], [N]: gradients, and whether they exist
    observed: list[tuple[Part, Tensor, Weights]] = field(default_factory=list)  # with G̃; they wait
    verdicts: Tensor | None = None  # [N]: what other ranks say of element-wise blocks
    updates: Tensor | None = None  # [N, …]: for other ranks, if the bucket has an exchange
    moving: Tensor | None = None  # [N]
    done: int = 0  # blocks whose update is there
    posted: bool = False  # the updates are on their way

    @property
    def place(self) -> tuple[Any, ...]:
        """Tasks that agree in this can add up norms: ranks, device and dtype."""
        exchange = self.bucket.exchange
        return (None if exchange is None else exchange.place, *self.memory)

    @property
    def memory(self) -> tuple[torch.device, torch.dtype]:
        """Where the state is and what it consists of."""
        return self.bucket.stacks.step.device, self.bucket.stacks.step.dtype

    @property
    def exchange(self) -> "Exchange":
        assert self.bucket.exchange is not None
        return self.bucket.exchange

    @property
    def waits(self) -> bool:
        """Whether bases may change between the statistics and the update."""
        return bool(self.checks) and not self.bucket.method.delayed

    def complete(self, part: Part) -> bool:
        """Whether all blocks of a part have a gradient, and no other rank has a say in it."""
        here = self.present[part.start : part.stop]
        return self.arrived is None and self.verdicts is None and all(here)

    def receive(self) -> None:
        """Wait for the gradients from other ranks."""
        grads = torch.empty_like(self.bucket.stacks.exp_avg)
        self.arrived = grads, self.exchange.receive(grads)

    def gather(self, part: Part) -> tuple[Tensor, Tensor | None]:
        """The gradients of a part, and which blocks have one; None: all."""
        start, stop = part.start, part.stop
        present: Tensor | None = None
        if self.arrived is not None:
            grads, there = self.arrived
            G, present = grads[start:stop], there[start:stop]
        else:
            G = self._buffer(part)
            here = self.present[start:stop]
            part.gather_(G, here)
            if not all(here):  # otherwise nothing is copied to the device
                present = torch.tensor(here, device=G.device)
            if self.verdicts is not None:  # what is wrong on another rank is wrong here
                verdicts = self.verdicts[start:stop]
                fine = verdicts != 2
                present = fine if present is None else present & fine
                G.masked_fill_(phases.per_block(verdicts == 1, G), torch.nan)
        return G.neg_() if self.options.maximize else G, present

    def _buffer(self, part: Part) -> Tensor:
        """Memory for the gradients of a part.

        G̃ of all parts waits at a check. With F = 1 that is every step, so the memory stays: getting
        it anew costs a CPU 3 % of a step.
        """
        buffers = self.bucket.buffers
        if self.waits and self.options.frequency == 1:
            if part.start not in buffers:
                buffers[part.start] = torch.empty_like(part.stacks.exp_avg)
            return buffers[part.start]
        if self.waits:
            buffers.clear()
        return torch.empty_like(part.stacks.exp_avg)

    def keep_(self, part: Part, U: Tensor, moving: Tensor) -> None:
        """Keep updates until they are posted."""
        s = self.bucket.stacks
        if self.updates is None or self.moving is None:
            self.updates = torch.empty_like(s.exp_avg)
            self.moving = torch.empty_like(s.step, dtype=torch.bool)
        self.updates[part.start : part.stop] = U
        self.moving[part.start : part.stop] = moving.squeeze(1)
        self.done += part.stop - part.start

    def post(self) -> None:
        """Send the updates to the ranks that hold the parameters."""
        s = self.bucket.stacks
        if self.updates is None or self.moving is None:  # this rank owns no block of the bucket
            self.updates, self.moving = s.exp_avg, torch.empty_like(s.step, dtype=torch.bool)
        self.exchange.send(self.updates, self.moving)
        self.posted, self.updates = True, None


@dataclass
class Update:
    """Directions of some blocks of a bucket, and the squared norms that grafting compares."""

    task: Task
    part: Part
    U: Tensor  # [n, …]
    weights: Weights
    norms: Tensor  # [2, n]: ‖U_graft‖², ‖U‖²

    def owners(self, numbers: Mapping[Tensor, int]) -> Tensor:
        """The number of each block's parameter."""
        numbered = [numbers[block.parameter] for block in self.part.blocks]
        return torch.tensor(numbered, device=self.U.device)

    def graft_(self, norms: Tensor) -> None:
        """U ← U ‖U_graft‖ / ‖U‖ with the given norms (Eq. grafting), then the parameters move."""
        ratio = torch.where(norms[1] > 0, norms[0] / norms[1], torch.zeros_like(norms[0])).sqrt()
        self.U.mul_(phases.per_block(ratio, self.U))
        _apply_(self.task, self.part, self.U, self.weights)


def advance(wave: Wave, tasks: Mapping[Bucket, Task]) -> Iterator[Update]:
    """Gradients to statistics; where no basis can change before the update, all the rest too."""
    if wave.arriving is not None:
        tasks[wave.arriving].receive()
    work = [
        (tasks[part.bucket], part)
        for part in wave.parts
        if part.bucket in tasks and any(tasks[part.bucket].present[part.start : part.stop])
    ]
    complete = len(work) == len(wave.parts) and all(task.complete(part) for task, part in work)
    if len(wave.parts) > 1 and not complete:
        for _, part in work:
            yield from advance(part.alone(), tasks)
        return
    if not work:
        return
    task, part = work[0]
    method, o, optimal = task.bucket.method, task.options, part.stacks.exp_avg_sq is None
    gathered = [task.gather(part) for task, part in work]
    grads, present = [G for G, _ in gathered], gathered[0][1]  # None if there are several parts
    live = phases.admit_(wave.step, wave.skipped, grads, present, o)
    weights = phases.weigh(wave.step, live, o, method, optimal).split([len(G) for G in grads])
    for (task, part), G, w in zip(work, grads, weights, strict=True):
        if task.clock[part.start] % phases.SETTLE_EVERY == 0:
            phases.settle_(part.stacks, w.live)
        phases.observe_(part.stacks, G, w, o, method)
        if task.waits:
            task.observed.append((part, G, w))
        else:
            yield from _update(task, part, G, w)


def finish(task: Task) -> Iterator[Update]:
    """The rest of a step at which bases could change."""
    for part, G, w in task.observed:
        yield from _update(task, part, G, w)


def _update(task: Task, part: Part, G: Tensor, w: Weights) -> Iterator[Update]:
    """Momentum, scale, direction and parameters; what must wait for other blocks is yielded."""
    bucket, o, method = task.bucket, task.options, task.bucket.method
    s = part.stacks
    U = phases.direction(s, G, w, o, method)
    if method.rotated or o.graft is None:
        _apply_(task, part, U, w)
        return
    # Without a basis yet, the grafting method takes the step alone.
    graft = phases.graft_direction(s, G, w, o)
    checked = [bucket.checked(slot) for slot in range(part.start, part.stop)]
    if not any(checked):
        U = graft
    elif not all(checked):
        U = torch.where(phases.per_block(torch.tensor(checked, device=U.device), U), U, graft)
    norms = torch.stack([phases.squared_norms(graft), phases.squared_norms(U)])
    update = Update(task, part, U, w, norms)
    if _grafts_parameters(task):
        yield update
    else:
        update.graft_(norms)


def _apply_(task: Task, part: Part, U: Tensor, w: Weights) -> None:
    """W ← W − α (U + λW) for the blocks that move (decay after the update if bias_in_step)."""
    bucket, o = task.bucket, task.options
    if bucket.method.bias_in_step and o.weight_decay != 0:
        U.mul_(1 - o.lr * o.weight_decay)
    pace = phases.per_block(w.pace, U)
    if bucket.exchange is not None:  # the ranks that hold the parameter see to its decay
        task.keep_(part, U.mul_(pace), w.moving)
        return
    here = task.present[part.start : part.stop]
    weights = list(compress(part.cut([block.parameter for block in part.blocks]), here))
    updates = list(compress(part.rows(U), here))
    if o.weight_decay != 0:
        torch._foreach_add_(updates, weights, alpha=o.weight_decay)
    U.mul_(pace)
    torch._foreach_add_(weights, updates)


def post(shared: Sequence[Task], everything: bool = False) -> None:
    """Send finished updates on their way, in the order of the buckets, alike on all ranks."""
    for task in shared:
        if task.posted:
            continue
        # Grafting whole parameters needs a sum over ranks before anything can be sent.
        complete = task.done == len(task.bucket.blocks)
        if not everything and (not complete or not task.bucket.method.rotated):
            return
        task.post()


def _grafts_parameters(task: Task) -> bool:
    """Whether updates wait for the norms of other blocks of their parameter."""
    o, bucket = task.options, task.bucket
    grafts = not bucket.method.rotated and o.graft is not None
    return grafts and o.graft_scope == "parameter" and bucket.several


def graft_parameters(
    tasks: Sequence[Task], updates: Sequence[Update], params: Sequence[Tensor]
) -> None:
    """Graft with the norms of whole parameters, summed over their blocks, wherever they are."""
    grafted = [task for task in tasks if _grafts_parameters(task)]
    if not grafted:
        return
    numbers = {p: n for n, p in enumerate(params)}
    totals: dict[tuple[Any, ...], Tensor] = {}
    exchanges = {}
    for task in grafted:  # alike on all ranks, also where there is no update to add
        totals.setdefault(task.place, task.bucket.stacks.step.new_zeros(2, len(numbers)))
        exchanges[task.place] = task.bucket.exchange
    for update in updates:
        totals[update.task.place].index_add_(1, update.owners(numbers), update.norms)
    for place, exchange in exchanges.items():
        if exchange is not None:
            exchange.totals_(totals[place])
    for update in updates:
        update.graft_(totals[update.task.place][:, update.owners(numbers)])
