"""When the criterion is evaluated: every F steps, or when enough of a factor's average is new.

Legend: a check at step s, the next one n steps later; β is β2, ν is the option `novelty`. A block
with the offset φ ∈ [0, 1) is checked ⌊φn⌋ steps earlier, so that checks are spread over the gap.
"""

import math
from bisect import bisect_left
from functools import lru_cache

# Up to this step, while averages change quickly, all blocks are checked at the same steps.
TOGETHER_UNTIL = 20


def is_new(beta: float, novelty: float, step: int, offset: float = 0.0) -> bool:
    """Whether there is a check: at t = 1, and when the share ν of an average is new since the last.

        ρ(s, t) = 1 − β^{t−s} (1 − β^s) / (1 − β^t) ≥ ν,      a sum (β = 1): ρ = 1 − s/t

    With n = t − s this is β^n (1 − νβ^s) ≤ 1 − ν. The steps depend on β and ν alone, so ranks and
    resumed runs agree on them without any state. If a method does not count its first gradient
    (t = 0), that gradient is a check too.

    >>> [t for t in range(1, 40) if is_new(0.999, 0.1, t)]
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 18, 20, 23, 26, 29, 33, 37]
    """
    if step <= 1:
        return True
    if novelty == 1 and beta > 0:  # something of the first gradient always remains
        return False
    steps = steps_so_far(beta, novelty)
    while (last := steps[-1]) < step:
        gap = gap_after(last, beta, novelty)
        if beta < 1 and beta**last < 1e-9:  # the gap no longer grows
            return is_now(step, step + (last - step) % gap, gap, offset)
        steps.append(last + gap)
    at = bisect_left(steps, step)
    return is_now(step, steps[at], steps[at] - steps[at - 1], offset)


@lru_cache(maxsize=64)
def steps_so_far(beta: float, novelty: float) -> list[int]:
    """The steps of the checks that were found so far; β and ν may change at any step."""
    return [1]


def gap_after(last: int, beta: float, novelty: float) -> int:
    """The smallest n with ρ(s, s + n) ≥ ν; a tie such as β = 1 − ν survives rounding."""
    if beta == 0:
        return 1
    if beta == 1:
        gap = last * novelty / (1 - novelty)
    else:
        log = math.log(beta)
        old = -math.expm1(last * log)  # 1 − β^s, accurate also for β near 1
        gap = math.log1p(-novelty * old / (1 - novelty * beta**last)) / log
    return max(1, math.ceil(gap * (1 - 1e-12) - 1e-9))


def is_now(step: int, check: int, gap: int, offset: float) -> bool:
    """Whether a block with this offset is checked at `step`, if offset 0 is checked at `check`.

    The check before that was `gap` steps earlier.
    """
    early = int(offset * gap) if check - gap >= TOGETHER_UNTIL else 0
    return step == check - early
