"""Parts of a bucket, how gradients reach them, and how updates reach the parameters."""

from collections.abc import Sequence
from itertools import compress
from math import prod
from typing import TYPE_CHECKING, TypeAlias, final

import torch
from torch import Tensor

from ..math.linalg import BITS
from ..torch_names import foreach_add_, foreach_copy_
from .blocks import Block, by_parameter, runs
from .dtensor import gathered, is_sharded
from .state import State

if TYPE_CHECKING:
    from ..ranks.exchange import Exchange
    from ..ranks.team import Team
    from ..step.phases import Coefficients


class Part:
    """Blocks of a bucket that are worked on together: views of their state, and working memory."""

    # What a step knows about the part.
    G: Tensor  # [N, d_1, …, d_k]: the gradients, then G̃, then the update U
    c: "Coefficients"
    norms: Tensor  # [2, N]: squared norms of the grafting method's update and of U
    here: list[bool]  # which runs may have a gradient

    def __init__(self, state: State, blocks: Sequence[Block], start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self.state = state.narrow(start, stop)
        self.blocks = blocks[start:stop]
        self.runs = runs(self.blocks)
        self.parameters = [run.parameter for run in self.runs]
        self.shapes = [run.view_shape for run in self.runs]
        # Whether every block is a whole parameter, as nearly all are: then nothing is cut.
        self.uncut = all(run.total == 1 and not is_sharded(run.parameter) for run in self.runs)
        block = state.exp_avg.shape[1:]
        sizes, room = [prod(shape) for shape in self.shapes], prod(block)
        # Vectors that are shorter than the rows of their stack are padded with zeros.
        self.padded = any(size < room for size in sizes)
        self.lengths = [length for size in sizes for length in (size, max(0, room - size))]
        # Whether the runs are single rows, and whether these have the shape of the blocks.
        self.single = sizes == [room] * (stop - start)
        self.alike = self.shapes == [block if self.single else (size,) for size in sizes]
        self.nbytes = (stop - start) * room * state.step.element_size()

    def rows(self, X: Tensor) -> list[Tensor]:
        """The entries of each run in a stack, in the shape that they have in the parameter."""
        # One operation for all: run, padding, run, padding, …
        rows = X.unbind(0) if self.single else torch.split(X.view(-1), self.lengths)[::2]
        if self.alike:
            return list(rows)
        return [row.view(shape) for row, shape in zip(rows, self.shapes, strict=True)]

    def cut(self, tensors: list[Tensor], here: list[bool]) -> list[Tensor]:
        """The runs `here`, cut from tensors that are laid out like their parameters."""
        pairs = zip(compress(self.runs, here), tensors, strict=True)
        return tensors if self.uncut else [run.of(tensor) for run, tensor in pairs]


# The way of the blocks of one bucket: in this process, or over ranks.
Route: TypeAlias = "Local | Exchange"


@final
class Local:
    """The route in one process: gradients and parameters are at hand.

    Element-wise state of a sharded parameter stays with its shards, and so is local too; but either
    all shards of a parameter take a step or none, so the ranks that hold them vote.
    """

    def __init__(self, blocks: list[Block], voters: "Team | None" = None) -> None:
        self.blocks, self.mine = blocks, range(len(blocks))
        self.team, self.voters = None, voters
        self.parameters = [block.parameter for block in blocks]
        self.votes: tuple[Tensor, Tensor] | None = None  # [N]: missing, not finite, on any rank

    def present(self) -> list[bool]:
        """Which of the blocks have a gradient; of shards, only the vote tells."""
        return [self.voters is not None or p.grad is not None for p in self.parameters]

    def send_gradients(self, vote: bool) -> None:
        """Gradients stay, and shards vote."""
        self.votes = self.voters.vote(self.parameters) if vote and self.voters else None

    def gather(self, part: Part) -> tuple[Tensor, Tensor | None]:
        """Write the gradients of the blocks that have one into a stack; zero elsewhere."""
        here = [p.grad is not None for p in part.parameters]
        G, every = torch.empty_like(part.state.exp_avg, dtype=part.state.step.dtype), all(here)
        if part.padded or not every:
            G.zero_()
        grads = [g for p in part.parameters if (g := p.grad) is not None]
        foreach_copy_(list(compress(part.rows(G), here)), part.cut(grads, here))
        part.here = here
        if self.votes is not None:
            missing, infinite = (votes[part.start : part.stop] for votes in self.votes)
            return G.masked_fill_(infinite.view(-1, *[1] * (G.dim() - 1)), torch.nan), ~missing
        # If all blocks have a gradient, nothing is copied to the device.
        blocks = [] if every else [block.parameter.grad is not None for block in part.blocks]
        return G, torch.tensor(blocks, device=G.device) if blocks else None

    def deliver_(self, part: Part, decay: float) -> None:
        """Move the parameters at once."""
        U, here = part.G, part.here
        updates = list(compress(part.rows(U), here))
        weights = part.cut(list(compress(part.parameters, here)), here)
        if decay != 0:
            foreach_add_(updates, weights, alpha=decay)
        scale_(U, part.c.minus_lr, part.c.moves)
        foreach_add_(weights, updates)

    def send_updates(self) -> None:
        """Updates are where they belong."""

    def apply_updates_(self, decay: float | Tensor) -> None:
        """Updates have arrived."""

    def collect(self, stack: Tensor, small: bool) -> dict[Tensor, Tensor]:
        """Copies for each parameter, without the rest of the stack."""
        return {p: stack[n[0] : n[-1] + 1].clone() for p, n in by_parameter(self.blocks).items()}

    def held(self, values: Sequence[Tensor], p: Tensor) -> list[Tensor]:
        """All rows."""
        return [gathered(value) for value in values]


def scale_(U: Tensor, minus_lr: Tensor, moves: Tensor) -> None:
    """U ← −α U; for blocks that stand still −0.0, which changes no bit of what it is added to.

    Their `minus_lr` [N, 1] is −0.0.
    """
    bits, U = BITS[U.dtype], U.view(len(U), -1)
    U.view(bits).mul_(moves.to(bits))
    U.mul_(minus_lr)
