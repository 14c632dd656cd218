"""Learning-rate grafting: an update takes the norm of another method's (Eq. grafting).

Norms are taken per block or per parameter. Per parameter, they are summed over all its blocks, on
whichever rank a block is, before any of the blocks can move.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..math.linalg import average_, means, per_block
from ..options import Options
from ..state.blocks import Part
from ..state.bucket import Bucket
from ..state.state import State
from .phases import Coefficients, bias, floor, look_ahead, share
from .task import Compared, Task


def compare_(
    task: Task, part: Part, U: Tensor, G: Tensor, c: Coefficients
) -> tuple[Tensor, Tensor]:
    """The update, and the squared norms [2, N] of the grafting method's update and of this one.

    Before the first inverse roots, the grafting method takes the step alone.
    """
    graft = direction(part.state, G, c, task.options)
    if part.state.roots:
        U = where_based(task, part, U, graft)
    return U, torch.stack([squared_norms(graft), squared_norms(U)])


def where_based(task: Task, part: Part, U: Tensor, other: Tensor) -> Tensor:
    """U for the blocks of a part that have a basis, and `other` for blocks that wait for one."""
    checked = task.bucket.counters.checked
    based = [checked(position) for position in range(part.start, part.stop)]
    if all(based) or not any(based):  # nothing is copied to the device
        return U if all(based) else other
    return torch.where(per_block(torch.tensor(based, device=U.device), U), U, other)


def average_lent_(s: State, G: Tensor, c: Coefficients, o: Options) -> None:
    """The second moment of the grafting method sees G, before G is rotated."""
    moment = s.lent
    if moment is not None:
        beta = lent_beta(o)
        seen = means(G.square(), moment)
        average_(moment, seen, beta, per_block(share(beta, c.moving), G))


def lent_beta(o: Options) -> float:
    """β of the grafting method's second moment; 1 for AdaGrad's sum."""
    return 1.0 if o.graft == "adagrad" else o.betas[1]


def direction(s: State, G: Tensor, c: Coefficients, o: Options) -> Tensor:
    """The update of the grafting method, from the same momentum as the method's own.

    M that was rotated back has an error of about u‖M‖ in every entry, so its √D has a floor too.
    """
    M = s.momentum(lambda momentum: look_ahead(momentum, G, o))
    bias1 = per_block(c.bias1, s.exp_avg)
    if s.lent is None:
        return M / bias1
    t, root = s.step.clamp_min(1.0), s.lent.sqrt()
    least = floor(s, o, lent_beta(o)) if s.home == "eigenbasis" else None
    if least is not None:
        root = torch.maximum(root, per_block(least, root))
    correction = bias(o.betas[1], t) if o.graft == "adam" else torch.ones_like(t)
    return M / (bias1 * (root / per_block(correction.sqrt(), root) + o.least_eps))


def squared_norms(U: Tensor) -> Tensor:
    """‖U‖_F² per block."""
    return U.flatten(1).square().sum(1)


def rescale_(U: Tensor, norms: Tensor) -> None:
    """U ← U ‖U_graft‖ / ‖U‖ with the given squared norms [2, N]."""
    ratio = torch.where(norms[1] > 0, norms[0] / norms[1], torch.zeros_like(norms[0]))
    ratio = ratio.clamp_max(torch.finfo(ratio.dtype).max).sqrt()  # if ‖U‖² nearly vanishes
    U.mul_(per_block(ratio, U))


def sum_over_parameters_(tasks: Sequence[Task], compared: Sequence[Compared]) -> None:
    """Replace the norms [2, N] of blocks by the norms of their whole parameters.

    `tasks` are all tasks with grafting, the same on every rank, also on ranks with no norm to add.
    """
    places: dict[Any, list[Bucket]] = {}
    for task in tasks:
        bucket = task.bucket
        places.setdefault((bucket.route.team, *bucket.memory), []).append(bucket)
    for here in places.values():
        params = dict.fromkeys(p for bucket in here for p in bucket.parameters)
        numbers = {p: number for number, p in enumerate(params)}
        totals = here[0].state.step.new_zeros(2, len(numbers))
        summed = []
        for (task, part, _, _), norms in compared:
            if task.bucket in here:
                numbered = [numbers[block.parameter] for block in part.blocks]
                columns = torch.tensor(numbered, device=totals.device)
                totals.index_add_(1, columns, norms)
                summed.append((columns, norms))
        here[0].route.add_up_(totals)
        for columns, norms in summed:
            norms.copy_(totals[:, columns])
