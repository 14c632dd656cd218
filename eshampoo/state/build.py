"""From the parameters of a group to its buckets."""

from collections import defaultdict
from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..math.solvers import eigh_cost
from ..methods import Method
from ..options import Options
from .blocks import Block, Local, Route
from .bucket import Bucket, suffix_
from .cutting import cut

if TYPE_CHECKING:
    from ..ranks.team import Team


def build(
    group: int,
    params: Sequence[Tensor],
    method: Method,
    o: Options,
    teams: "Mapping[Tensor, Team]",
    names: Mapping[Tensor, str],
) -> list[Bucket]:
    """Cut parameters into blocks, and stack blocks of one row, shape, dtype, device and team."""
    members: dict[tuple[Any, ...], list[Block]] = defaultdict(list)
    without_basis = method.without_basis()
    for p in params:
        sides = method.sides(p.shape, o)
        joined, modes = sides
        row, team = (method, teams.get(p)) if joined else (without_basis, None)
        dtype = torch.promote_types(p.dtype, torch.float32)
        for block in cut(p, sides, o, names):
            members[row, block.shape, modes, dtype, p.device, team].append(block)
    members = _spread(members)
    owners = _owners(members)
    buckets = []
    for key, blocks in members.items():
        row, shape, modes, dtype, device, team = key
        like = torch.empty(0, dtype=dtype, device=device)
        route: Route = Local(blocks)
        if team is not None:
            from ..ranks.exchange import Exchange  # a team exists, so this is imported already

            route = Exchange(team, blocks, owners[key], like)
        buckets.append(Bucket(group, row, o, shape, modes, route, like))
    suffix_(buckets)
    return buckets


def _spread(
    members: Mapping[tuple[Any, ...], list[Block]],
) -> dict[tuple[Any, ...], list[Block]]:
    """Give every block its phase: the share of all bases' costs that comes before its own.

    It follows from the parameters alone, so all ranks and resumed runs agree. Factors of one size
    are neighbours, because they are solved together.
    """
    costs = {key: sum(eigh_cost(key[1][mode]) for mode in key[2]) for key in members}
    total = sum(costs[key] * len(blocks) for key, blocks in members.items())
    before, found = 0.0, {}
    for key, blocks in members.items():
        phases = [(before + number * costs[key]) / max(total, 1.0) for number in range(len(blocks))]
        found[key] = [b._replace(phase=phase) for b, phase in zip(blocks, phases, strict=True)]
        before += costs[key] * len(blocks)
    return found


def _owners(members: Mapping[tuple[Any, ...], list[Block]]) -> dict[tuple[Any, ...], list[int]]:
    """The ranks that own the blocks of each bucket, balanced over all buckets of a team."""
    owners: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for team in dict.fromkeys(key[-1] for key in members if key[-1] is not None):
        keys = [key for key, blocks in members.items() if key[-1] is team for _ in blocks]
        for key, rank in zip(keys, team.assign([key[1:3] for key in keys]), strict=True):
            owners[key].append(rank)
    return owners


def show_(
    buckets: Sequence[Bucket], params: Sequence[Tensor], state: MutableMapping[Tensor, Any]
) -> None:
    """Put views of the buckets into `state`; a parameter without blocks gets an empty entry."""
    for p in params:
        state[p] = {}
    for bucket in buckets:
        for p, views in bucket.views():
            state[p].update(views)
