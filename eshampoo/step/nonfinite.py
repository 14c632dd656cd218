"""Gradients that are not finite, or cannot be used: refused, left out of the step, or reported."""

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..math.linalg import BITS, per_block
from ..options import Options
from ..state.blocks import called, held_sizes
from ..state.bucket import Bucket

if TYPE_CHECKING:
    from ..ranks.team import Team

# What ranks say about the gradient of a parameter, besides 0 for "fine".
MISSING, NOT_FINITE = 2, 1


def admit_(
    step: Tensor,  # [N]
    skipped: Tensor,  # [N]
    grads: Sequence[Tensor],  # stacks of N blocks in all
    present: Tensor | None,  # [N]: which of them have a gradient; None: all
    o: Options,
) -> Tensor:
    """Zero the gradients that are not finite; return which blocks count this step, `live` [N].

    `live` is 1 or −0.0: blocks that are not live get zeros added, and only −0.0 changes no bit. A
    gradient whose squares overflow counts as not finite; one whose squares vanish becomes zero, so
    that it leaves no denormal numbers, which slow processors down. The host reads nothing.
    """
    live = torch.ones_like(step)
    if present is not None:
        live = torch.where(present, live, -0.0)
    if o.nonfinite != "propagate":  # with "raise", gradients are finite by now
        flat = [G.view(len(G), -1) for G in grads]
        norms = [torch.linalg.vector_norm(G, dim=1) for G in flat]
        norm = torch.cat(norms) if len(norms) > 1 else norms[0]
        finite = norm < math.sqrt(torch.finfo(norm.dtype).max)  # False for NaN
        some = norm > math.sqrt(torch.finfo(norm.dtype).tiny)
        bits = BITS[norm.dtype]
        keep = (finite & some).to(bits).unsqueeze(1).split([len(G) for G in flat])
        for G, kept in zip(flat, keep, strict=True):
            G.view(bits).mul_(kept)
        skipped.add_(live > finite)
        live = torch.where(finite, live, -0.0)
    return live


def believe_(G: Tensor, present: Tensor | None, verdicts: Tensor) -> Tensor:
    """Mark the gradients that other ranks found wrong; return which blocks have a gradient [N]."""
    there = verdicts != MISSING
    G.masked_fill_(per_block(verdicts == NOT_FINITE, G), torch.nan)
    return there if present is None else present & there


def verdicts_of(bucket: Bucket, verdicts: Mapping[Tensor, Tensor]) -> Tensor | None:
    """What all ranks say about the gradients of a bucket [N]; None if nobody was asked."""
    if not any(block.parameter in verdicts for block in bucket.blocks):
        return None
    fine = torch.zeros((), dtype=torch.int32, device=bucket.state.step.device)
    return torch.stack([verdicts.get(block.parameter, fine) for block in bucket.blocks])


def ask(
    voters: "Mapping[Team, Sequence[tuple[int, Tensor]]]", options: Sequence[Options]
) -> dict[Tensor, Tensor]:
    """What all ranks say about the gradients of sharded parameters without a basis."""
    verdicts: dict[Tensor, Tensor] = {}
    for team, entries in voters.items():
        params = [p for index, p in entries if options[index].nonfinite == "skip"]
        if params:
            verdicts |= zip(params, team.vote(params).unbind(0), strict=True)
    return verdicts


def check_gradients(
    groups: Sequence[Mapping[str, Any]],
    options: Sequence[Options],
    teams: "Mapping[Tensor, Team]",
    names: Callable[[], Mapping[Tensor, str]],
) -> None:
    """Refuse gradients that cannot be used, before anything has changed."""
    watched: dict[Team | None, list[Tensor]] = defaultdict(list)
    for group, o in zip(groups, options, strict=True):
        for p in group["params"]:
            grad, team = p.grad, teams.get(p) if teams else None
            if o.nonfinite == "raise" and p.numel() > 0 and (grad is not None or team):
                watched[team].append(p)
            if grad is not None and (grad.is_sparse or grad.is_complex()):
                kind = "sparse" if grad.is_sparse else "complex"
                raise RuntimeError(
                    f"the gradient of {called(p, names())} is {kind}; gradients must be "
                    "dense and real: use sparse=False in the embedding, or another optimizer "
                    "for this parameter"
                )
    bad = [p for team, params in watched.items() for p in _unusable(params, team)]
    if bad:
        listed = ", ".join(called(p, names()) for p in bad)
        raise FloatingPointError(
            f"the gradient of {listed} has NaN or Inf, or its squares overflow; nothing was "
            "changed. Find the cause, or set nonfinite='skip' to leave such blocks out of the step"
        )


def _unusable(params: Sequence[Tensor], team: "Team | None") -> list[Tensor]:
    """The parameters whose gradient is not finite or has squares that overflow.

    All ranks of a team find the same. The norm of the whole parameter counts, so that no gradient
    passes if one of its blocks or shards would be skipped.
    """
    sizes = held_sizes(params) if team is None else team.sizes(params)
    return [p for p, size in zip(params, sizes.tolist(), strict=True) if not size < 1]


def newly_skipped(bucket: Bucket, counts: Sequence[float]) -> list[Tensor]:
    """The parameters whose gradients were skipped since the host last read the counts."""
    now = [int(count) for count in counts]
    blocks = zip(bucket.blocks, now, bucket.skipped, strict=True)
    bucket.skipped, found = now, [block.parameter for block, n, before in blocks if n > before]
    return found


def warn_of(skipped: Sequence[Tensor], names: Mapping[Tensor, str]) -> None:
    """Tell the user about gradients that were left out."""
    bad = ", ".join(called(p, names) for p in skipped)
    warnings.warn(
        f"the gradient of {bad} had NaN or Inf; such blocks stand still for the step. "
        "basis_report() keeps counting them, without another warning",
        stacklevel=5,
    )
