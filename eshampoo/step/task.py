"""What each bucket has to do in a step, known before anything changes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..options import GraftScope, Options, Statistics
from ..state.blocks import Failure, Part
from ..state.bucket import Bucket
from .nonfinite import verdicts_of
from .phases import Coefficients, Statistic


@dataclass
class Task:
    """What one bucket does in one step."""

    bucket: Bucket
    call: Statistics  # step(), or observe(), in which nothing moves
    options: Options
    present: list[bool]  # which blocks have a gradient
    clock: list[int]  # calls that each block has seen after this one, as far as the host knows
    due: dict[int, float]  # τ of the blocks that are checked at this t, as far as the host knows
    verdicts: Tensor | None  # [N]: what all ranks say about gradients, if they were asked
    waits: bool  # bases may change between the statistics and the update
    statistic: Statistic | None  # of the factors; None where they do not see the gradients
    graft: GraftScope | None  # what norms are taken over; None where nothing is grafted
    # Parts whose step was counted and has not been delivered yet, with `live` [N, 1].
    begun: dict[Part, Tensor] = field(default_factory=dict)


# One part at work in a step: its gradients (then G̃, then U) and its coefficients.
Work = tuple[Task, Part, Tensor, Coefficients]

# A part with its U, and the squared norms [2, N] that grafting compares.
Compared = tuple[Work, Tensor]

# Which bases failed too often, and the parameters whose gradients were skipped.
Outcome = tuple[list[Failure], list[Tensor]]


def check_use(options: Sequence[Options]) -> None:
    """Refuse an observation that no param group has a use for."""
    if all(o.statistics == "step" for o in options):
        raise RuntimeError(
            "observe() was called, but all param groups have statistics='step': their factors see "
            "the gradients of step(). Pass statistics='observe' to the constructor"
        )


def plan(
    call: Statistics,
    buckets: Sequence[Bucket],
    options: Sequence[Options],
    verdicts: Mapping[Tensor, Tensor],
) -> list[Task]:
    """The tasks of a step or of an observation; nothing has changed yet."""
    tasks = []
    for bucket in buckets:
        if call == "observe" and bucket.state.observations is None:
            continue
        o = options[bucket.group]
        scope = graft_scope(bucket, o) if call == "step" else None
        present = bucket.route.present()
        clock = [t + now for t, now in zip(bucket.clocks[call], present, strict=True)]
        due = {}
        if bucket.modes and o.statistics == call:
            phases = [block.phase if o.stagger else 0.0 for block in bucket.blocks]
            pairs = list(zip(clock, phases, strict=True))
            checked = {pair for pair in set(pairs) if o.checks_at(*pair)}
            at = [i for i, now in enumerate(present) if now and pairs[i] in checked]
            due = {position: o.threshold(clock[position]) for position in at}
        said = verdicts_of(bucket, verdicts) if verdicts else None
        waits = bool(due) and bucket.method.refreshes == "before"
        # A block that was checked has been observed, so its statistics ignore steps.
        based = call == "step" and bucket.state.observations is not None
        based = based and all(map(bucket.counters.checked, range(len(present))))
        statistic = None if based else bucket.method.statistic
        tasks.append(Task(bucket, call, o, present, clock, due, said, waits, statistic, scope))
    return tasks


def graft_scope(bucket: Bucket, o: Options) -> GraftScope | None:
    """What norms are taken over: whole parameters, blocks, or None where nothing is grafted."""
    if o.graft is None or bucket.elementwise:
        return None
    return o.graft_scope if bucket.several else "block"
