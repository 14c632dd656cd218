"""What an optimizer is bound to: the tensors of its param groups and the entries of `state`.

Frameworks replace the tensors, move them and materialise them; users write into `state`. The next
call notices: the state follows, or the call is refused.
"""

import sys
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Size, Tensor

from ..options import Options
from .blocks import called, is_sharded, local
from .bucket import Bucket
from .checkpoint import State, collected
from .cutting import SKINNY
from .state import is_own

# What may change about a tensor that stays the same object.
LOOKS = tuple(map(attrgetter, ("__class__", "shape", "dtype", "device")))
PLACEMENT = attrgetter("placements", "device_mesh")

Look = tuple["attrgetter[Any]", list[Tensor], list[Any]]  # how, at which tensors, what was seen


class Bond(NamedTuple):
    """The tensors and entries as they were when state was laid out for them."""

    groups: list[list[Tensor]]
    sizes: list[int]  # of the groups
    looks: list[Look]
    shapes: dict[Tensor, Size]
    names: dict[Tensor, str]
    on_meta: list[Tensor]
    owners: list[Tensor]  # the parameters that have an entry in `state`
    shown: list[dict[str, Any]]  # these entries, as users hold them
    kept: list[dict[str, Any]]  # and what was in them


def check_copyable(known: Mapping[Any, Any]) -> None:
    """Refuse to copy an optimizer that shares work with other ranks."""
    if known:
        raise TypeError(
            "an optimizer that shares its work over ranks cannot be copied or pickled; build "
            "another one and give it this one's state_dict()"
        )


def bind(groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Any]) -> Bond:
    """Remember what the groups and `state` hold."""
    tensors = [list(group["params"]) for group in groups]
    params = list(chain(*tensors))
    sharded = [p for p in params if is_sharded(p)]
    looks = [(look, params, list(map(look, params))) for look in LOOKS]
    if sharded:
        looks.append((PLACEMENT, sharded, list(map(PLACEMENT, sharded))))
    shapes = dict(zip(params, looks[1][2], strict=True))
    owners = [p for p in shapes if p in state]
    shown = [state[p] for p in owners]
    sizes, kept = list(map(len, tensors)), list(map(dict, shown))
    on_meta = [p for p in shapes if p.is_meta]
    return Bond(tensors, sizes, looks, shapes, named(groups), on_meta, owners, shown, kept)


def named(groups: Iterable[Mapping[str, Any]]) -> dict[Tensor, str]:
    """Names of the parameters, where the optimizer was given them."""
    return {
        p: name
        for group in groups
        for p, name in zip(group["params"], group.get("param_names", ()), strict=False)
    }


def as_lists_(groups: Sequence[dict[str, Any]]) -> list[list[Tensor]]:
    """The tensors of every group; iterators are read once, and other objects are refused."""
    for group in groups:
        given = group["params"]
        group["params"] = [given] if isinstance(given, Tensor) else list(given)
        for p in group["params"]:
            if not isinstance(p, Tensor):
                raise TypeError(
                    f"a param group has a {type(p).__name__} among its 'params'; all must be "
                    "tensors: write names into 'param_names', in the same order"
                )
        check_leaves(group["params"])
    tensors = [group["params"] for group in groups]
    seen: set[Tensor] = set()
    for own in map(set, tensors):
        for p in own & seen:
            raise ValueError(f"{called(p, {})} is in more than one param group; leave it in one")
        seen |= own
    return tensors


def listed(group: Mapping[str, Any], keywords: Collection[str]) -> dict[str, Any]:
    """A param group with a list of leaves; what torch will refuse is passed on as it is."""
    given = group["params"]
    params = given if isinstance(given, Tensor | set) else list(given)
    if not isinstance(params, set):
        check_leaves(params)
    grafted = "rms" in keywords and group.get("graft") is not None
    instead = {"rms": None} if grafted else {}  # a graft sets the size of updates
    return {**instead, **group, "params": params}


def check_leaves(params: Tensor | Sequence[Any]) -> None:
    """Refuse tensors that are the results of computations."""
    for entry in [params] if isinstance(params, Tensor) else params:
        p = entry[1] if isinstance(entry, tuple) else entry
        if isinstance(p, Tensor) and not (p.is_leaf or p.retains_grad):
            raise ValueError(
                f"a tensor of shape {tuple(p.shape)} is the result of {p.grad_fn}; parameters must "
                "be leaf tensors: pass the tensors that it was computed from, or detach() it"
            )


def check_kinds(params: Iterable[Tensor], names: Mapping[Tensor, str]) -> None:
    """Refuse tensors that cannot be trained."""
    fake = sys.modules.get("torch._subclasses.fake_tensor")  # no FakeTensor exists without it
    for p in params:
        if not p.is_floating_point():
            raise TypeError(
                f"{called(p, names)} has dtype {p.dtype}; parameters must be real "
                "floating-point tensors: leave it out or view it as real"
            )
        if p.is_inference():
            raise RuntimeError(
                f"{called(p, names)} was made in inference_mode, where nothing can be trained; "
                "make the model outside of it"
            )
        if fake is not None and isinstance(p, fake.FakeTensor):
            raise NotImplementedError(
                f"{called(p, names)} is a FakeTensor; bases are computed from values, which it "
                "does not have. To find out how much memory the state takes, build model and "
                "optimizer on the meta device and add up the sizes in state_dict()"
            )


def check_materialised(bond: Bond) -> None:
    """Refuse parameters that were left on the meta device while the model got other tensors."""
    left = [p for p in bond.on_meta if p.grad is None and p.requires_grad]
    if left:
        raise RuntimeError(
            f"{', '.join(called(p, bond.names) for p in left)} of the optimizer is on the meta "
            "device and has no gradient, so the model has been given another tensor: write the "
            "model's tensors into param_groups[i]['params'], or build the optimizer after "
            "materialising the model"
        )


def warn_if_plain(
    buckets: Sequence[Bucket], options: Sequence[Options], names: Mapping[Tensor, str]
) -> None:
    """Tell the user that no parameter has a basis, because of options or a flattened model.

    The test is about parameters, so ranks that own no blocks come to the same result.
    """
    params = [p for bucket in buckets for p in bucket.parameters]
    if not params or not all(bucket.elementwise for bucket in buckets):
        return
    of_groups = {p: options[bucket.group] for bucket in buckets for p in bucket.parameters}
    matrices = [p for p in params if sum(size != 1 for size in p.shape) > 1]
    longest = max(matrices or params, key=Tensor.numel)
    if not matrices:
        why = (
            "all are vectors. If a framework has flattened the model (DeepSpeed ZeRO, FSDP1), its "
            "matrices have lost rows and columns: shard with FSDP2, or use DDP with process_group="
        )
    elif of_groups[longest].matrices == "adam":
        why = "the matrices have matrices='adam'. Set that only in the param groups that need it"
    else:
        why = (
            "its sides are too long for a basis: longer than max_dim with oversize='identity', or "
            f"{SKINNY} times as long as the other side. Try sides='both', or a larger max_dim"
        )
    warnings.warn(
        f"nothing here has a basis, so this is AdamW: of {len(params)} parameters the largest is "
        f"{called(longest, names)}, and {why}",
        stacklevel=2,
    )


def heirs(bond: Bond, now: Sequence[Sequence[Tensor]], begun: bool) -> dict[Tensor, Tensor]:
    """For each tensor, the one whose state it takes over; tensors that start afresh are left out.

    A tensor that was there before keeps its state. A new tensor takes over from the tensor that is
    gone from its place; if no tensor is gone, it starts afresh. Otherwise nobody knows what it
    replaces: an error, or a fresh start before the run has begun, when there is nothing to lose.
    """
    before = bond.groups if len(bond.groups) == len(now) else [list(chain(*bond.groups))]
    now = now if len(bond.groups) == len(now) else [list(chain(*now))]
    there = set(chain(*now))
    found = {p: p for p in chain(*now) if p in bond.shapes}
    for was, present in zip(before, now, strict=True):
        gone = {p for p in was if p not in there}
        new = [q for q in present if q not in bond.shapes]
        places = zip(was, present, strict=False)
        pairs = {q: p for p, q in places if p in gone and q not in bond.shapes}
        if gone and new and (len(was) != len(present) or len(pairs) < len(new)):
            if not begun:
                continue
            listed = ", ".join(called(p, bond.names) for p in was if p in gone)
            raise ValueError(
                f"the param groups no longer have {listed}, and have new tensors elsewhere; "
                "it is not clear which replaces which: replace tensors one for one, or remove some "
                "first and add others with add_param_group()"
            )
        found |= pairs
    if not begun:
        return {q: p for q, p in found.items() if q.shape == bond.shapes[p]}
    for q, p in found.items():
        if q.shape != bond.shapes[p]:
            raise ValueError(
                f"{called(p, bond.names)} had the shape {tuple(bond.shapes[p])} and has become a "
                f"tensor of shape {tuple(q.shape)}; only a tensor of the same shape can take over "
                "the state: put back the old tensor, or build a new optimizer"
            )
    return found


def rename_(groups: Sequence[dict[str, Any]], bond: Bond, found: Mapping[Tensor, Tensor]) -> None:
    """Let names follow their tensors, but keep new names."""
    old = set(bond.names.values())
    for group in groups:
        if "param_names" in group:
            params, given = group["params"], group["param_names"]
            fresh = (
                [n if n not in old else None for n in given] if len(given) == len(params) else []
            )
            fresh += [None] * (len(params) - len(fresh))
            known = [bond.names.get(found[q]) if q in found else None for q in params]
            triples = enumerate(zip(fresh, known, strict=True))
            group["param_names"] = [a or b or f"parameter {i}" for i, (a, b) in triples]


# -------------------------------------------------------------------- what users wrote


class Edits(NamedTuple):
    """What users wrote into `state`."""

    written: list[tuple[dict[str, Any], str, Tensor, Tensor]]  # where, name, ours, theirs
    afresh: set[Tensor]  # parameters whose entries were taken away
    extras: dict[Tensor, dict[str, Any]]  # entries that are not ours

    def take_(self) -> None:
        """Copy the values that users wrote into our tensors, and show our tensors again."""
        for entry, name, ours, value in self.written:
            ours.copy_(value)
            entry[name] = ours


def read_edits(bond: Bond, state: Mapping[Any, Any], found: Mapping[Tensor, Tensor]) -> Edits:
    """Compare `state` with what it showed; refuse values that do not fit."""
    edits = Edits([], set(), {})
    successor = {p: q for q, p in found.items()}
    for q in state.keys() - bond.shapes.keys() - found.keys():
        if isinstance(state[q], Mapping) and any(map(is_own, state[q])):
            raise ValueError(
                f"state was written for {called(q, bond.names)}, which the optimizer does not "
                "know yet: put it into a param group, call state_dict() once, and write then"
            )
    for p, shown, kept in zip(bond.owners, bond.shown, bond.kept, strict=True):
        if p not in successor:
            continue
        theirs = state[p] if p in state else state.get(successor[p])
        # An entry that was emptied in place is refused below; one that was replaced starts afresh.
        if theirs is None or (not theirs and theirs is not shown):
            edits.afresh.add(p)
            continue
        for name, ours in kept.items():
            if is_own(name) and theirs.get(name) is not ours:
                edits.written.append((theirs, name, ours, _fitting(theirs, name, ours, p, bond)))
        edits.extras[p] = {name: value for name, value in theirs.items() if not is_own(name)}
    return edits


def _fitting(entry: Mapping[str, Any], name: str, ours: Tensor, p: Tensor, bond: Bond) -> Tensor:
    """The value that a user wrote; refused if it does not fit."""
    value = entry.get(name)
    if isinstance(value, int | float):
        value = torch.full_like(ours, value)
    if not isinstance(value, Tensor) or local(value).shape != ours.shape:
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(
            f"{name!r} in the state of {called(p, bond.names)} was set to {found}; it must be a "
            f"tensor of shape {tuple(ours.shape)}: write such a tensor, or delete state[p] to "
            "start this parameter afresh"
        )
    return local(value).detach()


def carried(
    bond: Bond, buckets: Sequence[Bucket], found: Mapping[Tensor, Tensor], edits: Edits
) -> State:
    """The state that each tensor takes over; on the meta device there is none."""
    real = [bucket for bucket in buckets if not bucket.state.step.is_meta]
    there = {p for bucket in real for p in bucket.parameters}
    entries = {p: kept for p, kept in zip(bond.owners, bond.kept, strict=True) if p in there}
    stored = collected(entries, real)
    return {q: stored[p] for q, p in found.items() if p in stored and p not in edits.afresh}
