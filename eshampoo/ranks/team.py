"""Teams: ranks that share the work on some parameters, who owns what, and what they agree on."""

import zlib
from collections.abc import Mapping, Sequence
from itertools import product, zip_longest
from math import prod
from typing import TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..math.solvers import EIGH_PRODUCTS
from ..options import RULES, Options
from ..state.dtensor import Box, held_sizes, is_sharded, local, shard_box, whole_box
from ..torch_names import flattened, strided_shard
from ..validate import check_member, refuse_difference, refuse_placement

T = TypeVar("T")

# Options that may differ between ranks.
PRIVATE = ("record", "process_group")


@final
class Team:
    """The ranks of a mesh of DTensors, or of a process group."""

    def __init__(self, group: dist.ProcessGroup, mesh: DeviceMesh | None = None) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.coordinates: list[tuple[int, ...]] = []  # of each rank in the mesh
        if mesh is not None:
            places = product(*map(range, mesh.mesh.shape))
            known = dict(zip(mesh.mesh.flatten().tolist(), places, strict=True))
            self.coordinates = [known[rank] for rank in dist.get_process_group_ranks(group)]
        self.loads = [0.0] * self.size
        self.groups: set[int] = set()  # param groups with parameters of this team
        self.layout: list[str] = []  # the method, and the parameters in order
        self.device = torch.device("cpu")  # of the parameters of this team

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh) -> "Team":
        """The ranks of a mesh; a sub-mesh of several dimensions gets a group of its own."""
        if mesh.size() == dist.get_world_size() and dist.group.WORLD is not None:
            return cls(dist.group.WORLD, mesh)
        return cls(mesh.get_group() if mesh.ndim == 1 else flattened(mesh).get_group(), mesh)

    def boxes(self, p: Tensor) -> list[Box]:
        """The rectangle of a parameter that each rank holds."""
        if isinstance(p, DTensor):
            sizes = tuple(p.device_mesh.shape)
            return [shard_box(p.shape, sizes, at, p.placements) for at in self.coordinates]
        return [whole_box(p.shape)] * self.size

    def assign(self, blocks: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[int]:
        """The owner of each block, given the shapes and modes of the blocks."""
        return share_out_([cost(shape, modes) for shape, modes in blocks], self.loads)

    # ---------------------------------------------------------------- what ranks agree on

    def check_call(self, call: str, options: Sequence[Options]) -> None:
        """Refuse, on every rank, a call that is not the same on all."""
        groups = [
            f"param group {i}: {fact}" for i in sorted(self.groups) for fact in facts_of(options[i])
        ]
        self.check_same([call, *self.layout, *groups])

    def check_same(self, facts: Sequence[str]) -> None:
        """Refuse, on every rank, what is not the same on all."""
        everyone = self.of_all(facts)
        for rank, theirs in enumerate(everyone):
            for here, there in zip_longest(everyone[0], theirs, fillvalue="nothing"):
                if here != there:
                    refuse_difference(rank, there, here)

    def of_all(self, words: T) -> list[T]:
        """What each rank has to say: one small all-reduce, if all say the same."""
        mark = zlib.crc32(repr(words).encode())
        marks = torch.tensor([mark, -mark], device=self.device)
        dist.all_reduce(marks, dist.ReduceOp.MAX, group=self.group)
        everyone = [words] * self.size
        if int(marks.sum()) != 0:
            dist.all_gather_object(everyone, words, group=self.group)
        return everyone

    # ---------------------------------------------------------------- in a step

    def add_up_(self, totals: Tensor) -> None:
        """Sum over the ranks."""
        dist.all_reduce(totals, group=self.group)

    def vote(self, params: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Whose gradient is missing, and whose is not finite or overflows, on any rank [P] each."""
        missing = torch.tensor([p.grad is None for p in params])
        infinite = ~(held_sizes(params) < 1)
        votes = torch.stack([missing.to(infinite.device), infinite]).to(torch.int32)
        dist.all_reduce(votes, dist.ReduceOp.MAX, group=self.group)
        missing, infinite = (votes > 0).unbind(0)
        return missing, infinite


# -------------------------------------------------------------------- who owns what


def share_out_(costs: Sequence[float], loads: list[float]) -> list[int]:
    """The owner of each block; its cost is added to `loads`, the work that the ranks have already.

    The most expensive block goes to the rank with the least to do, and so on; of equal ranks, to
    the first.
    """
    owners = [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda n: -costs[n]):
        owners[number] = min(range(len(loads)), key=loads.__getitem__)
        loads[owners[number]] += costs[number]
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


def teams_of(
    params: Sequence[Tensor],
    o: Options,
    index: int,  # of the param group
    about: Sequence[str],  # what the ranks must agree on besides the options
    names: Mapping[Tensor, str],
    known: dict[dist.ProcessGroup | DeviceMesh, Team],
) -> dict[Tensor, Team]:
    """The team of each parameter; this rank works alone on parameters that are not listed.

    A team is made once: `known` keeps it. Only with a process group do ranks compare at once what
    they must agree on; those of DTensors do it in their first call.
    """
    if o.process_group is not None:
        check_member(dist.get_rank(o.process_group))
    teams: dict[Tensor, Team] = {}
    layout = [f"param group {index}: {n} is {layout_of(p, names)}" for n, p in enumerate(params)]
    for p, what in zip(params, layout, strict=True):
        mesh = mesh_of(p) if is_sharded(p) else None
        key = o.process_group if mesh is None else mesh
        if key is None or (mesh is not None and mesh.size() == 1):
            continue
        if key not in known:
            known[key] = Team.of_mesh(mesh) if mesh is not None else Team(key)  # type: ignore
        team = teams[p] = known[key]
        team.groups.add(index)
        team.device = local(p).device
        team.layout += [*about, what]
    if o.process_group is not None:
        team = known.get(o.process_group) or Team(o.process_group)
        values = [f"the values of parameter {n}: {checksum(p)}" for n, p in enumerate(params)]
        team.check_same([*about, *facts_of(o), *layout])
        team.check_same(values)
    return teams


def facts_of(o: Options) -> list[str]:
    """The options of a param group, in words."""
    values = {name: getattr(o, name) for name in RULES if name not in PRIVATE}
    if isinstance(o.lr, Tensor):  # the host does not read it from another device
        values["lr"] = o.lr.item() if o.lr.device.type == "cpu" else "a tensor"
    if callable(o.tau):
        values["tau"] = "a schedule"  # code cannot be compared
    values["the cost of eigh"] = EIGH_PRODUCTS
    return [f"{name}={value!r}" for name, value in values.items()]


def layout_of(p: Tensor, names: Mapping[Tensor, str]) -> str:
    """A parameter's name, shape and dtype, and its placements."""
    what = f"{names.get(p, 'without a name')} {tuple(p.shape)} {p.dtype}"
    if isinstance(p, DTensor):
        what += f" {p.placements} on a mesh of shape {tuple(p.device_mesh.shape)}"
    return what


def checksum(p: Tensor) -> str:
    """An exact checksum of the bits of a parameter; "" for a DTensor, whose ranks hold others."""
    if isinstance(p, DTensor) or p.is_meta:
        return ""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[p.element_size()]
    bits = p.detach().contiguous().view(integers).flatten().to(torch.int64)
    # Weighted by position, modulo 2⁶⁴: the same on all kinds of processors.
    position = torch.arange(1, 2 * len(bits), 2, device=p.device)
    return f"checksum {int((bits * position).sum()) & (1 << 64) - 1:016x}"


def mesh_of(p: Tensor) -> DeviceMesh:
    """The mesh of a DTensor parameter; refuse a parameter that this library cannot handle."""
    assert isinstance(p, DTensor)
    if p.device_mesh.get_coordinate() is None:
        refuse_placement(p, f"lies on {p.device_mesh}, without rank {dist.get_rank()}")
    for placement in p.placements:
        if not isinstance(placement, Shard | Replicate | strided_shard()):
            refuse_placement(p, f"has the placement {placement!r}")
    return p.device_mesh
