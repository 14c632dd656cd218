"""Numbers that are kept in fewer bits than they are computed in.

A momentum that is rounded to the nearest bfloat16 stalls where a step changes it by less than half
of its last bit. Here, the nearer it is to its upper neighbour, the more often it is rounded up: the
16 bits to be dropped are compared with a threshold that runs evenly through all values, over the
entries of a block and over the steps. The threshold depends on the position and t alone, so ranks
and resumed runs agree.
"""

import torch
from torch import Tensor

# Steps of an additive recurrence modulo 2³², along a block and over time: together they fill the
# unit square evenly (powers of the root of x³ = x + 1). As signed numbers, which wrap.
ALONG, ONWARD = 0xC13FA9A9 - (1 << 32), 0x91E10DA5 - (1 << 32)


def average_rounded_(M: Tensor, value: Tensor, share: Tensor, t: Tensor, start: int = 0) -> Tensor:
    """M ← M + share · (value − M), rounded if M has fewer bits than `value`; returns it unrounded.

    M [N, c] holds the entries from `start` on of N blocks. A share of 0 keeps every bit of M.
    """
    if M.dtype == value.dtype:
        return M.lerp_(value, share)
    average = M.to(value.dtype).lerp_(value, share)
    if M.dtype == torch.bfloat16:
        bits = thresholds(t, start, M.shape[1]).add_(average.view(torch.int32))
        M.view(torch.int16).copy_(bits.bitwise_right_shift_(16))
    else:
        M.copy_(average)
    return average


def thresholds(t: Tensor, start: int, size: int) -> Tensor:
    """Thresholds below 2¹⁶ [N, size] for the entries from `start` on of blocks at step t."""
    k = torch.arange(start, start + size, dtype=torch.int32, device=t.device)
    numbers = (t.to(torch.int32) * ONWARD).unsqueeze(1) + k.mul_(ALONG)
    return numbers.bitwise_right_shift_(16).bitwise_and_(0xFFFF)
