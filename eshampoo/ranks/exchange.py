"""The route over ranks: gradients of a bucket to the owners of its blocks, and updates back."""

from collections.abc import Mapping, Sequence
from itertools import chain
from math import prod
from typing import NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ..math.linalg import BITS
from ..state.blocks import Block, by_parameter
from ..state.dtensor import Box, extent, gathered, grad_dtype, intersection, local, within
from ..state.route import Part, scale_
from ..torch_names import foreach_add_
from .team import Team


class Piece(NamedTuple):
    """A piece of a block that travels."""

    block: int  # number in the bucket
    box: Box  # in the parameter


# The sending rank, the receiving rank, and what travels.
Send = tuple[int, int, Piece]


class AllToAll:
    """One all-to-all: which pieces this rank sends to, and receives from, every other rank.

    Every piece is followed by a flag: a gradient may be missing, a block may stand still.
    """

    def __init__(self, team: Team, sends: Sequence[Send], like: Tensor) -> None:
        self.team, self.like = team, like
        ours, theirs = ([s for s in sends if s[end] == team.rank] for end in (0, 1))
        ranks = range(team.size)
        outgoing = [[piece for _, target, piece in ours if target == rank] for rank in ranks]
        incoming = [[piece for source, _, piece in theirs if source == rank] for rank in ranks]
        self.sent, self.expected = list(chain(*outgoing)), list(chain(*incoming))
        self.sizes_out = [sum(prod(extent(p.box)) + 1 for p in pieces) for pieces in outgoing]
        self.sizes_in = [sum(prod(extent(p.box)) + 1 for p in pieces) for pieces in incoming]
        self.shapes = [extent(piece.box) for piece in self.expected]
        self.lengths = [length for shape in self.shapes for length in (prod(shape), 1)]
        # The same on all ranks, because every rank knows all sends.
        self.stays = all(source == target for source, target, _ in sends)
        self.inbox = self.outbox = like.new_empty(0)
        self.work: dist.Work | None = None

    def send(self, pieces: Sequence[Tensor], flags: Tensor) -> None:
        """Send a tensor and a flag for every piece, in the order of `sent`."""
        dtype = self.like.dtype
        pairs = zip(pieces, torch.split(flags.to(dtype), 1), strict=True) if pieces else ()
        flat = [x for piece, mark in pairs for x in (piece.reshape(-1).to(dtype), mark)]
        outbox = torch.cat([self.like.new_empty(0), *flat])
        if self.stays:
            self.inbox = outbox
            return
        self.inbox = self.like.new_empty(sum(self.sizes_in))
        sizes, group = (self.sizes_in, self.sizes_out), self.team.group
        self.work = dist.all_to_all_single(self.inbox, outbox, *sizes, group=group, async_op=True)
        self.outbox = outbox  # it must live until it has been sent

    def receive(self) -> tuple[list[Tensor], Tensor]:
        """A tensor and a flag for every piece, in the order of `expected`."""
        if self.work is not None:
            self.work.wait()
        split = torch.split(self.inbox, self.lengths)
        self.inbox = self.outbox = self.like.new_empty(0)
        self.work = None
        pieces = [piece.view(shape) for piece, shape in zip(split[::2], self.shapes, strict=True)]
        return pieces, torch.cat([self.like.new_empty(0), *split[1::2]])


@final
class Exchange:
    """The `Route` of a bucket whose blocks have owners."""

    def __init__(
        self, team: Team, blocks: Sequence[Block], owners: Sequence[int], like: Tensor
    ) -> None:
        self.team, self.blocks, self.owners = team, list(blocks), list(owners)
        self.mine = [n for n, owner in enumerate(owners) if owner == team.rank]
        self.like = like
        self.positions = {number: position for position, number in enumerate(self.mine)}
        boxes = {p: team.boxes(p) for p in dict.fromkeys(block.parameter for block in blocks)}
        to_owners, to_holders = self._sends(boxes)
        # Gradients travel in their own dtype if they share one, updates as they were computed.
        dtypes = {grad_dtype(p) for p in boxes}
        dtype = dtypes.pop() if len(dtypes) == 1 else like.dtype
        self.gradients = AllToAll(team, to_owners, like.to(dtype))
        self.updates = AllToAll(team, to_holders, like)

        def held(piece: Piece) -> tuple[Tensor, Box]:
            p = self.blocks[piece.block].parameter
            return p, within(piece.box, boxes[p][team.rank])

        def stacked(piece: Piece) -> tuple[int, tuple[int, ...], Box]:
            box = self.blocks[piece.block].box
            return self.positions[piece.block], extent(box), within(piece.box, box)

        # Where pieces lie in what this rank holds, and in the stacks of the blocks that it owns.
        self.grads_out = [held(piece) for piece in self.gradients.sent]
        self.grads_in = [stacked(piece) for piece in self.gradients.expected]
        self.updates_out = [stacked(piece) for piece in self.updates.sent]
        self.updates_in = [held(piece) for piece in self.updates.expected]
        self.positions_in, self.positions_out = (
            torch.tensor([position for position, *_ in places], dtype=torch.long).to(like.device)
            for places in (self.grads_in, self.updates_out)
        )
        # During a step:
        # Gradients and which blocks have one; then, part by part, updates and which blocks move.
        self.arrived: tuple[Tensor, Tensor] | None = None
        self.sent = False  # whether the updates have left

    def _sends(self, boxes: Mapping[Tensor, list[Box]]) -> tuple[list[Send], list[Send]]:
        """How all pieces travel between all ranks, to the owners and back."""
        to_owners: list[Send] = []
        to_holders: list[Send] = []
        for number, (block, owner) in enumerate(zip(self.blocks, self.owners, strict=True)):
            holders: dict[tuple[tuple[int, int], ...], list[int]] = {}
            for rank, held in enumerate(boxes[block.parameter]):
                box = intersection(block.box, held)
                if box is not None:
                    holders.setdefault(tuple((c.start, c.stop) for c in box), []).append(rank)
                    to_holders.append((owner, rank, Piece(number, box)))
            for bounds, ranks in holders.items():
                # Of several replicas, the owner's own is sent, or one that varies with the owner.
                source = owner if owner in ranks else ranks[owner % len(ranks)]
                to_owners.append((source, owner, Piece(number, tuple(slice(*b) for b in bounds))))
        return to_owners, to_holders

    # ---------------------------------------------------------------- a step

    def present(self) -> list[bool]:
        """Any block may have a gradient: only the messages from other ranks will tell."""
        return [True] * len(self.mine)

    def send_gradients(self, vote: bool) -> None:
        """Send off the pieces of the gradients that this rank holds."""
        self.arrived, self.sent = None, False
        grads = {p: None if p.grad is None else local(p.grad) for p, _ in self.grads_out}
        held = [
            torch.zeros_like(local(p)[box]) if (g := grads[p]) is None else g[box]
            for p, box in self.grads_out
        ]
        present = [float(grads[p] is not None) for p, _ in self.grads_out]
        self.gradients.send(held, torch.tensor(present, device=self.like.device))

    def gather(self, part: Part) -> tuple[Tensor, Tensor | None]:
        """The gradients of a part, and which of its blocks have one [N]."""
        grads, present = self._receive()
        run = slice(part.start, part.stop)
        return grads[run], present[run]

    def _receive(self) -> tuple[Tensor, Tensor]:
        """Wait for the gradients from other ranks, and lay them out as a stack."""
        if self.arrived is None:
            G = self.like.new_empty(len(self.mine), *self.blocks[0].shape)
            pieces, flags = self.gradients.receive()
            for row, piece in zip(self._in_stack(G, self.grads_in), pieces, strict=True):
                row.copy_(piece)
            missing = G.new_zeros(len(self.mine))
            missing.index_add_(0, self.positions_in, 1 - flags.to(G.dtype))
            self.arrived = G, missing == 0
        return self.arrived

    def deliver_(self, part: Part, decay: float) -> None:
        """Keep updates, in place of gradients, until they leave; who holds W applies the decay."""
        updates, moves = self._receive()
        scale_(part.G, part.c.minus_lr, part.c.moves)
        updates[part.start : part.stop] = part.G
        moves[part.start : part.stop] = part.c.moves.squeeze(1)

    def send_updates(self) -> None:
        """Send the updates to the ranks that hold the parameters."""
        if self.sent:
            return
        updates, moves = self._receive()
        leaving = self._in_stack(updates, self.updates_out)
        self.updates.send(leaving, moves[self.positions_out])
        self.sent, self.arrived = True, None

    def apply_updates_(self, decay: float | Tensor) -> None:
        """Add the updates that arrive, and −decay · W, to what this rank holds of W."""
        pieces, flags = self.updates.receive()
        if not pieces:
            return
        weights = [local(p)[box] for p, box in self.updates_in]
        if not isinstance(decay, float) or decay != 0:
            bits = BITS[flags.dtype]
            shares, kept = (flags * -decay).unbind(0), flags.to(bits).unbind(0)
            for piece, weight, share, moves in zip(pieces, weights, shares, kept, strict=True):
                W = weight.to(piece.dtype, copy=True)
                W.view(bits).mul_(moves)
                piece.addcmul_(W, share)
        foreach_add_(weights, pieces)

    @staticmethod
    def _in_stack(
        stack: Tensor, places: Sequence[tuple[int, tuple[int, ...], Box]]
    ) -> list[Tensor]:
        rows = stack.unbind(0)
        return [rows[position].view(shape)[box] for position, shape, box in places]

    # ---------------------------------------------------------------- checkpoints

    def collect(self, stack: Tensor, small: bool) -> dict[Tensor, Tensor]:
        """Small state is the same on every rank; the rest is cut by rows, as DTensors are.

        What a checkpoint stores must not depend on who owns a block. Only the owner has numbers
        other than zero, so a sum over the ranks is exact.
        """
        if small:
            whole = stack.new_zeros(len(self.blocks), *stack.shape[1:], device=self.like.device)
            whole[self.mine] = stack.to(whole.device)
            dist.all_reduce(whole, group=self.team.group)
            whole = whole.to(stack.device)
            return {p: whole[numbers] for p, numbers in by_parameter(self.blocks).items()}
        stored = {}
        for p, numbers in by_parameter(self.blocks).items():
            own = stack.new_zeros(len(numbers), *stack.shape[1:])
            for row, number in enumerate(numbers):
                if number in self.positions:
                    own[row] = stack[self.positions[number]]
            stored[p] = self._summed(own, p)
        return stored

    def held(self, values: Sequence[Tensor], p: Tensor) -> list[Tensor]:
        """The rows of the blocks that this rank owns."""
        numbers = by_parameter(self.blocks)[p]
        rows = [row for row, number in enumerate(numbers) if number in self.positions]
        return [gathered(value)[rows] for value in values]

    def _summed(self, own: Tensor, p: Tensor) -> Tensor:
        """The sum over the ranks, cut by rows over the last dimension of the parameter's mesh."""
        if not isinstance(p, DTensor):
            dist.all_reduce(own, group=self.team.group)
            return own
        mesh, replicas = p.device_mesh, p.device_mesh.ndim - 1
        everyones = DTensor.from_local(own, mesh, [Partial()] * mesh.ndim, run_check=False)
        return everyones.redistribute(mesh, [*[Replicate()] * replicas, Shard(1)])
