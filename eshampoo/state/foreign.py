"""States of `torch.optim.AdamW` and of optimizers that look like it: what can be taken over."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from .blocks import called
from .bucket import Bucket

ADAM_STATE = {"step", "exp_avg", "exp_avg_sq"}


def check_adam(
    saved: Mapping[Tensor, Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    buckets: Sequence[Bucket],
    names: Mapping[Tensor, str],
) -> None:
    """Refuse what is not AdamW's, or cannot continue here."""
    for p, values in saved.items():
        shapes = {tuple(values[n].shape) for n in ("exp_avg", "exp_avg_sq") if n in values}
        if set(values) != ADAM_STATE or shapes != {tuple(p.shape)}:
            raise ValueError(
                f"the state of {called(p, names)} has {sorted(map(str, values))} with shapes "
                f"{sorted(shapes)}; only states of this library, and of AdamW with "
                f"{sorted(ADAM_STATE)} of the parameter's shape {tuple(p.shape)}, can be loaded"
            )
    for group in groups:
        if not {"betas", "eps"} <= group.keys():
            keys = sorted(group.keys() - {"params", "param_names"})
            raise ValueError(
                f"the param groups of the state have {keys}, without betas and eps: it is not a "
                "state of AdamW, and only its lr and weight_decay would be used. Load a state of "
                "AdamW or of this library, or start without one"
            )
    for bucket in buckets:
        moments = bucket.state.exp_avg_sq, bucket.state.graft_sq
        if moments == (None, None) and any(p in saved for p in bucket.parameters):
            raise ValueError(
                f"AdamW's state cannot continue in {bucket.method.name} without a second moment of "
                "its own; use EShampoo, SOAP or a graft, or start without the state"
            )


def warn_of_others(groups: Sequence[Mapping[str, Any]]) -> None:
    """Tell the user what happens to a state that has AdamW's entries with another meaning."""
    coupled = [group for group in groups if group.get("decoupled_weight_decay") is False]
    decays = [group["weight_decay"] for group in coupled if group.get("weight_decay")]
    if decays:
        warnings.warn(
            f"the state is of Adam, RAdam or NAdam with weight_decay={decays[0]} in the gradient "
            "(L2). Its moments, which have seen that decay, are used, and from now on weights "
            "decay apart from the gradient, as in AdamW, by lr · weight_decay: choose a new "
            "weight_decay and write it into the param groups",
            stacklevel=6,
        )
    if any("amsgrad" not in group for group in groups):  # torch's Adam and AdamW have it
        warnings.warn(
            "the state has the entries of AdamW but not its param groups; it may be RAdam's. Its "
            "moments are used as AdamW's, and steps are no longer rectified: if the run is young, "
            "warm up the learning rate",
            stacklevel=6,
        )
