"""State that goes out to a file and comes back: packing, checking, and AdamW's state as a start.

What is stored does not depend on how many ranks there were: per parameter one tensor [blocks, …] of
each kind of state, a DTensor if the parameter is one.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from ..math.linalg import means
from ..methods import Method
from ..options import ADAM_KEYS
from .blocks import called, is_sharded
from .bucket import Bucket

State = dict[Tensor, dict[str, Tensor]]

ADAM_STATE = {"step", "exp_avg", "exp_avg_sq"}
COUNTERS = ("basis_checks", "basis_computations", "basis_failures", "basis_waited")
# What states of versions without a budget lack: it is zero then.
OPTIONAL = ("basis_waited", "basis_spent")
# Group keys that cannot be stored; a τ schedule, which is code, is the other.
WITHOUT_CODE = ("process_group",)


def pack(
    state_dict: dict[str, Any], params: Sequence[Tensor], buckets: Sequence[Bucket]
) -> dict[str, Any]:
    """Plain data: views that would drag a whole stack into the file are copied, and what is code is
    left to the constructor of the optimizer that loads."""
    state: State = {p: {} for bucket in buckets for p in bucket.parameters}
    for p, values in (pair for bucket in buckets for pair in _stored(bucket)):
        state[p].update(values)
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    groups = [
        {key: None if callable(v) or key in WITHOUT_CODE else v for key, v in group.items()}
        for group in state_dict["param_groups"]
    ]
    packed = {i: state[p] for i, p in zip(indices, params, strict=True) if p in state}
    return {**state_dict, "state": packed, "param_groups": groups}


def _stored(bucket: Bucket) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Per parameter, what a checkpoint holds of a bucket; ranks that share it all take part."""
    if bucket.elementwise:
        return [(p, {n: _own(view, p) for n, view in views.items()}) for p, views in bucket.views()]
    stored: State = {p: {} for p in bucket.parameters}
    for name, stack in bucket.named().items():
        small = stack.dim() == 1 or name in bucket.counters.named()
        for p, value in bucket.route.collect(stack, small).items():
            stored[p][bucket.named_as(name, p)] = value
    return list(stored.items())


def _own(value: Tensor, p: Tensor) -> Tensor:
    """An element-wise state, placed like its parameter, without the rest of its stack."""
    if is_sharded(p) and value.dim() > 0:
        from ..ranks.boxes import like_parameter  # there are DTensors, so it is imported already

        return like_parameter(value.clone(), p)
    return value.clone()


def read_groups(
    state_dict: Mapping[str, Any], groups: Sequence[dict[str, Any]], method: Method
) -> list[dict[str, Any]]:
    """Our param groups with the hyperparameters of the saved ones."""
    if not _is_state(state_dict):
        raise ValueError(
            f"this is not the state of an optimizer: it has {sorted(map(str, state_dict))[:5]}, "
            "and a state has 'state' and 'param_groups'. Pass what optimizer.state_dict() returned"
        )
    saved = state_dict["param_groups"]
    sizes, ours = [len(g["params"]) for g in saved], [len(g["params"]) for g in groups]
    if sizes != ours:
        raise ValueError(
            f"the state has param groups of {sizes} parameters, this optimizer of {ours}; they "
            "must agree: build the optimizer as it was when the state was saved"
        )
    names = {str(group["method"]) for group in saved if "method" in group}
    if names - {method.name}:
        raise ValueError(
            f"the state was saved by {', '.join(sorted(names))} and cannot continue in "
            f"{method.name}, which gives its entries another meaning; load it with its own class, "
            "or start without it"
        )
    return [{**group, **_taken(old)} for group, old in zip(groups, saved, strict=True)]


def _is_state(state_dict: Mapping[str, Any]) -> bool:
    """Whether this has the form of an optimizer's state."""
    state, groups = state_dict.get("state"), state_dict.get("param_groups")
    return (
        isinstance(state, Mapping)
        and all(isinstance(values, Mapping) for values in state.values())
        and isinstance(groups, list | tuple)
        and all(isinstance(g, Mapping) and isinstance(g.get("params"), list) for g in groups)
    )


def _taken(old: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters that a saved group brings along."""
    taken = {}
    for key, value in old.items():
        theirs = "method" in old or key in (*ADAM_KEYS, "initial_lr")
        code = key in ("params", *WITHOUT_CODE) or (key == "tau" and value is None)
        if theirs and not code:
            taken[key] = deepcopy(value)
    return taken


def read_state(
    state_dict: Mapping[str, Any],
    params: Sequence[Tensor],
    buckets: Sequence[Bucket],
    names: Mapping[Tensor, str],
) -> tuple[State, bool]:
    """What a state says of every parameter, and whether it is AdamW's; refused if it is unfit."""
    state = state_dict["state"]
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    saved = {p: state[i] for p, i in zip(params, indices, strict=True) if i in state}
    _check_values(saved, state_dict["param_groups"], params, names)
    if all("method" not in group for group in state_dict["param_groups"]):
        _check_adam(saved, buckets, names)
        return saved, True
    expected = _expected(buckets)
    for p in params:
        shapes = expected.get(p, {})
        found = {name: tuple(value.shape) for name, value in saved.get(p, {}).items()}
        lacking = {n for n in shapes if n not in found and n.startswith(OPTIONAL)}
        differs = (n for n in {*shapes, *found} - lacking if shapes.get(n) != found.get(n))
        wrong = sorted(differs)
        if wrong:
            name = wrong[0]
            raise ValueError(
                f"the state of {called(p, names)} does not fit: {name!r} is "
                f"{found.get(name, 'missing')} in the state and {shapes.get(name, 'absent')} "
                "here. Load it into an optimizer with the same parameters and the same max_dim, "
                "merge_dims, oversize, vectors, matrices, sides, moment, graft and correction"
            )
    return saved, False


def _check_values(
    saved: Mapping[Tensor, Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    params: Sequence[Tensor],
    names: Mapping[Tensor, str],
) -> None:
    """Refuse entries that no run can have written: damaged, or of another kind."""
    rules = [group.get("nonfinite") for group in groups for _ in group["params"]]
    for p, rule in zip(params, rules, strict=True):
        for name, value in saved.get(p, {}).items():
            number = isinstance(value, int | float) and name == "step"  # AdamW of older versions
            if number or (isinstance(value, Tensor) and is_sharded(value)):
                continue  # ranks must not decide for themselves about their shards
            fault = None
            if not isinstance(value, Tensor):
                fault = f"is a {type(value).__name__}, not a tensor"
            elif rule is not None and value.is_floating_point() == name.startswith(COUNTERS):
                fault = f"has the dtype {value.dtype}"
            elif rule != "propagate" and not bool(torch.isfinite(value).all()):
                fault = "has NaN or Inf"
            if fault is not None:
                raise ValueError(
                    f"{name!r} in the state of {called(p, names)} {fault}; nothing was changed. "
                    "The file is damaged or not from this library: load an older one"
                )


def _expected(buckets: Sequence[Bucket]) -> dict[Tensor, dict[str, tuple[int, ...]]]:
    """Per parameter, the names and shapes of its state."""
    shapes: dict[Tensor, dict[str, tuple[int, ...]]] = {}
    for bucket in buckets:
        for p in bucket.parameters:
            for name, stack in bucket.named().items():
                shape: tuple[int, ...] = (len(bucket.numbers[p]), *stack.shape[1:])
                if bucket.elementwise:
                    shape = tuple(p.shape) if stack.dim() > 1 else ()
                shapes.setdefault(p, {})[bucket.named_as(name, p)] = shape
    return shapes


def _check_adam(
    saved: Mapping[Tensor, Mapping[str, Any]],
    buckets: Sequence[Bucket],
    names: Mapping[Tensor, str],
) -> None:
    for p, values in saved.items():
        shapes = {tuple(values[n].shape) for n in ("exp_avg", "exp_avg_sq") if n in values}
        if set(values) != ADAM_STATE or shapes != {tuple(p.shape)}:
            raise ValueError(
                f"the state of {called(p, names)} has {sorted(map(str, values))} with shapes "
                f"{sorted(shapes)}; only states of this library, and of AdamW with "
                f"{sorted(ADAM_STATE)} of the parameter's shape {tuple(p.shape)}, can be loaded"
            )
    for bucket in buckets:
        if bucket.state.exp_avg_sq is None and any(p in saved for p in bucket.parameters):
            raise ValueError(
                f"AdamW's state cannot continue in {bucket.method.name} without a second moment of "
                "its own; use EShampoo, SOAP or a graft, or start without the state"
            )


def fill_(buckets: Sequence[Bucket], state: State) -> None:
    """Write a state into the stacks."""
    for bucket, p in _in_order(buckets, state):
        for name, stack in bucket.named().items():
            stored = state[p].get(bucket.named_as(name, p))
            if stored is None:
                stack[bucket.positions.get(p, [])] = 0
                continue
            value = _here(stored, p, bucket)
            for position in bucket.positions.get(p, ()):
                block, row = bucket.blocks[position], stack[position]
                if not bucket.elementwise:
                    number = bucket.route.mine[position]
                    row.copy_(value[bucket.numbers[p].index(number)])
                else:
                    (block.unmerged(row) if stack.dim() > 1 else row).copy_(value)
    for bucket in buckets:
        bucket.set_clock()


def fill_from_adam_(buckets: Sequence[Bucket], state: State) -> None:
    """Continue from AdamW: Q = I, M̃ = exp_avg, D = exp_avg_sq."""
    for bucket in buckets:
        bucket.reset_()
    for bucket, p in _in_order(buckets, state):
        s, positions = bucket.state, bucket.positions.get(p, [])
        moments = [("exp_avg_sq", D) for D in (s.exp_avg_sq, s.graft_sq) if D is not None]
        for name, stack in [("exp_avg", s.exp_avg), *moments]:
            value = _here(state[p][name], p, bucket)
            for position in positions:
                block, row = bucket.blocks[position], stack[position]
                if stack.shape == s.exp_avg.shape:
                    block.unmerged(row).copy_(block.of(value))
                else:  # one number for many entries
                    entries = block.of(value).reshape(1, *block.shape)
                    row.copy_(means(entries, row.unsqueeze(0)).squeeze(0))
        s.step[positions] = float(state[p]["step"])
    for bucket in buckets:
        bucket.set_clock()


def _in_order(buckets: Sequence[Bucket], state: State) -> Iterator[tuple[Bucket, Tensor]]:
    """Buckets and their parameters, parameter by parameter.

    Reading a DTensor communicates, and only the parameters have the same order on all ranks:
    element-wise ones fall into buckets by what a rank holds of them.
    """
    where: dict[Tensor, list[Bucket]] = {p: [] for p in state}
    for bucket in buckets:
        for p in bucket.parameters:
            if p in where:
                where[p].append(bucket)
    for p, found in where.items():
        for bucket in found:
            yield bucket, p


def _here(value: Tensor, p: Tensor, bucket: Bucket) -> Tensor:
    """What this rank needs of a stored value: all of it, or its piece of an element-wise one."""
    if not bucket.elementwise:
        return value.full_tensor() if is_sharded(value) else value  # type: ignore[attr-defined]
    if not is_sharded(p) or value.dim() == 0:
        return value
    from ..ranks.boxes import held_piece  # there are DTensors, so it is imported already

    return held_piece(value, p)
