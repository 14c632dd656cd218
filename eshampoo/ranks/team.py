"""Teams: the ranks that share the work on some parameters, and who owns what."""

import heapq
import zlib
from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..options import Options
from ..state.blocks import Box, Failure, called, extent, held_sizes, is_sharded, local
from .agreement import check_agreement, difference, facts, facts_of_call
from .boxes import shard_box
from .torch_names import StridedShard, default_group, flattened, root_ranks


@final
class Team:
    """The ranks of a mesh of DTensors, or of a process group."""

    def __init__(self, group: dist.ProcessGroup, mesh: DeviceMesh | None = None) -> None:
        self.group, self.mesh = group, mesh
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.coordinates = [self._coordinate(rank) for rank in range(self.size)]
        self.loads = [0.0] * self.size
        self.unreported: list[Failure] = []
        self.groups: set[int] = set()  # param groups with parameters of this team
        self.device = torch.device("cpu")  # of the parameters of this team
        self.differed = torch.tensor(False)  # whether calls differed between ranks, as far as known

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh) -> "Team":
        """The ranks of a mesh; a sub-mesh of several dimensions gets a group of its own."""
        if mesh.size() == dist.get_world_size():
            return cls(default_group(), mesh)
        return cls(mesh.get_group() if mesh.ndim == 1 else flattened(mesh).get_group(), mesh)

    def _coordinate(self, rank: int) -> tuple[int, ...]:
        if self.mesh is None:
            return ()
        world_rank = dist.get_global_rank(self.group, rank)
        return tuple(int(i) for i in (self.mesh.mesh == world_rank).nonzero()[0])

    def boxes(self, p: Tensor) -> list[Box]:
        """The rectangle of a parameter that each rank holds."""
        if isinstance(p, DTensor):
            sizes = tuple(p.device_mesh.shape)
            return [shard_box(p.shape, sizes, at, p.placements) for at in self.coordinates]
        return [tuple(slice(0, size) for size in p.shape)] * self.size

    def assign(self, blocks: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[int]:
        """The owner of each block, given the shapes and modes of the blocks."""
        return share_out_([cost(shape, modes) for shape, modes in blocks], self.loads)

    # ---------------------------------------------------------------- at every call

    def check_call(self, call: str, options: Sequence[Options], read: bool) -> None:
        """Refuse, on every rank, a call that is not the same on all: one small all-reduce.

        Without `read` the host does not wait for the device, and a difference is found at the next
        call with `read`.
        """
        mine = facts_of_call(call, {index: options[index] for index in sorted(self.groups)})
        mark = zlib.crc32(repr(mine).encode())
        marks = torch.tensor([mark, -mark], device=self.device)
        try:
            dist.all_reduce(marks, dist.ReduceOp.MAX, group=self.group)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank} of {self.size} has called {call}, and not all others have: "
                f"{error}. Every rank must make the same calls: find out why the others did not"
            ) from error
        self.differed = self.differed.to(self.device) | (marks.sum() != 0)
        if read and self.differed:
            self.differed = torch.tensor(False)
            found = (
                difference(mine, self.group) or "an earlier call, or an option, was not the same"
            )
            raise ValueError(
                f"{found}; ranks that share work must make the same calls with the same options. "
                "This call has changed nothing. Write into param groups on all ranks, call step() "
                "and state_dict() on all ranks, and continue from a checkpoint"
            )

    def any_words(self, words: str) -> str:
        """The words of the first rank that has any."""
        everyone = [""] * self.size
        dist.all_gather_object(everyone, words, group=self.group)
        return next((theirs for theirs in everyone if theirs), "")

    # ---------------------------------------------------------------- in a step

    def lay_out_gradient(self, p: Tensor) -> None:
        """Place a gradient like its parameter; tensor parallelism may leave it as a partial sum.

        This communicates, so the order of the parameters must be the same on all ranks.
        """
        grad = p.grad
        if isinstance(grad, DTensor) and isinstance(p, DTensor) and grad.placements != p.placements:
            p.grad = grad.redistribute(p.device_mesh, p.placements)

    def sizes(self, params: Sequence[Tensor]) -> Tensor:
        """`held_sizes` of whole gradients [P], over all ranks; replicas count once."""
        replicas = [sum(prod(extent(box)) for box in self.boxes(p)) / p.numel() for p in params]
        squares = held_sizes(params).square()
        squares /= squares.new_tensor(replicas)
        dist.all_reduce(squares, group=self.group)
        return squares.sqrt()

    def vote(self, params: Sequence[Tensor]) -> Tensor:
        """What is wrong with the gradient of each parameter on any rank [P].

        0: nothing; 1: it has NaN or Inf, or its squares overflow; 2: there is none. Element-wise
        parameters stay on their shards, but either all shards of a parameter take a step or none.
        """
        missing = torch.tensor([2 * (p.grad is None) for p in params], dtype=torch.int32)
        infinite = ~(held_sizes(params) < 1)
        verdicts = missing.to(infinite.device).maximum(infinite.to(torch.int32))
        dist.all_reduce(verdicts, dist.ReduceOp.MAX, group=self.group)
        return verdicts

    def everyones_failures(self, params: Sequence[Tensor]) -> list[Failure]:
        """The unreported failures of all ranks, the same on each: one all-reduce."""
        numbers = {p: n for n, p in enumerate(params)}
        counts = [[0] * max(1, *(p.dim() for p in params)) for _ in params]
        for p, mode, in_a_row in self.unreported:
            row = counts[numbers[p]]
            row[mode] = max(row[mode], in_a_row)
        self.unreported = []
        summary = torch.tensor(counts, device=local(params[0]).device)
        dist.all_reduce(summary, dist.ReduceOp.MAX, group=self.group)
        return [
            (p, mode, in_a_row)
            for p, row in zip(params, summary.tolist(), strict=True)
            for mode, in_a_row in enumerate(row)
            if in_a_row > 0
        ]


def everyones(
    failures: Sequence[Failure], teams: Mapping[Tensor, Team], due: Collection[object]
) -> list[Failure]:
    """The failures to raise now; at calls with checks, ranks tell each other about shared blocks.

    A skipped gradient delays the check of its block, which only the owner knows. So all ranks count
    calls, and failures between two such calls wait. `due` are the teams with a check.
    """
    found = [failure for failure in failures if failure[0] not in teams]
    for failure in failures:
        if failure[0] in teams:
            teams[failure[0]].unreported.append(failure)
    for team in dict.fromkeys(teams.values()):
        if team in due:
            found += team.everyones_failures([p for p, t in teams.items() if t is team])
    return found


def share_out_(costs: Sequence[float], loads: list[float]) -> list[int]:
    """The owner of each block; its cost is added to `loads`, the work that the ranks have already.

    The most expensive block goes to the rank with the least to do, and so on; of equal ranks, to
    the first.
    """
    owners = [0] * len(costs)
    idlest = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(idlest)
    for number in sorted(range(len(costs)), key=lambda n: -costs[n]):
        load, owner = idlest[0]
        owners[number], loads[owner] = owner, load + costs[number]
        heapq.heapreplace(idlest, (loads[owner], owner))
    return owners


def cost(shape: Sequence[int], modes: Sequence[int]) -> float:
    """Work on a block: decompositions m³ + n³ and products mn(m + n), for modes with a basis.

    A block without a basis has only products with its smaller side (Muon).
    """
    numel = prod(shape)
    if not modes:
        return float(numel * min(shape))
    return float(sum(shape[i] ** 3 + numel * shape[i] for i in modes))


# -------------------------------------------------------------------- which team


def agreed_teams(
    params: Sequence[Tensor],
    o: Options,
    index: int,  # of the param group
    about: Mapping[str, str],  # what the ranks must agree on besides the options
    every: Sequence[Tensor],  # the parameters of all groups
    names: Mapping[Tensor, str],
    known: dict[dist.ProcessGroup | DeviceMesh, Team],
) -> dict[Tensor, Team]:
    """The teams of a param group, once its ranks agree on it."""
    if o.process_group is not None:
        check_agreement({**about, **facts(o, params)}, o.process_group)
    check_meshes(every, names)
    teams = find_teams(params, o.process_group, known)
    for p, team in teams.items():
        team.groups.add(index)
        team.device = local(p).device
    return teams


def find_teams(
    params: Sequence[Tensor],
    group: dist.ProcessGroup | None,
    known: dict[dist.ProcessGroup | DeviceMesh, Team],
) -> dict[Tensor, Team]:
    """The team of each parameter; this rank works alone on parameters that are not listed.

    A team is made once: `known` keeps it.
    """
    found = {}
    for p in params:
        mesh = mesh_of(p) if is_sharded(p) else None
        key = group if mesh is None else mesh
        if key is None or (mesh is not None and mesh.size() == 1):
            continue
        if key not in known:
            known[key] = Team.of_mesh(mesh) if mesh is not None else Team(key)  # type: ignore
        found[p] = known[key]
    return found


def mesh_of(p: Tensor) -> DeviceMesh:
    """The mesh of a DTensor parameter; refuse a parameter that this library cannot handle."""
    assert isinstance(p, DTensor)
    if p.device_mesh.get_coordinate() is None:
        raise ValueError(
            f"a parameter of shape {tuple(p.shape)} lies on {p.device_mesh}, to which rank "
            f"{dist.get_rank()} does not belong; give the optimizer of each rank only parameters "
            "that it has a part in"
        )
    for placement in p.placements:
        if not isinstance(placement, Shard | StridedShard | Replicate):
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} has the placement {placement!r}; it must "
                "be sharded or replicated: redistribute it before building the optimizer"
            )
    return p.device_mesh


def check_meshes(params: Sequence[Tensor], names: Mapping[Tensor, str]) -> None:
    """Refuse meshes if some ranks know one of them and others know both.

    All ranks of a mesh know its slices. With other meshes, ranks that have no part in a parameter
    would raise an error, or not have the parameter, and the other ranks would wait for them. Every
    rank sees the same parameters, so all raise the same error without communicating.
    """
    meshes: dict[DeviceMesh, Tensor] = {}
    for p in params:
        if isinstance(p, DTensor):
            meshes.setdefault(p.device_mesh, p)
    known = [(p, root_ranks(mesh)) for mesh, p in meshes.items()]
    for p, ranks in known:
        first, expected = known[0]
        if ranks != expected:
            raise ValueError(
                f"{called(first, names)} lies on a mesh cut from the ranks {expected}, and "
                f"{called(p, names)} on one cut from {ranks}; the meshes of an optimizer must have "
                "the same ranks or be slices of one mesh: slice one init_device_mesh, or build an "
                "optimizer for each mesh, on its ranks only"
            )
