"""How evenly state and work are shared out: `python -m benchmarks.ownership [MODEL] [RANKS]`.

Nothing is computed and no rank is started: each rank of a pretended world builds its optimizer on
the meta device, and its state and the cost of its blocks are added up.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.distributed.fake_pg import FakeStore

from eshampoo import EShampoo

from .shapes import TITLES, Shape, named


class Shares(NamedTuple):
    """What the ranks of a world hold and do."""

    single_state: int  # bytes of one process without others
    states: list[int]  # bytes per rank
    costs: list[float]  # work per rank, in multiply-adds

    @property
    def largest_state(self) -> int:
        return max(self.states)

    @property
    def largest_cost(self) -> float:
        return max(self.costs)

    @property
    def mean_cost(self) -> float:
        return sum(self.costs) / len(self.costs)


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
        chunk = -(-rows // mesh.size())
        rows = max(0, min(chunk, rows - chunk * dist.get_rank()))
    part = torch.empty((rows, *shape[1:]), device="meta")
    stride = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    held = DTensor.from_local(
        part, mesh, [placement], run_check=False, shape=torch.Size(shape), stride=stride
    )
    return nn.Parameter(held)


def state_bytes(optimizer: EShampoo) -> int:
    """Bytes of all state of this rank."""
    return sum(
        value.numel() * value.element_size()
        for values in optimizer.state.values()
        for value in values.values()
    )


def cost(optimizer: EShampoo) -> float:
    """Work on the blocks of this rank: decompositions d³ and products numel · d, for every factor.

    The state shows the blocks: "factor_0.1" [N, d, d] belongs to the N blocks of "exp_avg.1".
    """
    total = 0
    for values in optimizer.state.values():
        for name, value in values.items():
            if name.startswith("factor_"):
                _, dot, number = name.partition(".")
                count, d = value.shape[:2]
                total += count * d**3 + values["exp_avg" + dot + number].numel() * d
    return float(total)


def measure(model: str, ranks: int, placement: Placement) -> Shares:
    """Build the optimizer of every rank in turn."""
    shapes = named(model)
    alone = EShampoo([nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes])
    states, costs = [], []
    for rank in range(ranks):
        with pretended(rank, ranks):
            optimizer = EShampoo([parameter(shape, placement) for shape in shapes])
        states.append(state_bytes(optimizer))
        costs.append(cost(optimizer))
    return Shares(state_bytes(alone), states, costs)


def main(model: str = "vit_s", ranks: str = "4") -> None:
    """Print a table."""
    size = int(ranks)
    print(f"{TITLES.get(model, model)} on {size} ranks; limits: 1.15 / {size} and 1.2\n")
    for title, placement in (("FSDP2", Shard(0)), ("DDP with process_group", Replicate())):
        found = measure(model, size, placement)
        share = found.largest_state / found.single_state
        print(f"{title}")
        print(f"  one process: {found.single_state / 1e6:.1f} MB of state")
        print(f"  per rank:    {', '.join(f'{s / 1e6:.1f}' for s in found.states)} MB")
        print(f"  largest / one process:     {share:.4f} = {share * size:.3f} / {size}")
        print(f"  largest owner cost / mean: {found.largest_cost / found.mean_cost:.3f}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
