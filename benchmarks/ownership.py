"""How evenly state and work are shared out: `python -m benchmarks.ownership [MODEL] [RANKS]`.

Nothing is computed and no rank is started. `simulate` shares out the blocks of a model as the
library does, for any number of ranks in seconds. `measure` builds the optimizer of every rank of a
pretended world on the meta device, which takes long for many, and finds the same.
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.distributed.fake_pg import FakeStore

from eshampoo import EShampoo
from eshampoo.ranks.team import cost, share_out_
from eshampoo.state.blocks import Block
from eshampoo.state.dtensor import extent

from .command import command_line
from .shapes import TITLES, Shape, named, without_memory
from .states import factors, state_bytes

WAYS: dict[str, Placement] = {"FSDP2": Shard(0), "DDP with process_group": Replicate()}

FLOAT = 4  # bytes of a parameter, a gradient, an update and a number of the state

# Bytes of a block beside its matrices: its step and what it skipped, and seven counters per factor.
PER_BLOCK, PER_FACTOR = 2 * FLOAT, 7 * 8


@dataclass
class Shares:
    """What the ranks of a world hold, do and send."""

    single_state: int  # bytes of one process without others
    states: list[int] = field(default_factory=list)  # bytes per rank
    costs: list[float] = field(default_factory=list)  # work per rank, in multiply-adds
    products: list[float] = field(default_factory=list)  # of that, those of a plain step
    sent: list[int] = field(default_factory=list)  # bytes per rank and step, without flags

    @property
    def largest_state(self) -> int:
        return max(self.states)

    @property
    def largest_cost(self) -> float:
        return max(self.costs)

    @property
    def mean_cost(self) -> float:
        return sum(self.costs) / len(self.costs)


# -------------------------------------------------------------------- simulated


def simulate(model: str, ranks: int, placement: Placement) -> Shares:
    """Share the blocks out, and add up what their owners hold, do and send."""
    params = without_memory(model)
    alone = EShampoo(params)
    nothing, no_work = [0] * ranks, [0.0] * ranks
    found = Shares(state_bytes(alone), nothing, no_work, [*no_work], [*nothing])
    shared = [bucket for bucket in alone._buckets if not bucket.elementwise]
    blocks = [(block, bucket.modes) for bucket in shared for block in bucket.blocks]
    owners = share_out_([cost(block.shape, modes) for block, modes in blocks], found.costs)
    sharded = isinstance(placement, Shard)
    for (block, modes), owner in zip(blocks, owners, strict=True):
        numel, sizes = prod(block.shape), [block.shape[mode] for mode in modes]
        numbers = 2 * numel + sum(2 * d * d for d in sizes)
        found.states[owner] += FLOAT * (numbers + 2) + PER_BLOCK + PER_FACTOR * len(modes)
        found.products[owner] += 3 * sum(numel * d for d in sizes)
        if sharded:  # what a rank holds of its own blocks stays, as a gradient and as an update
            here = _overlap(block, owner, ranks)
            found.sent[owner] += FLOAT * (numel - 2 * here)
        else:
            found.sent[owner] += FLOAT * numel * (ranks - 1)
    matrices = {block.parameter for block, _ in blocks}
    for p in params:
        for rank in range(ranks):
            rows = _held(p.shape[0], rank, ranks) if sharded else range(p.shape[0])
            numel = len(rows) * prod(p.shape[1:])
            if p not in matrices:
                found.states[rank] += 2 * FLOAT * numel + PER_BLOCK
            elif sharded:  # gradients leave
                found.sent[rank] += FLOAT * numel
    return found


def _held(rows: int, rank: int, ranks: int) -> range:
    """The rows of a parameter that a rank of FSDP2 holds."""
    height = -(-rows // ranks)
    return range(min(rows, height * rank), min(rows, height * (rank + 1)))


def _overlap(block: Block, rank: int, ranks: int) -> int:
    """How many elements of a block a rank of FSDP2 holds."""
    held, rows = _held(block.parameter.shape[0], rank, ranks), block.box[0]
    common: int = min(held.stop, rows.stop) - max(held.start, rows.start)
    return max(0, common) * prod(block.shape) // extent(block.box)[0]


# -------------------------------------------------------------------- built


@contextmanager
def pretended(rank: int, size: int) -> Iterator[None]:
    """A world of which only this rank exists; its messages go nowhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def parameter(shape: Shape, placement: Placement) -> nn.Parameter:
    """A parameter without memory, as FSDP2 cuts it (Shard) or as DDP keeps it (Replicate)."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = shape[0]
    if isinstance(placement, Shard):
        rows = len(_held(rows, dist.get_rank(), mesh.size()))
    part = torch.empty((rows, *shape[1:]), device="meta")
    stride = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    held = DTensor.from_local(
        part, mesh, [placement], run_check=False, shape=torch.Size(shape), stride=stride
    )
    return nn.Parameter(held)


def bytes_sent(optimizer: EShampoo) -> int:
    """What this rank sends to others in a step, without flags."""
    total = 0
    for bucket in optimizer._buckets:
        route: Any = bucket.route
        for way in (route.gradients, route.updates) if bucket.route.team is not None else ():
            pieces = iter(way.sent)  # by target; each is followed by a flag
            for target, size in enumerate(way.sizes_out):
                while size > 0:
                    numel = prod(extent(next(pieces).box))
                    size -= numel + 1
                    total += numel * (target != route.team.rank)
    return FLOAT * total


def measure(model: str, ranks: int, placement: Placement) -> Shares:
    """Build the optimizer of every rank in turn."""
    shapes = named(model)
    found = Shares(state_bytes(EShampoo(without_memory(model))))
    for rank in range(ranks):
        with pretended(rank, ranks):
            optimizer = EShampoo([parameter(shape, placement) for shape in shapes])
        sides = list(factors(optimizer))
        found.states.append(state_bytes(optimizer))
        found.costs.append(float(sum(count * d**3 + numel * d for count, d, numel in sides)))
        found.products.append(float(sum(3 * numel * d for _, d, numel in sides)))
        found.sent.append(bytes_sent(optimizer))
    return found


# -------------------------------------------------------------------- a model of the seconds


class Figures(NamedTuple):
    """What a device is said to reach; given, not measured."""

    flops: float  # per second, in forward and backward passes
    float32: float  # flops per second in products of float32
    bandwidth: float  # bytes per second that a rank sends
    tokens: int  # per rank and step


FORMULA = """\
  optimizer = (1 + budget) · 2 · products / float32 + sent / bandwidth
  passes    = 6 · parameters · tokens / flops
  share     = optimizer / (optimizer + passes)
with the multiply-adds of the largest owner (3 mn(m + n) per block) for `products`, bases at their
budget, nothing that overlaps, and memory as fast as it needs to be"""


def share_of_step(found: Shares, parameters: int, figures: Figures, budget: float) -> float:
    """The share of a step that the optimizer takes, by the formula above."""
    products = (1 + budget) * 2 * max(found.products) / figures.float32
    optimizer = products + max(found.sent) / figures.bandwidth
    passes = 6 * parameters * figures.tokens / figures.flops
    return optimizer / (optimizer + passes)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line("ownership", __doc__)
    parser.add_argument("model", nargs="?", default="vit_s")
    parser.add_argument("ranks", nargs="?", type=int, default=4)
    parser.add_argument("--flops", type=float, default=4e14)
    parser.add_argument("--float32", type=float, default=4e13)
    parser.add_argument("--bandwidth", type=float, default=5e10)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--budget", type=float, default=0.25)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what the ranks hold, do and send, and the model with its formula."""
    o = parse(arguments)
    figures = Figures(o.flops, o.float32, o.bandwidth, o.tokens)
    parameters = sum(map(prod, named(o.model)))
    title = TITLES.get(o.model, o.model)
    print(f"{title}, {parameters / 1e6:,.0f} million parameters, {o.ranks} ranks; goal: 1.2\n")
    for name, placement in WAYS.items():
        found = simulate(o.model, o.ranks, placement)
        mean = sum(found.states) / o.ranks
        print(name)
        print(f"  state of one process:      {found.single_state / 1e9:,.3f} GB")
        print(f"  largest state of a rank:   {found.largest_state / 1e9:,.3f} GB")
        print(f"  largest state / mean:      {found.largest_state / mean:.3f}")
        print(f"  largest owner cost / mean: {found.largest_cost / found.mean_cost:.3f}")
        print(f"  most sent per step:        {max(found.sent) / 1e9:,.3f} GB")
        print(f"  products of the largest:   {max(found.products) / 1e12:.3f}e12 multiply-adds")
        share = share_of_step(found, parameters, figures, o.budget)
        print(f"  predicted share of a step: {share:.3f}\n")
    given = ", ".join(f"{name} {value:g}" for name, value in figures._asdict().items())
    print(f"The share is predicted from {given}, budget {o.budget:g} by\n{FORMULA}")


if __name__ == "__main__":
    main()
