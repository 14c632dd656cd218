"""What one bucket does in one step: the phases in order, on parts that fit a cache.

A bucket whose bases may change at this step goes through `observe`, waits for the criteria of the
whole model, and then through `finish`; any other takes its whole step in `advance`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import phases
from .bucket import Bucket
from .options import Options

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
    grad: Tensor | None = None  # [N, …]: G̃ while the criteria are being read
    live: Tensor | None = None  # [N]
    verdicts: Tensor | None = None  # [N]: what other ranks say of element-wise blocks
    updates: Tensor | None = None  # [N, …]: for other ranks, if the bucket has an exchange
    moving: Tensor | None = None  # [N]
    done: int = 0  # blocks whose update is there
    posted: bool = False  # the updates are on their way

    @property
    def place(self) -> tuple[Any, ...]:
        """Tasks that agree in this can add up norms: ranks, device and dtype."""
        step, exchange = self.bucket.stacks.step, self.bucket.exchange
        return (None if exchange is None else exchange.place, step.device, step.dtype)

    @property
    def exchange(self) -> "Exchange":
        assert self.bucket.exchange is not None
        return self.bucket.exchange

    def keep_(self, start: int, stop: int, U: Tensor, moving: Tensor) -> None:
        """Keep updates until they are posted."""
        s = self.bucket.stacks
        if self.updates is None or self.moving is None:
            self.updates = torch.empty_like(s.exp_avg)
            self.moving = torch.empty_like(s.step, dtype=torch.bool)
        self.updates[start:stop] = U
        self.moving[start:stop] = moving
        self.done += stop - start

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
    start: int
    stop: int
    U: Tensor  # [n, …]
    moving: Tensor  # [n]
    norms: Tensor  # [2, n]: ‖U_graft‖², ‖U‖²

    def owners(self, numbers: Mapping[Tensor, int]) -> Tensor:
        """The number of each block's parameter."""
        blocks = self.task.bucket.blocks[self.start : self.stop]
        return torch.tensor([numbers[b.parameter] for b in blocks], device=self.U.device)

    def graft_(self, norms: Tensor) -> None:
        """U ← U ‖U_graft‖ / ‖U‖ with the given norms (Eq. grafting), then the parameters move."""
        ratio = torch.where(norms[1] > 0, norms[0] / norms[1], torch.zeros_like(norms[0])).sqrt()
        self.U.mul_(phases.per_block(ratio, self.U))
        _apply_(self.task, self.start, self.stop, self.U, self.moving)


def _parts(task: Task) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Gradient and `live` of each part of a bucket in which any block has a gradient."""
    bucket, o = task.bucket, task.options
    if bucket.exchange is not None:
        arrived = torch.empty_like(bucket.stacks.exp_avg)
        there = bucket.exchange.receive(arrived)
    for start, stop in bucket.parts():
        here = task.present[start:stop]
        if not any(here):
            continue
        if bucket.exchange is None:
            G = bucket.gather(start, stop, task.present)
            # Nothing is copied to the device in the common case.
            everyone = torch.ones(stop - start, dtype=torch.bool, device=G.device)
            present = everyone if all(here) else torch.tensor(here, device=G.device)
            if task.verdicts is not None:  # what is wrong on another rank is wrong here
                verdicts = task.verdicts[start:stop]
                present &= verdicts != 2
                G.masked_fill_(phases.per_block(verdicts == 1, G), torch.nan)
        else:
            G, present = arrived[start:stop], there[start:stop]
        if o.maximize:
            G.neg_()
        s = bucket.stacks.narrow(start, stop)
        live = phases.admit_(s, G, present, o)
        if task.clock[start] % phases.SETTLE_EVERY == 0:
            phases.settle_(s, live)
        yield start, stop, G, live


def observe(task: Task) -> None:
    """First half of a step at which bases may change: G̃ is kept until they are known."""
    bucket = task.bucket
    task.grad = torch.empty_like(bucket.stacks.exp_avg)
    task.live = torch.zeros_like(bucket.stacks.step, dtype=torch.bool)
    for start, stop, G, live in _parts(task):
        s = bucket.stacks.narrow(start, stop)
        task.grad[start:stop] = phases.observe_(s, G, live, task.options, bucket.method)
        task.live[start:stop] = live


def finish(task: Task) -> Iterator[Update]:
    """Second half of a step at which bases may change."""
    assert task.grad is not None
    assert task.live is not None
    for start, stop in task.bucket.parts():
        if any(task.present[start:stop]):
            yield from _update(task, start, stop, task.grad[start:stop], task.live[start:stop])
    task.grad = task.live = None


def advance(task: Task) -> Iterator[Update]:
    """The whole step of a bucket, with the bases that it has."""
    bucket = task.bucket
    for start, stop, G, live in _parts(task):
        s = bucket.stacks.narrow(start, stop)
        G = phases.observe_(s, G, live, task.options, bucket.method)
        yield from _update(task, start, stop, G, live)


def _update(task: Task, start: int, stop: int, G: Tensor, live: Tensor) -> Iterator[Update]:
    """Momentum, scale, direction and parameters; what must wait for other blocks is yielded."""
    bucket, o, method = task.bucket, task.options, task.bucket.method
    s = bucket.stacks.narrow(start, stop)
    moving = live & (s.step >= 1)  # a delayed method only observes its first gradient
    U = phases.direction(s, G, moving, o, method)
    if method.rotated or o.graft is None:
        _apply_(task, start, stop, U, moving)
        return
    # Without a basis yet, the grafting method takes the step alone.
    graft = phases.graft_direction(s, G, moving, o)
    checked = [bucket.checked(slot) for slot in range(start, stop)]
    if not any(checked):
        U = graft
    elif not all(checked):
        U = torch.where(phases.per_block(torch.tensor(checked, device=U.device), U), U, graft)
    norms = torch.stack([phases.squared_norms(graft), phases.squared_norms(U)])
    update = Update(task, start, stop, U, moving, norms)
    if _grafts_parameters(task):
        yield update
    else:
        update.graft_(norms)


def _apply_(task: Task, start: int, stop: int, U: Tensor, moving: Tensor) -> None:
    """W ← W − α (U + λW) for the blocks that move (decay after the update if bias_in_step)."""
    bucket, o = task.bucket, task.options
    if bucket.method.bias_in_step and o.weight_decay != 0:
        U.mul_(1 - o.lr * o.weight_decay)
    pace = phases.per_block(moving.to(U.dtype), U) * -o.lr
    if bucket.exchange is not None:  # the ranks that hold the parameter see to its decay
        task.keep_(start, stop, U.mul_(pace), moving)
        return
    weights, updates = bucket.weights_and_rows(U, start, task.present)
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
