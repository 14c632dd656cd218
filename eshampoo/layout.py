"""Who works on what when parameters are spread over ranks, and how gradients and updates travel.

A block is preconditioned whole by one rank, its owner. Every step, the ranks that hold a part of
the block send that part of the gradient to the owner, and the owner sends the update back: two
all-to-alls per bucket. Where a part lies follows from the parameter's placements alone, so every
rank knows all routes without asking.

    FSDP2   Shard(0)               HSDP   Replicate, Shard(0)
    TP      Shard(0) or Shard(1)   DDP    Replicate, with a process group
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from .blocks import Block, Box, extent, local


class Place:
    """The ranks that share the work on some parameters: a mesh of DTensors, or a process group."""

    def __init__(self, group: dist.ProcessGroup, mesh: DeviceMesh | None = None) -> None:
        self.group, self.mesh = group, mesh
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.coordinates = [self._coordinate(rank) for rank in range(self.size)]
        self.loads = [0.0] * self.size

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh) -> "Place":
        """The ranks of a mesh; a sub-mesh of several dimensions makes a group for itself."""
        if mesh.size() == dist.get_world_size():
            return cls(dist.distributed_c10d._get_default_group(), mesh)
        return cls(mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group(), mesh)

    def _coordinate(self, rank: int) -> tuple[int, ...]:
        if self.mesh is None:
            return ()
        world_rank = dist.get_global_rank(self.group, rank)
        return tuple(int(i) for i in (self.mesh.mesh == world_rank).nonzero()[0])

    def boxes(self, p: Tensor) -> list[Box]:
        """The part of a parameter that each rank holds."""
        if isinstance(p, DTensor):
            sizes = tuple(p.device_mesh.shape)
            return [shard_box(p.shape, sizes, at, p.placements) for at in self.coordinates]
        return [tuple(slice(0, size) for size in p.shape)] * self.size

    def assign(self, blocks: Sequence[Block]) -> list[int]:
        """Owners, balanced by cost: the dearest block goes to the rank with the least to do."""
        owners = [0] * len(blocks)
        for number in sorted(range(len(blocks)), key=lambda n: -cost(blocks[n].shape)):
            owner = min(range(self.size), key=lambda rank: self.loads[rank])
            owners[number] = owner
            self.loads[owner] += cost(blocks[number].shape)
        return owners


def mesh_of(p: Tensor) -> DeviceMesh:
    """The mesh of a DTensor."""
    assert isinstance(p, DTensor)
    return p.device_mesh


def cost(shape: Sequence[int]) -> float:
    """Work on a block: decompositions m³ + n³ and products mn(m + n)."""
    numel = 1
    for size in shape:
        numel *= size
    return float(sum(size**3 + numel * size for size in shape))


def shard_box(
    shape: Sequence[int],
    sizes: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> Box:
    """The rectangle of a tensor that a rank of a mesh holds, as torch.chunk cuts it."""
    bounds = [(0, size) for size in shape]
    # FSDP shards what tensor parallelism has left: its placement is strided and applies last.
    order = sorted(range(len(placements)), key=lambda i: isinstance(placements[i], _StridedShard))
    for i in order:
        placement = placements[i]
        if isinstance(placement, Shard | _StridedShard):
            start, stop = bounds[placement.dim]
            size = -(-(stop - start) // sizes[i])
            first = min(start + size * coordinate[i], stop)
            bounds[placement.dim] = (first, min(first + size, stop))
        elif not isinstance(placement, Replicate):
            raise ValueError(
                f"a parameter has the placement {placement}; parameters must be sharded or "
                "replicated: redistribute it before building the optimizer"
            )
    return tuple(slice(*bound) for bound in bounds)


def intersection(a: Box, b: Box) -> Box | None:
    """Where two rectangles overlap, if they do."""
    cuts = [slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True)]
    return tuple(cuts) if all(cut.start < cut.stop for cut in cuts) else None


def within(box: Box, outer: Box) -> Box:
    """A rectangle in the coordinates of one that contains it."""
    return tuple(
        slice(cut.start - o.start, cut.stop - o.start) for cut, o in zip(box, outer, strict=True)
    )


class Piece(NamedTuple):
    """A part of a block that travels."""

    block: int  # number in the bucket
    box: Box  # in the parameter


class Mail:
    """One all-to-all: which pieces this rank sends to and receives from every other.

    Every piece travels with a flag: a gradient may be missing, a block may stand still.
    """

    def __init__(
        self, place: Place, routes: Sequence[tuple[int, int, Piece]], like: Tensor
    ) -> None:
        self.place, self.like = place, like
        me = place.rank
        self.sent = [[p for s, d, p in routes if s == me and d == r] for r in range(place.size)]
        self.expected = [[p for s, d, p in routes if d == me and s == r] for r in range(place.size)]
        self.inbox = like.new_empty(0)
        self.work: dist.Work | None = None

    def views(
        self, buffer: Tensor, parcels: list[list[Piece]]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Per piece its view of a buffer, and per rank its flags."""
        parts, flags, start = [], [], 0
        for parcel in parcels:
            for piece in parcel:
                shape = torch.Size(extent(piece.box))
                parts.append(buffer[start : start + shape.numel()].view(shape))
                start += shape.numel()
            flags.append(buffer[start : start + len(parcel)])
            start += len(parcel)
        return parts, flags

    @staticmethod
    def sizes(parcels: list[list[Piece]]) -> list[int]:
        return [sum(torch.Size(extent(p.box)).numel() + 1 for p in parcel) for parcel in parcels]

    def send(self, parts: Sequence[Tensor | None], flags: Tensor) -> None:
        """Send a tensor (None: nothing) and a flag for every piece, in the order of `sent`."""
        outbox = self.like.new_empty(sum(self.sizes(self.sent)))
        targets, marks = self.views(outbox, self.sent)
        pairs = list(zip(targets, parts, strict=True))
        for target, part in pairs:
            target.zero_() if part is None else target.copy_(part)
        for mark, flag in zip(marks, torch.split(flags, [len(p) for p in self.sent]), strict=True):
            mark.copy_(flag)
        self.inbox = self.like.new_empty(sum(self.sizes(self.expected)))
        self.work = dist.all_to_all_single(
            self.inbox,
            outbox,
            self.sizes(self.expected),
            self.sizes(self.sent),
            group=self.place.group,
            async_op=True,
        )

    def receive(self) -> tuple[list[Tensor], Tensor]:
        """A tensor and a flag for every piece, in the order of `expected`."""
        assert self.work is not None
        self.work.wait()
        self.work = None
        parts, flags = self.views(self.inbox, self.expected)
        return parts, torch.cat(flags)


class Exchange:
    """Gradients of one bucket to the owners of its blocks, and updates back."""

    def __init__(
        self, place: Place, blocks: Sequence[Block], owners: Sequence[int], like: Tensor
    ) -> None:
        self.place, self.blocks, self.owners = place, list(blocks), list(owners)
        self.mine = [n for n, owner in enumerate(owners) if owner == place.rank]
        self.slots = {number: slot for slot, number in enumerate(self.mine)}
        boxes = {block.parameter: place.boxes(block.parameter) for block in blocks}
        self.held = {p: held[place.rank] for p, held in boxes.items()}
        to_owners, to_holders = [], []
        for number, (block, owner) in enumerate(zip(blocks, owners, strict=True)):
            holders: dict[tuple[tuple[int, int], ...], list[int]] = {}
            for rank, held in enumerate(boxes[block.parameter]):
                box = intersection(block.box, held)
                if box is not None:
                    holders.setdefault(tuple((c.start, c.stop) for c in box), []).append(rank)
                    to_holders.append((owner, rank, Piece(number, box)))
            for bounds, ranks in holders.items():
                # Of several replicas the owner itself sends, or one that varies with the owner.
                source = owner if owner in ranks else ranks[owner % len(ranks)]
                to_owners.append((source, owner, Piece(number, tuple(slice(*b) for b in bounds))))
        self.gradients = Mail(place, to_owners, like)
        self.updates = Mail(place, to_holders, like)

    def start(self) -> None:
        """Send the parts of the gradients that this rank holds on their way."""
        parts = []
        for piece in (piece for parcel in self.gradients.sent for piece in parcel):
            p = self.blocks[piece.block].parameter
            grad = None if p.grad is None else local(p.grad)
            parts.append(None if grad is None else grad[within(piece.box, self.held[p])])
        flags = torch.tensor([float(part is not None) for part in parts])
        self.gradients.send(parts, flags.to(self.gradients.like))

    def receive(self, G: Tensor) -> Tensor:
        """Fill the stack of this rank's blocks; which of them have a gradient [N]."""
        parts, flags = self.gradients.receive()
        pieces = [piece for parcel in self.gradients.expected for piece in parcel]
        for piece, part in zip(pieces, parts, strict=True):
            self._in_stack(G, piece).copy_(part)
        slots = torch.tensor([self.slots[piece.block] for piece in pieces], dtype=torch.long)
        missing = G.new_zeros(len(self.mine)).index_add_(0, slots.to(G.device), 1 - flags)
        return missing == 0

    def send(self, U: Tensor, moving: Tensor) -> None:
        """Send the updates of this rank's blocks, and whether they move, on their way."""
        pieces = [piece for parcel in self.updates.sent for piece in parcel]
        slots = torch.tensor([self.slots[piece.block] for piece in pieces], dtype=torch.long)
        flags = moving[slots.to(moving.device)].to(U.dtype)
        self.updates.send([self._in_stack(U, piece) for piece in pieces], flags)

    def finish(self, decay: float | Tensor) -> None:
        """Add the updates that arrive, and −decay · W, to what this rank holds of W."""
        parts, flags = self.updates.receive()
        pieces = [piece for parcel in self.updates.expected for piece in parcel]
        weights = []
        for piece in pieces:
            p = self.blocks[piece.block].parameter
            weights.append(local(p)[within(piece.box, self.held[p])])
        if not isinstance(decay, float) or decay != 0:
            shares = (flags * -decay).unbind(0)
            for part, weight, share in zip(parts, weights, shares, strict=True):
                part.addcmul_(weight.to(part.dtype), share)
        if parts:
            torch._foreach_add_(weights, parts)

    def totals_(self, sums: Tensor) -> None:
        """Add up over the ranks of the place."""
        dist.all_reduce(sums, group=self.place.group)

    # ---------------------------------------------------------------- checkpoints

    def everywhere(self, stack: Tensor) -> Tensor:
        """Small state of all blocks of the bucket, on every rank."""
        full = stack.new_zeros(
            len(self.blocks), *stack.shape[1:], device=self.gradients.like.device
        )
        full[self.mine] = stack.to(full.device)
        dist.all_reduce(full, group=self.place.group)
        return full.to(stack.device)

    def spread(self, stack: Tensor) -> list[Tensor]:
        """Large state of all blocks, each cut along its first dimension over the last of the mesh.

        What a checkpoint stores must not depend on who owns a block; without a mesh every rank gets
        all of it.
        """
        place, tail = self.place, stack.shape[2:]
        parts = 1 if place.mesh is None else place.mesh.shape[-1]
        chunk = -(-stack.shape[1] // parts)
        held = [0 if place.mesh is None else at[-1] for at in place.coordinates]
        rows = [slice(k * chunk, min((k + 1) * chunk, stack.shape[1])) for k in held]
        counts = [max(0, cut.stop - cut.start) for cut in rows]
        outbox = torch.cat([stack[:, cut].reshape(-1) for cut in rows])
        width = tail.numel()
        sent = [len(self.mine) * count * width for count in counts]
        mine = counts[place.rank] * width
        expected = [self.owners.count(rank) * mine for rank in range(place.size)]
        inbox = outbox.new_empty(sum(expected))
        dist.all_to_all_single(inbox, outbox, expected, sent, group=place.group)
        by_owner = sorted(range(len(self.blocks)), key=lambda number: self.owners[number])
        pieces = inbox.view(len(self.blocks), counts[place.rank], *tail).unbind(0)
        found = dict(zip(by_owner, pieces, strict=True))
        return [found[number] for number in range(len(self.blocks))]

    def as_state(self, p: Tensor, pieces: Sequence[Tensor], rows: int) -> Tensor:
        """The pieces of one parameter's blocks as one tensor, sharded if the parameter is."""
        part = torch.stack(list(pieces))
        if not isinstance(p, DTensor):
            return part
        mesh = p.device_mesh
        shape = torch.Size((part.shape[0], rows, *part.shape[2:]))
        placements = [*[Replicate()] * (mesh.ndim - 1), Shard(1)]
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            part, mesh, placements, run_check=False, shape=shape, stride=stride
        )

    def _in_stack(self, stack: Tensor, piece: Piece) -> Tensor:
        block = self.blocks[piece.block]
        row = block.unmerged(stack[self.slots[piece.block]])
        return row[within(piece.box, block.box)]


def like_parameter(part: Tensor, p: Tensor) -> Tensor:
    """This rank's part of an element-wise state, as a DTensor placed like its parameter."""
    assert isinstance(p, DTensor)
    return DTensor.from_local(
        part, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )


def held_part(value: Tensor, p: Tensor) -> Tensor:
    """What this rank holds of the parameter, taken from a value of the parameter's shape."""
    assert isinstance(p, DTensor)
    mesh = p.device_mesh
    if isinstance(value, DTensor):
        return value.redistribute(mesh, p.placements).to_local()
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    return value[shard_box(p.shape, tuple(mesh.shape), coordinate, p.placements)]


def check_agreement(params: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Refuse, on every rank alike, parameters whose shapes or values differ across a group."""
    mine = [f"{tuple(p.shape)} {p.dtype} sum {float(p.detach().double().sum())}" for p in params]
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, mine, group=group)
    for rank, theirs in enumerate(everyone):
        for number, (here, there) in enumerate(zip_longest(everyone[0], theirs, fillvalue="none")):
            if here != there:
                raise ValueError(
                    f"parameter {number} is ({there}) on rank {rank} of the process group and "
                    f"({here}) on rank 0; they must agree: seed alike, or broadcast the model, as "
                    "DDP does, before building the optimizer"
                )
