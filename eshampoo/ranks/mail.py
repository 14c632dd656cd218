"""Messages: how pieces of blocks lie in a buffer, and one all-to-all that carries them."""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..math.foreach import foreach_copy_
from ..state.blocks import Box, extent
from .team import Team


class Piece(NamedTuple):
    """A piece of a block that travels."""

    block: int  # number in the bucket
    box: Box  # in the parameter


# The sending rank, the receiving rank, and what travels.
Way = tuple[int, int, Piece]


class Parcels:
    """How the pieces for every rank lie in one buffer: rank by rank, flags after the pieces."""

    def __init__(self, parcels: Sequence[Sequence[Piece]], device: torch.device) -> None:
        self.pieces = [piece for parcel in parcels for piece in parcel]
        self.shapes = [extent(piece.box) for piece in self.pieces]
        self.sizes: list[int] = []  # of the parcels
        self.lengths: list[int] = []  # of pieces and runs of flags, in the order of the buffer
        self.numbers: list[int] = []  # which of the lengths are those of pieces
        flags: list[int] = []
        for parcel in parcels:
            numels = [prod(extent(piece.box)) for piece in parcel]
            self.numbers += range(len(self.lengths), len(self.lengths) + len(parcel))
            self.lengths += [*numels, len(parcel)]
            self.sizes.append(sum(numels) + len(parcel))
            flags += range(sum(self.sizes) - len(parcel), sum(self.sizes))
        self.flags = torch.tensor(flags, dtype=torch.long, device=device)  # where flags lie

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Views of all pieces in a buffer."""
        split = torch.split_with_sizes(buffer, self.lengths)
        return [split[k].view(shape) for k, shape in zip(self.numbers, self.shapes, strict=True)]


class Mail:
    """One all-to-all: which pieces this rank sends to, and receives from, every other rank.

    Every piece travels with a flag: a gradient may be missing, a block may stand still.
    """

    def __init__(self, team: Team, ways: Sequence[Way], like: Tensor) -> None:
        self.team, self.like = team, like
        sent: list[list[Piece]] = [[] for _ in range(team.size)]
        expected: list[list[Piece]] = [[] for _ in range(team.size)]
        for source, target, piece in ways:
            if source == team.rank:
                sent[target].append(piece)
            if target == team.rank:
                expected[source].append(piece)
        self.sent, self.expected = Parcels(sent, like.device), Parcels(expected, like.device)
        # The same on all ranks, because every rank knows all ways.
        self.stays = all(source == target for source, target, _ in ways)
        self.inbox = like.new_empty(0)
        self.work: dist.Work | None = None

    def send(self, pieces: Sequence[Tensor | None], flags: Tensor) -> None:
        """Send a tensor (None: nothing) and a flag for every piece, in the order of `sent`."""
        outbox = self.like.new_empty(sum(self.sent.sizes))
        views = self.sent.views(outbox)
        copy_([(v, piece) for v, piece in zip(views, pieces, strict=True) if piece is not None])
        for view, piece in zip(views, pieces, strict=True):
            if piece is None:
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
            group=self.team.group,
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
        foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])
