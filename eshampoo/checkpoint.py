"""State that goes out to a file and comes back: packing, checking, and AdamW's state as a start."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from .blocks import called
from .bucket import Bucket, named_views
from .methods import Method
from .options import ADAM_KEYS

Values = dict[Tensor, dict[str, Tensor]]
"""Per parameter, what each of its views of the stacks is to hold."""

ADAM_STATE = {"step", "exp_avg", "exp_avg_sq"}


def packed(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Plain data: views that would drag a whole stack into the file are copied, and a τ schedule,
    which is code, is left to the constructor of the optimizer that loads."""
    state = {
        index: {name: _own(value) for name, value in values.items()}
        for index, values in state_dict["state"].items()
    }
    groups = [
        {key: None if callable(value) else value for key, value in group.items()}
        for group in state_dict["param_groups"]
    ]
    return {**state_dict, "state": state, "param_groups": groups}


def _own(value: Tensor) -> Tensor:
    whole = value.untyped_storage().nbytes() == value.numel() * value.element_size()
    return value if whole else value.clone()


def read_groups(
    state_dict: Mapping[str, Any], groups: Sequence[dict[str, Any]], method: Method
) -> list[dict[str, Any]]:
    """Our param groups with the hyperparameters of the saved ones."""
    saved = state_dict["param_groups"]
    sizes, ours = [len(g["params"]) for g in saved], [len(g["params"]) for g in groups]
    if sizes != ours:
        raise ValueError(
            f"the state has param groups of {sizes} parameters, this optimizer of {ours}; they "
            "must agree: build the optimizer as it was when the state was saved"
        )
    names = {group.get("method") for group in saved} - {None}
    if names - {method.name}:
        raise ValueError(
            f"the state was saved by {', '.join(sorted(map(str, names)))} and cannot continue in "
            f"{method.name}, which gives its entries another meaning; load it with its own class, "
            "or start without it"
        )
    merged = []
    for group, old in zip(groups, saved, strict=True):
        own = "method" in old
        keep = {"params", "process_group"} | {
            key for key in old if old[key] is None and own and callable(group.get(key))
        }
        taken = {
            key: value
            for key, value in old.items()
            if key not in keep and (own or key in (*ADAM_KEYS, "initial_lr"))
        }
        merged.append({**group, **taken})
    return merged


def read_values(
    state_dict: Mapping[str, Any],
    params: Sequence[Tensor],
    views: Mapping[Tensor, Mapping[str, Tensor]],
    buckets: Sequence[Bucket],
    names: Mapping[Tensor, str],
) -> Values:
    """What the state says of every parameter, refused with a clear error if it does not fit."""
    state = state_dict["state"]
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    saved = {p: state[index] for p, index in zip(params, indices, strict=True) if index in state}
    if all("method" not in group for group in state_dict["param_groups"]):
        return _from_adam(saved, buckets, names)
    for p in params:
        expected = {name: tuple(view.shape) for name, view in views.get(p, {}).items()}
        found = {name: tuple(value.shape) for name, value in saved.get(p, {}).items()}
        if found != expected:
            wrong = sorted(n for n in {*expected, *found} if expected.get(n) != found.get(n))
            name = wrong[0]
            raise ValueError(
                f"the state of {called(p, names)} does not fit: {name!r} is "
                f"{found.get(name, 'missing')} in the state and {expected.get(name, 'absent')} "
                "here. Load it into an optimizer with the same parameters and the same max_dim, "
                "merge_dims, oversize, vectors, matrices, graft and correction"
            )
    return saved


def _from_adam(
    saved: Mapping[Tensor, Mapping[str, Any]],
    buckets: Sequence[Bucket],
    names: Mapping[Tensor, str],
) -> Values:
    """Continue from AdamW: Q = I, M̃ = exp_avg, D = exp_avg_sq."""
    for p, values in saved.items():
        shapes = {tuple(values[n].shape) for n in ("exp_avg", "exp_avg_sq") if n in values}
        if set(values) != ADAM_STATE or shapes != {tuple(p.shape)}:
            raise ValueError(
                f"the state of {called(p, names)} has {sorted(map(str, values))} with shapes "
                f"{sorted(shapes)}; only states of this library, and of AdamW with "
                f"{sorted(ADAM_STATE)} of the parameter's shape {tuple(p.shape)}, can be loaded"
            )
    filled = []
    for bucket in buckets:
        fresh = bucket.fresh()
        moments = fresh.stacks.exp_avg_sq
        for slot, block in enumerate(bucket.blocks):
            if block.parameter not in saved:
                continue
            if moments is None:
                raise ValueError(
                    f"AdamW's state cannot continue in {bucket.method.name} without a second "
                    "moment of its own; use EShampoo, SOAP or a graft, or start without the state"
                )
            old = saved[block.parameter]
            fresh.stacks.step[slot] = float(old["step"])
            fresh.stacks.exp_avg[slot] = block.of(old["exp_avg"])
            moments[slot] = block.of(old["exp_avg_sq"])
        filled.append(fresh)
    return named_views(filled)
