"""Who works on what when parameters are spread over ranks, and how gradients and updates travel.

A block is preconditioned whole by one rank, its owner. Every step, the ranks that hold a part of
the block send that part of the gradient to the owner, and the owner sends the update back: two
all-to-alls per bucket. Where a part lies follows from the parameter's placements alone, so every
rank knows all routes without asking, and they are worked out once.

    FSDP2   Shard(0)               HSDP   Replicate, Shard(0)
    TP      Shard(0) or Shard(1)   DDP    Replicate, with a process group
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from .blocks import Block, Box, called, extent, local
from .options import Options
from .refresh import Failure


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

    def assign(self, blocks: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[int]:
        """Owners of blocks with these shapes and modes.

        The dearest goes to the rank with the least to do, and so on.
        """
        costs = [cost(shape, modes) for shape, modes in blocks]
        owners = [0] * len(costs)
        for number in sorted(range(len(costs)), key=lambda n: -costs[n]):
            owner = min(range(self.size), key=lambda rank: self.loads[rank])
            owners[number] = owner
            self.loads[owner] += costs[number]
        return owners


def cut_from(mesh: DeviceMesh) -> list[int]:
    """The ranks of the mesh that this one is a slice of, or its own."""
    find = getattr(mesh, "_get_root_mesh", None)
    if find is None:  # older versions of torch know it elsewhere, newer ones no longer there
        from torch.distributed.device_mesh import _mesh_resources

        return sorted(_mesh_resources.get_root_mesh(mesh).mesh.flatten().tolist())
    return sorted(find().mesh.flatten().tolist())


def check_meshes(params: Sequence[Tensor], names: Mapping[Tensor, str]) -> None:
    """Refuse meshes of which some ranks know one and others know both.

    Slices of one mesh are there on all of its ranks. With anything else, ranks that have no part in
    a parameter would raise, or not have it, and the others would wait for them. Every rank sees
    the same parameters, so all raise the same without asking.
    """
    meshes: dict[DeviceMesh, Tensor] = {}
    for p in params:
        if isinstance(p, DTensor):
            meshes.setdefault(p.device_mesh, p)
    known = [(p, cut_from(mesh)) for mesh, p in meshes.items()]
    for p, ranks in known:
        first, expected = known[0]
        if ranks != expected:
            raise ValueError(
                f"{called(first, names)} lies on a mesh cut from the ranks {expected}, and "
                f"{called(p, names)} on one cut from {ranks}; the meshes of an optimizer must have "
                "the same ranks or be slices of one mesh: slice one init_device_mesh, or build an "
                "optimizer for each mesh, on its ranks only"
            )


def mesh_of(p: Tensor) -> DeviceMesh:
    """The mesh of a DTensor parameter; refused if this library can do nothing with it."""
    assert isinstance(p, DTensor)
    if p.device_mesh.get_coordinate() is None:
        raise ValueError(
            f"a parameter of shape {tuple(p.shape)} lies on {p.device_mesh}, to which rank "
            f"{dist.get_rank()} does not belong; give the optimizer of each rank only parameters "
            "that it has a part in"
        )
    for placement in p.placements:
        if not isinstance(placement, Shard | _StridedShard | Replicate):
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} has the placement {placement!r}; it must "
                "be sharded or replicated: redistribute it before building the optimizer"
            )
    return p.device_mesh


def cost(shape: Sequence[int], modes: Sequence[int]) -> float:
    """Work on a block: decompositions m³ + n³ and products mn(m + n), for modes with a basis."""
    numel = prod(shape)
    return float(sum(shape[i] ** 3 + numel * shape[i] for i in modes))


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


Route = tuple[int, int, Piece]  # from rank, to rank, what


class Parcels:
    """How the pieces for every rank lie in one buffer: rank by rank, flags after the pieces."""

    def __init__(self, parcels: Sequence[Sequence[Piece]], device: torch.device) -> None:
        self.pieces = [piece for parcel in parcels for piece in parcel]
        self.shapes = [extent(piece.box) for piece in self.pieces]
        self.sizes: list[int] = []  # of the parcels
        self.cuts: list[int] = []  # where to split the buffer: pieces, and runs of flags
        self.chunks: list[int] = []  # which of the cuts are pieces
        flags: list[int] = []
        for parcel in parcels:
            numels = [prod(extent(piece.box)) for piece in parcel]
            self.chunks += range(len(self.cuts), len(self.cuts) + len(parcel))
            self.cuts += [*numels, len(parcel)]
            self.sizes.append(sum(numels) + len(parcel))
            flags += range(sum(self.sizes) - len(parcel), sum(self.sizes))
        self.flags = torch.tensor(flags, dtype=torch.long, device=device)  # where they lie

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Every piece, in a buffer."""
        split = torch.split_with_sizes(buffer, self.cuts)
        return [split[k].view(shape) for k, shape in zip(self.chunks, self.shapes, strict=True)]


class Mail:
    """One all-to-all: which pieces this rank sends to and receives from every other.

    Every piece travels with a flag: a gradient may be missing, a block may stand still.
    """

    def __init__(self, place: Place, routes: Sequence[Route], like: Tensor) -> None:
        self.place, self.like = place, like
        sent: list[list[Piece]] = [[] for _ in range(place.size)]
        expected: list[list[Piece]] = [[] for _ in range(place.size)]
        for source, target, piece in routes:
            if source == place.rank:
                sent[target].append(piece)
            if target == place.rank:
                expected[source].append(piece)
        self.sent, self.expected = Parcels(sent, like.device), Parcels(expected, like.device)
        # Alike on all ranks: they all know all routes.
        self.stays = all(source == target for source, target, _ in routes)
        self.inbox = like.new_empty(0)
        self.work: dist.Work | None = None

    def send(self, parts: Sequence[Tensor | None], flags: Tensor) -> None:
        """Send a tensor (None: nothing) and a flag for every piece, in the order of `sent`."""
        outbox = self.like.new_empty(sum(self.sent.sizes))
        views = self.sent.views(outbox)
        copy_([(v, part) for v, part in zip(views, parts, strict=True) if part is not None])
        for view, part in zip(views, parts, strict=True):
            if part is None:
                view.zero_()
        outbox[self.sent.flags] = flags.to(outbox.dtype)
        if self.stays:
            self.inbox = outbox
            return
        self.inbox = self.like.new_empty(sum(self.expected.sizes))
        self.work = dist.all_to_all_single(
            self.inbox,
            outbox,
            self.expected.sizes,
            self.sent.sizes,
            group=self.place.group,
            async_op=True,
        )

    def receive(self) -> tuple[list[Tensor], Tensor]:
        """A tensor and a flag for every piece, in the order of `expected`."""
        if self.work is not None:
            self.work.wait()
        inbox, self.inbox, self.work = self.inbox, self.like.new_empty(0), None
        return self.expected.views(inbox), inbox[self.expected.flags]


def copy_(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the second of every pair into the first."""
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


class Exchange:
    """Gradients of one bucket to the owners of its blocks, and updates back."""

    def __init__(
        self, place: Place, blocks: Sequence[Block], owners: Sequence[int], like: Tensor
    ) -> None:
        self.place, self.blocks, self.owners = place, list(blocks), list(owners)
        self.mine = [n for n, owner in enumerate(owners) if owner == place.rank]
        self.device = like.device
        slots = {number: slot for slot, number in enumerate(self.mine)}
        boxes = {p: place.boxes(p) for p in dict.fromkeys(block.parameter for block in blocks)}
        to_owners, to_holders = self._routes(boxes)
        # Gradients travel as they are; updates as exact as they were computed.
        dtypes = {grad_dtype(p) for p in boxes}
        self.gradients = Mail(place, to_owners, like.to(dtypes.pop()) if len(dtypes) == 1 else like)
        self.updates = Mail(place, to_holders, like)

        def held(piece: Piece) -> tuple[Tensor, Box]:
            p = self.blocks[piece.block].parameter
            return p, within(piece.box, boxes[p][place.rank])

        def stacked(piece: Piece) -> tuple[int, tuple[int, ...], Box]:
            box = self.blocks[piece.block].box
            return slots[piece.block], extent(box), within(piece.box, box)

        def slot_numbers(pieces: Sequence[Piece]) -> Tensor:
            numbers = [slots[piece.block] for piece in pieces]
            return torch.tensor(numbers, dtype=torch.long, device=like.device)

        # Parts of what this rank holds, and of the stacks of the blocks that it owns.
        self.grads_out = [held(piece) for piece in self.gradients.sent.pieces]
        self.grads_in = [stacked(piece) for piece in self.gradients.expected.pieces]
        self.updates_out = [stacked(piece) for piece in self.updates.sent.pieces]
        self.updates_in = [held(piece) for piece in self.updates.expected.pieces]
        self.slots_in = slot_numbers(self.gradients.expected.pieces)
        self.slots_out = slot_numbers(self.updates.sent.pieces)

    def _routes(self, boxes: Mapping[Tensor, list[Box]]) -> tuple[list[Route], list[Route]]:
        """The ways of all pieces between all ranks, to the owners and back."""
        to_owners: list[Route] = []
        to_holders: list[Route] = []
        for number, (block, owner) in enumerate(zip(self.blocks, self.owners, strict=True)):
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
        return to_owners, to_holders

    def start(self) -> None:
        """Send the parts of the gradients that this rank holds on their way."""
        grads = {p: None if p.grad is None else local(p.grad) for p, _ in self.grads_out}
        parts = [None if (g := grads[p]) is None else g[box] for p, box in self.grads_out]
        there = [float(part is not None) for part in parts]
        self.gradients.send(parts, torch.tensor(there, device=self.device))

    def receive(self, G: Tensor) -> Tensor:
        """Fill the stack of this rank's blocks; which of them have a gradient [N]."""
        parts, flags = self.gradients.receive()
        copy_(list(zip(self._in_stack(G, self.grads_in), parts, strict=True)))
        missing = G.new_zeros(len(self.mine))
        return missing.index_add_(0, self.slots_in, 1 - flags.to(G.dtype)) == 0

    def send(self, U: Tensor, moving: Tensor) -> None:
        """Send the updates of this rank's blocks, and whether they move, on their way."""
        self.updates.send(self._in_stack(U, self.updates_out), moving[self.slots_out])

    def finish(self, decay: float | Tensor) -> None:
        """Add the updates that arrive, and −decay · W, to what this rank holds of W."""
        parts, flags = self.updates.receive()
        if not parts:
            return
        weights = [local(p)[box] for p, box in self.updates_in]
        if not isinstance(decay, float) or decay != 0:
            shares = (flags * -decay).unbind(0)
            for part, weight, share in zip(parts, weights, shares, strict=True):
                part.addcmul_(weight.to(part.dtype), share)
        torch._foreach_add_(weights, parts)

    @staticmethod
    def _in_stack(
        stack: Tensor, places: Sequence[tuple[int, tuple[int, ...], Box]]
    ) -> list[Tensor]:
        rows = stack.unbind(0)
        return [rows[slot].view(shape)[box] for slot, shape, box in places]

    def totals_(self, sums: Tensor) -> None:
        """Add up over the ranks of the place."""
        dist.all_reduce(sums, group=self.place.group)

    # ---------------------------------------------------------------- checkpoints

    def everywhere(self, stack: Tensor) -> Tensor:
        """Small state of all blocks of the bucket, on every rank."""
        full = stack.new_zeros(len(self.blocks), *stack.shape[1:], device=self.device)
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


def grad_dtype(p: Tensor) -> torch.dtype:
    """The dtype of a parameter's gradient; None in newer versions of torch means any."""
    return getattr(p, "grad_dtype", p.dtype) or torch.promote_types(p.dtype, torch.float32)


def lay_out_gradients(params: Sequence[Tensor]) -> None:
    """Place gradients like their parameters: those of tensor parallelism may still be sums to do.

    This communicates, so the order of the parameters must be the same on all ranks.
    """
    for p in params:
        grad = p.grad
        if isinstance(grad, DTensor) and isinstance(p, DTensor) and grad.placements != p.placements:
            p.grad = grad.redistribute(p.device_mesh, p.placements)


def vote(place: Place, params: Sequence[Tensor], order: float = 2) -> Tensor:
    """What is wrong with the gradient of each parameter on any rank [P].

    0 nothing, 1 its norm of this order is not finite, 2 there is none. Element-wise parameters stay
    on their shards, but all shards of one take a step, or none.
    """
    missing = torch.tensor([2 * (p.grad is None) for p in params], dtype=torch.int32)
    held = [local(p if p.grad is None else p.grad) for p in params]
    # In the precision of the state, where squares that overflow are not finite either.
    held = [part.to(torch.promote_types(part.dtype, torch.float32)) for part in held]
    held = [part if part.numel() > 0 else part.new_zeros(1) for part in held]
    infinite = ~torch.stack(torch._foreach_norm(held, order)).isfinite()
    verdicts = missing.to(infinite.device).maximum(infinite.to(torch.int32))
    dist.all_reduce(verdicts, dist.ReduceOp.MAX, group=place.group)
    return verdicts


def everyones(place: Place, params: Sequence[Tensor], failures: Sequence[Failure]) -> list[Failure]:
    """The failures of all ranks, alike on each: one all-reduce of a number per factor."""
    numbers = {p: n for n, p in enumerate(params)}
    counts = [[0] * max(1, *(p.dim() for p in params)) for _ in params]
    for p, mode, in_a_row in failures:
        row = counts[numbers[p]]
        row[mode] = max(row[mode], in_a_row)
    summary = torch.tensor(counts, device=local(params[0]).device)
    dist.all_reduce(summary, dist.ReduceOp.MAX, group=place.group)
    return [
        Failure(p, mode, in_a_row)
        for p, row in zip(params, summary.tolist(), strict=True)
        for mode, in_a_row in enumerate(row)
        if in_a_row > 0
    ]


def check_agreement(mine: Mapping[str, str], group: dist.ProcessGroup) -> None:
    """Refuse, on every rank alike, what is not the same on all ranks of a group."""
    if dist.get_rank(group) < 0:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the process_group that it was given; pass a group "
            "that it belongs to"
        )
    everyone: list[dict[str, str]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, dict(mine), group=group)
    for rank, theirs in enumerate(everyone):
        for fact in {**everyone[0], **theirs}:
            here, there = everyone[0].get(fact, "none"), theirs.get(fact, "none")
            if here != there:
                raise ValueError(
                    f"{fact} is ({there}) on rank {rank} of the process group and ({here}) on rank "
                    "0; they must agree: pass the same options on all ranks, and seed alike or "
                    "broadcast the model, as DDP does, before building the optimizer"
                )


def facts(options: Options, params: Sequence[Tensor]) -> dict[str, str]:
    """What ranks that share the work on a param group must agree on, in words."""
    values = {name: value for name, value in vars(options).items() if name != "record"}
    if isinstance(values["lr"], Tensor):
        values["lr"] = values["lr"].item()
    if callable(values["tau"]):
        values["tau"] = "a schedule"  # is code, which cannot be compared
    found = {name: repr(value) for name, value in values.items()}
    return found | {f"parameter {number}": described(p) for number, p in enumerate(params)}


def described(p: Tensor) -> str:
    """Shape, dtype, and where a parameter lies or an exact checksum of its bits."""
    what = f"{tuple(p.shape)} {p.dtype}"
    if isinstance(p, DTensor):
        return f"{what} {p.placements} on a mesh of shape {tuple(p.device_mesh.shape)}"
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[p.element_size()]
    bits = p.detach().contiguous().view(integers).flatten().to(torch.int64)
    # Weighted by position, modulo 2⁶⁴: the same on all kinds of processors.
    position = torch.arange(1, 2 * len(bits), 2, device=p.device)
    return f"{what} checksum {int((bits * position).sum()) & (1 << 64) - 1:016x}"
