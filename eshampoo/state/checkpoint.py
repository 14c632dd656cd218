"""State that goes out to a file and comes back: packing, checking, and AdamW's state as a start.

What is stored does not depend on how many ranks there were: per parameter one tensor [blocks, …] of
each kind of state, a DTensor if the parameter is one.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from .. import validate
from ..math.linalg import means, mode_product
from ..options import ADAM_KEYS, RULES
from .bucket import Bucket, entries
from .dtensor import gathered, held_piece, like_parameter

# The entries of every parameter, by their names in `state[p]`.
Entries = dict[Tensor, dict[str, Any]]

# Group keys that cannot be stored, besides a τ schedule, which is code.
WITHOUT_CODE = ("process_group",)


# -------------------------------------------------------------------- out


def collect(buckets: Sequence[Bucket]) -> Entries:
    """Per parameter, copies of what a checkpoint holds; all ranks of a team must call this."""
    stored: Entries = defaultdict(dict)
    for bucket in buckets:
        if bucket.elementwise:
            for p, views in entries(bucket).items():
                stored[p] = {name: like_parameter(view.clone(), p) for name, view in views.items()}
            continue
        counted = bucket.counters.named()
        for name, stack in bucket.named().items():
            small = stack.dim() == 1 or name in counted or name == "norm_sq"
            for p, value in bucket.route.collect(stack, small).items():
                stored[p][bucket.named_as(name, p)] = value
    return stored


def state_dict_of(groups: Sequence[Mapping[str, Any]], stored: Entries) -> dict[str, Any]:
    """A state as plain data, without code, which the constructor of the next optimizer provides."""
    numbers: dict[Tensor, int] = {}
    for index, p in enumerate(p for group in groups for p in group["params"]):
        numbers.setdefault(p, index)
    packed_groups = []
    for group in groups:
        plain = {k: None if callable(v) or k in WITHOUT_CODE else v for k, v in group.items()}
        packed_groups.append({**plain, "params": [numbers[p] for p in group["params"]]})
    state = {number: stored[p] for p, number in numbers.items() if p in stored}
    return {"state": state, "param_groups": packed_groups}


def to_adam(buckets: Sequence[Bucket]) -> Entries:
    """AdamW's entries: M, and for D the diagonal of Q D Qᵀ, which is D times the squares of Q."""
    stored = collect([bucket for bucket in buckets if bucket.elementwise])
    for bucket in [bucket for bucket in buckets if not bucket.elementwise]:
        s, D = bucket.state, bucket.state.named().get("exp_avg_sq")
        if D is None:
            validate.refuse_adam(bucket.method.name)
        M, D = s.exp_avg.to(D.dtype), D.expand(s.exp_avg.shape)
        for mode, Q in s.frames[1].items() if bucket.method.rotated and bucket.blocks else ():
            M, D = mode_product(M, Q, mode), mode_product(D, Q.square(), mode)
        steps = bucket.route.collect(s.step, small=True)
        for name, stack in (("exp_avg", M), ("exp_avg_sq", D)):
            for p, rows in bucket.route.collect(stack, small=True).items():
                entry = stored.setdefault(p, {"step": steps[p].max()})
                whole = entry.setdefault(name, rows.new_zeros(p.shape))
                for number, row in zip(bucket.numbers[p], rows, strict=True):
                    block = bucket.route.blocks[number]
                    block.of(whole).copy_(row.view(block.view_shape))
    for p, entry in stored.items():
        stored[p] = {"step": entry["step"].clamp(min=0)}
        for name in ("exp_avg", "exp_avg_sq"):
            stored[p][name] = like_parameter(held_piece(entry[name], p), p)
    return stored


# -------------------------------------------------------------------- in, without any change


def read_groups(
    state_dict: Mapping[str, Any], groups: Sequence[dict[str, Any]], method: str
) -> list[dict[str, Any]]:
    """Our param groups with the hyperparameters of the saved ones."""
    saved = state_dict["param_groups"]
    validate.check_groups(saved, groups, method)
    return [{**group, **_taken(old, group)} for group, old in zip(groups, saved, strict=True)]


def _taken(old: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters that a saved group brings along, but no keywords of other classes."""
    left = {"params", *WITHOUT_CODE, *(RULES.keys() - group.keys())}
    left |= {"tau"} if old.get("tau") is None else set()
    taken = old if "method" in old else {k: old[k] for k in ADAM_KEYS if k in old}
    return {key: deepcopy(value) for key, value in taken.items() if key not in left}


def saved_entries(state_dict: Mapping[str, Any], params: Sequence[Tensor]) -> Entries:
    """The entries of the parameters that have some: those that were trained."""
    state = state_dict["state"]
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    return {p: dict(state[i]) for p, i in zip(params, indices, strict=True) if state.get(i)}


def check_saved(
    saved: Entries, adam: bool, buckets: Sequence[Bucket], names: Mapping[Tensor, str]
) -> None:
    """Refuse the entries of a state, ours or AdamW's, that do not fit these buckets."""
    wanted = expected(buckets)
    for p, entry in saved.items():
        if adam:
            wanted[p] = {"step": (), "exp_avg": tuple(p.shape), "exp_avg_sq": tuple(p.shape)}
        validate.check_entries(p, entry, wanted.get(p, {}), names)
    for bucket in buckets if adam else ():
        moments = bucket.state.exp_avg_sq, bucket.state.graft_moment
        if moments == (None, None) and any(p in saved for p in bucket.parameters):
            validate.refuse_adam(bucket.method.name)


def expected(buckets: Sequence[Bucket]) -> dict[Tensor, validate.Shapes]:
    """Per parameter, the names and shapes of its state."""
    shapes: dict[Tensor, validate.Shapes] = defaultdict(dict)
    for bucket in buckets:
        for p, numbers in bucket.numbers.items():
            for name, stack in bucket.named().items():
                shape = (len(numbers), *stack.shape[1:])
                if bucket.elementwise:
                    shape = tuple(p.shape) if stack.dim() > 1 else ()
                shapes[p][bucket.named_as(name, p)] = shape
    return shapes


# -------------------------------------------------------------------- in


def fill_(buckets: Sequence[Bucket], saved: Entries, adam: bool) -> None:
    """Write entries into the stacks; parameters without entries start afresh.

    Reading a DTensor communicates; buckets and entries have the same order on all ranks.
    """
    for bucket in buckets:
        bucket.reset_()
        for p, own in entries(bucket).items():
            entry = saved.get(p, {})
            if entry and adam and not bucket.elementwise:
                entry = from_adam(bucket, p, entry)
            names = [name for name in own if name in entry]
            values = [as_tensor(entry[name]) for name in names]
            if bucket.elementwise:
                values = [held_piece(value, p) for value in values]
            else:
                values = bucket.route.held(values, p)
            for name, value in zip(names, values, strict=True):
                own[name].copy_(value)
        bucket.set_clock()


def as_tensor(value: Tensor | float) -> Tensor:
    """An entry; a step may be a number."""
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


def from_adam(bucket: Bucket, p: Tensor, entry: Mapping[str, Any]) -> dict[str, Tensor]:
    """AdamW's state as entries of ours: Q = I, M̃ = exp_avg, D = exp_avg_sq."""
    s, blocks = bucket.state, [bucket.route.blocks[number] for number in bucket.numbers[p]]
    stacks = {}
    for name in ("exp_avg", "exp_avg_sq"):
        value = gathered(entry[name])
        stacks[name] = torch.stack([block.of(value).reshape(block.shape) for block in blocks])
    ours = {"exp_avg": stacks["exp_avg"], "step": torch.full((len(blocks),), float(entry["step"]))}
    moment = s.graft_moment if s.exp_avg_sq is None else s.exp_avg_sq
    if moment is not None:
        ours["exp_avg_sq"] = means(stacks["exp_avg_sq"], moment)
    return {bucket.named_as(name, p): value for name, value in ours.items()}
