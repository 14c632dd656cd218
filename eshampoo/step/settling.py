"""Averages whose gradients have stopped: zeroed before they become denormal, which is slow."""

from torch import Tensor, finfo

from ..math.linalg import along, diagonal, per_block
from ..state.state import State

# Steps between two looks for averages that are about to become denormal numbers.
SETTLE_EVERY = 64


def settle_(s: State, live: Tensor) -> None:
    """Zero averages that are on their way down to denormal numbers: their gradients have stopped.

    What stays needs 150 further steps to become denormal at β1 = 0.9, more than `SETTLE_EVERY`.
    Where squares are zeroed, the momentum is too, or it would be divided by ε alone.
    """
    M = s.exp_avg
    least = live.view(-1) * (2**24 * finfo(s.step.dtype).tiny)
    # Rounding can make a small eigenvalue negative, so it is the absolute value that counts.
    small = [x.abs() < least.view(-1, 1) for x in s.diagonals.values()]
    gone = [along(where, i, M.dim() - 1) for i, where in zip(s.diagonals, small, strict=True)]
    if s.full is not None:
        gone.append((diagonal(s.full).abs() < least.view(-1, 1)).view(M.shape))
    if s.exp_avg_sq is not None:
        gone.append(s.exp_avg_sq < per_block(least, M))
    for where in gone:
        M.masked_fill_(where, 0.0)
    for X in (M, s.exp_avg_sq, s.full, s.graft_sq, *s.factors.values()):
        if X is not None:
            X.masked_fill_(X.abs() < per_block(least, X), 0.0)
