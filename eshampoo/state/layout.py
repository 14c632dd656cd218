"""From parameters to blocks, and from blocks to buckets."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..math.solvers import eigh_cost
from ..methods import Method
from ..options import Options
from ..sides import Modes, no_side
from ..validate import check_block
from .blocks import Block, Kind
from .bucket import Bucket
from .dtensor import extent, is_sharded, local, whole_box
from .route import Local, Route

if TYPE_CHECKING:
    from ..ranks.team import Team

# Largest block for correction="optimal", which keeps a matrix of that size squared.
OPTIMAL_LIMIT = 4096


def build(
    group: int,
    params: Sequence[Tensor],
    method: Method,
    o: Options,
    teams: "Mapping[Tensor, Team]",
    names: Mapping[Tensor, str],
) -> list[Bucket]:
    """Cut parameters into blocks, and stack blocks of one row, shape, dtype, device and team."""
    members: dict[Kind, list[Block]] = defaultdict(list)
    without_basis = method.without_basis()
    for p in params:
        shape = matrix_shape(p, o)
        joined, modes = method.sides(shape, o)
        team = teams.get(p)
        dtype = torch.promote_types(p.dtype, torch.float32)
        if joined:
            blocks, row = cut(p, shape, (joined, modes), o, names), method
        else:
            team = team if is_sharded(p) else None
            blocks, row = [uncut(p, team)], without_basis
        for block in blocks:
            members[Kind(row, block.shape, modes, dtype, p.device, team)].append(block)
    members = spread_checks(members)
    owners = owners_of(members)
    buckets, seen = [], Counter[Tensor]()
    for kind, blocks in members.items():
        route: Route
        if kind.team is None or kind.row is without_basis:
            route = Local(blocks, kind.team)
        else:
            from ..ranks.exchange import Exchange  # a team exists, so this is imported already

            like = torch.empty(0, dtype=kind.dtype, device=kind.device)
            route = Exchange(kind.team, blocks, owners[kind], like)
        bucket = Bucket(group, kind, o, route)
        # A parameter that has blocks in several buckets tells them apart by their numbers.
        bucket.suffixes = {p: f".{seen[p]}" for p in bucket.parameters if seen[p]}
        seen.update(bucket.parameters)
        buckets.append(bucket)
    return buckets


# -------------------------------------------------------------------- blocks


def uncut(p: Tensor, team: "Team | None") -> Block:
    """What this rank holds of an element-wise parameter, perhaps nothing, as a padded vector.

    The row is as long as the largest shard, so that all ranks have the same buckets.
    """
    held = local(p)
    boxes = [whole_box(held.shape)] if team is None else team.boxes(p)
    largest = max(prod(extent(box)) for box in boxes)
    return Block(p, 0, 1, whole_box(held.shape), (padded(largest),))


def matrix_shape(p: Tensor, o: Options) -> tuple[int, ...]:
    """The shape of each matrix in a parameter, without the dimensions that number them.

    A matrix without equal pieces is left whole, and refused when it is cut.
    """
    shape = tuple(p.shape[o.batch_dims :])
    equal = shape and shape[0] % o.pieces == 0
    return (shape[0] // o.pieces, *shape[1:]) if equal else shape


def cut(
    p: Tensor, shape: tuple[int, ...], sides: Modes, o: Options, names: Mapping[Tensor, str]
) -> list[Block]:
    """The blocks of a parameter with a basis: matrices of this shape, one by one, and cut."""
    joined, modes = sides
    cuts = [[span] for span in whole_box(shape)]
    for i in modes:  # sides without a basis stay whole
        first, *rest = joined[i]
        cuts[first] = split(shape[first], o.max_dim // prod(shape[dim] for dim in rest))
    singles = product(*(split(size, 1) for size in p.shape[: o.batch_dims]))
    members = product(singles, range(0, o.pieces * shape[0], shape[0]))
    blocks: list[Block] = []
    for matrix, (at, first_row) in enumerate(members):
        for rows, *box in product(*cuts):
            moved = slice(first_row + rows.start, first_row + rows.stop)
            sizes = extent((rows, *box))
            merged = tuple(prod(sizes[dim] for dim in dims) for dims in joined)
            check_block(p, merged, o, names, OPTIMAL_LIMIT)
            blocks.append(Block(p, len(blocks), 0, (*at, moved, *box), merged, matrix))
    return [block._replace(total=len(blocks)) for block in blocks]


def padded(numel: int) -> int:
    """The row length of a vector's stack: short vectors of similar length share a stack.

    >>> [padded(numel) for numel in (10, 192, 256, 384, 5000)]
    [256, 256, 256, 512, 5000]
    """
    return numel if numel > 4096 else max(256, 1 << (numel - 1).bit_length())


def split(size: int, max_dim: int) -> list[slice]:
    """Cut a dimension at multiples of max_dim, the last piece ragged.

    >>> split(40, 16)
    [slice(0, 16, None), slice(16, 32, None), slice(32, 40, None)]
    """
    return [slice(start, min(start + max_dim, size)) for start in range(0, size, max_dim)]


# -------------------------------------------------------------------- when, and by whom


def spread_checks(members: Mapping[Kind, list[Block]]) -> dict[Kind, list[Block]]:
    """Give every block its offset: the share of all bases' costs that comes before its own.

    It follows from the parameters alone, so all ranks and resumed runs agree. Factors of one size
    are neighbours, because they are solved together.
    """
    costs = {kind: sum(eigh_cost(kind.shape[mode]) for mode in kind.modes) for kind in members}
    total = max(1.0, sum(costs[kind] * len(blocks) for kind, blocks in members.items()))
    before, spread = 0.0, {}
    for kind, blocks in members.items():
        spread[kind] = [
            block._replace(check_offset=(before + n * costs[kind]) / total)
            for n, block in enumerate(blocks)
        ]
        before += costs[kind] * len(blocks)
    return spread


def owners_of(members: Mapping[Kind, list[Block]]) -> dict[Kind, list[int]]:
    """The ranks that own the blocks of each bucket, balanced over all buckets of a team."""
    owners: dict[Kind, list[int]] = defaultdict(list)
    with_owner = [kind for kind in members if kind.row.sides is not no_side]
    shared = [kind for kind in with_owner for _ in members[kind]]
    for team in dict.fromkeys(kind.team for kind in shared if kind.team is not None):
        kinds = [kind for kind in shared if kind.team is team]
        for kind, rank in zip(kinds, team.assign([kind[1:3] for kind in kinds]), strict=True):
            owners[kind].append(rank)
    return owners
