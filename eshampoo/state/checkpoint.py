"""State that goes out to a file and comes back: packing, checking, and AdamW's state as a start.

What is stored does not depend on how many ranks there were: per parameter one tensor [blocks, …] of
each kind of state, a DTensor if the parameter is one.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..math.foreach import foreach_copy_
from ..math.linalg import means
from ..methods import Method
from ..options import ADAM_KEYS
from .blocks import called, is_sharded, whole
from .bucket import Bucket
from .damage import check_kinds
from .foreign import check_adam
from .form import Shapes, as_kept, formless
from .state import is_own, own_among

State = dict[Tensor, dict[str, Tensor]]

# Entries that states of versions without a budget lack; they are zero then.
OPTIONAL = ("basis_waited", "basis_spent")
# Group keys that cannot be stored, besides a τ schedule, which is code.
WITHOUT_CODE = ("process_group",)


def pack(
    groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Any], buckets: Sequence[Bucket]
) -> dict[str, Any]:
    """The state as plain data, without code, which the constructor of the next optimizer provides.

    What users wrote into `state` is included.
    """
    numbers: dict[int, int] = {}  # by id, which takes a fraction of the time
    packed_groups, start = [], 0
    for group in groups:
        ids = list(map(id, group["params"]))
        for index, p in enumerate(ids, start):
            numbers.setdefault(p, index)
        start += len(ids)
        plain = {k: None if callable(v) or k in WITHOUT_CODE else v for k, v in group.items()}
        packed_groups.append({**plain, "params": [numbers[p] for p in ids]})
    packed: dict[Any, Any] = {}
    for key, entry in collected(state, buckets).items():
        packed[numbers[id(key)] if isinstance(key, Tensor) else key] = entry
    return {"state": packed, "param_groups": packed_groups}


def collected(state: Mapping[Any, Any], buckets: Sequence[Bucket]) -> dict[Any, Any]:
    """Per parameter, what a checkpoint holds of it; all ranks that share work must call this.

    Entries are copies, which later steps leave alone.
    """
    found: dict[Any, Any] = dict.fromkeys(state)
    for bucket in buckets:
        for p, values in _stored(bucket):
            others = found[p]
            found[p] = {**others, **values} if others else values
    for (key, entries), entry in zip(list(found.items()), state.values(), strict=True):
        ours = entries or {}  # while `entry` also has what users wrote
        if not isinstance(entry, dict):
            found[key] = entry
        elif len(ours) != len(entry) or not ours:
            found[key] = {**ours, **apart({n: v for n, v in entry.items() if n not in ours})}
    return found


def _stored(bucket: Bucket) -> Iterable[tuple[Tensor, dict[str, Tensor]]]:
    """Per parameter, what a checkpoint holds of a bucket; all ranks that share it take part."""
    if not bucket.spread:
        return bucket.copies()
    if bucket.elementwise:
        return [(p, {n: _own(view, p) for n, view in views.items()}) for p, views in bucket.views()]
    stored: State = {p: {} for p in bucket.parameters}
    counted = bucket.counters.named()
    for name, stack in bucket.named().items():
        small = stack.dim() == 1 or name in counted
        for p, value in bucket.route.collect(stack, small).items():
            stored[p][bucket.named_as(name, p)] = value
    return list(stored.items())


def _own(value: Tensor, p: Tensor) -> Tensor:
    """An element-wise state, placed like its parameter, without the rest of its stack."""
    if is_sharded(p) and value.dim() > 0:
        from ..ranks.boxes import like_parameter  # there are DTensors, so it is imported already

        return like_parameter(value.clone(), p)
    return value.clone()


def after_hooks(
    state_dict: Mapping[str, Any], optimizer: Optimizer, hooks: Iterable[Callable[..., Any]]
) -> dict[str, Any]:
    """A copy of a state, or what the hooks of an optimizer make of it."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"a state is a dictionary, but this is a {type(state_dict).__name__}; pass what "
            "optimizer.state_dict() returned, on every rank"
        )
    taken = dict(state_dict)
    for hook in hooks:
        taken = hook(optimizer, taken) or taken
    return taken


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
        and isinstance(groups, list | tuple)
        and all(isinstance(g, Mapping) and isinstance(g.get("params"), list) for g in groups)
        and all(isinstance(state.get(i, {}), Mapping) for g in groups for i in g["params"])
    )


def _taken(old: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters that a saved group brings along."""
    taken = {}
    for key, value in old.items():
        theirs = "method" in old or key in (*ADAM_KEYS, "initial_lr")
        # The form of the state stays that of the optimizer that loads.
        code = key in ("params", "state", *WITHOUT_CODE) or (key == "tau" and value is None)
        if theirs and not code:
            taken[key] = deepcopy(value)
    return taken


class Loaded(NamedTuple):
    """What was read from a state."""

    state: State  # of every parameter
    adam: bool  # whether it is AdamW's
    extras: dict[Tensor, dict[str, Any]]  # entries of other tools
    others: dict[Any, Any]  # what belongs to no parameter


def read_state(
    state_dict: Mapping[str, Any],
    params: Sequence[Tensor],
    buckets: Sequence[Bucket],
    names: Mapping[Tensor, str],
) -> Loaded:
    """Read a state, and check its form; one that does not fit is refused."""
    state, groups = state_dict["state"], state_dict["param_groups"]
    indices = [index for group in groups for index in group["params"]]
    given = {p: state[i] for p, i in zip(params, indices, strict=True) if i in state}
    known = set(indices)
    others = {key: value for key, value in state.items() if key not in known}
    if all("method" not in group for group in groups):
        check_kinds(given, False, names)
        check_adam(given, groups, buckets, names)
        return Loaded(given, True, {}, others)
    saved = {p: {n: e[n] for n in own_among(tuple(e))} for p, e in given.items()}
    more = [p for p, e in given.items() if len(saved[p]) < len(e)]
    extras = {p: {n: v for n, v in given[p].items() if not is_own(n)} for p in more}
    check_kinds(saved, True, names)
    shapes = expected(buckets)
    for p, entries in saved.items():
        for name, value in entries.items():
            if not isinstance(value, Tensor):  # a step that is a number
                shape = shapes.get(p, {}).get(name, ())
                entries[name] = torch.full(shape, float(value), dtype=torch.float64)
    check_fit({p: saved.get(p, {}) for p in params}, shapes, names, FIX)
    return Loaded(saved, False, extras, others)


FIX = (
    "Load it into an optimizer with the same parameters and the same max_dim, merge_dims, "
    "oversize, vectors, matrices, sides, moment, statistics, graft and correction"
)


def check_fit(
    saved: State, wanted: Mapping[Tensor, Shapes], names: Mapping[Tensor, str], fix: str
) -> None:
    """Refuse a state whose entries have other names or shapes than expected."""
    for p, values in saved.items():
        shapes = wanted.get(p, {})
        found = {name: tuple(value.shape) for name, value in values.items() if is_own(name)}
        if found == shapes or (not found and not p.requires_grad):
            continue  # torch leaves frozen parameters out of flat states
        lacking = {n for n in shapes if n not in found and n.startswith(OPTIONAL)}
        differs = {n for n in {*shapes, *found} - lacking if shapes.get(n) != found.get(n)}
        wrong = sorted(n for n in differs if formless(n, shapes) != formless(n, found))
        if wrong:
            name = wrong[0]
            raise ValueError(
                f"the state of {called(p, names)} does not fit: {name!r} is "
                f"{found.get(name, 'missing')} in the state and {shapes.get(name, 'absent')} "
                f"here. {fix}"
            )


def expected(buckets: Sequence[Bucket]) -> dict[Tensor, Shapes]:
    """Per parameter, the names and shapes of its state."""
    found: dict[Tensor, Shapes] = defaultdict(dict)
    for bucket in buckets:
        stacks = {name: tuple(stack.shape[1:]) for name, stack in bucket.named().items()}
        for p, numbers in bucket.numbers.items():
            blocks, suffix = (len(numbers),), bucket.suffixes.get(p, "")
            if bucket.elementwise:
                whole = tuple(p.shape)
                shapes = {name: whole if rest else () for name, rest in stacks.items()}
            else:
                shapes = {name + suffix: blocks + rest for name, rest in stacks.items()}
            found[p].update(shapes)
    return found


def take_over_(buckets: Sequence[Bucket], loaded: Loaded, shown: dict[Any, Any]) -> None:
    """Continue from a state that was read; forget recorded checks, which are of another run."""
    if loaded.adam:
        fill_from_adam_(buckets, loaded.state)
    else:
        fill_(buckets, loaded.state, shown)
    add_others_(shown, {**loaded.extras, **loaded.others})
    for bucket in buckets:
        bucket.counters.history.clear()


def fill_(buckets: Sequence[Bucket], state: State, shown: Mapping[Any, Any]) -> None:
    """Write a state into the stacks; where no other rank has a part, through the users' views."""
    spread = [bucket for bucket in buckets if bucket.spread]
    shared = {p for bucket in spread for p in bucket.parameters}
    views: list[Tensor] = []
    values: list[Tensor] = []
    for p, entries in state.items():
        if p not in shared and p in shown:
            for name, view in shown[p].items():
                if name in entries:
                    views.append(view)
                    values.append(as_kept(name, whole(entries[name]), view))
                elif is_own(name):
                    view.zero_()
    if views:
        foreach_copy_(views, values)
    for bucket, p in _in_order(spread, state):
        for name, stack in bucket.named().items():
            stored = state[p].get(bucket.named_as(name, p))
            value = None if stored is None else as_kept(name, _here(stored, p, bucket), stack)
            for position in bucket.positions.get(p, ()):
                block, row = bucket.blocks[position], stack[position]
                if value is None:
                    row.zero_()
                elif not bucket.elementwise:
                    row.copy_(value[bucket.route.mine[position] - bucket.numbers[p][0]])
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
    element-wise parameters fall into buckets by what a rank holds of them.
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
    if not (bucket.elementwise and is_sharded(p)):
        return whole(value)
    if value.dim() == 0:
        return value
    from ..ranks.boxes import held_piece  # there are DTensors, so it is imported already

    return held_piece(value, p)


def apart(entry: Any) -> Any:  # noqa: ANN401 - of `state`: a dictionary, or what others wrote
    """An entry of `state`, with copies instead of views of stacks."""
    if not isinstance(entry, dict):
        return entry
    return {name: v.clone() if isinstance(v, Tensor) else v for name, v in entry.items()}


def add_others_(state: dict[Any, Any], values: Mapping[Any, Any]) -> None:
    """Write the entries of other tools into a state, beside ours."""
    for key, entry in values.items():
        if isinstance(key, Tensor):
            state[key].update({n: v for n, v in entry.items() if not is_own(n)})
        else:
            state[key] = entry
