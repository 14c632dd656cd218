"""Every refusal: what values, parameters, gradients and states must be, in code and in words.

An error states the value, the rule and the fix, and is raised before anything has changed.
"""

import difflib
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from inspect import currentframe
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, get_args

import torch
from torch import Size, Tensor
from torch.nn import Parameter

from .state.dtensor import local

if TYPE_CHECKING:
    from .options import Options
    from .state.bucket import Bucket

# The names and shapes of the state of a parameter.
Shapes = dict[str, tuple[int, ...]]

# Parameter, mode, and how often in a row no basis could be computed for this factor.
Failure = tuple[Tensor, int, int]


def called(p: Tensor, names: Mapping[Tensor, str]) -> str:
    """What a message calls a parameter."""
    shape = f"shape {tuple(p.shape)}"
    return f"parameter {names[p]!r} ({shape})" if p in names else f"a parameter of {shape}"


def warn(message: str) -> None:
    """Warn at the user's line: that of the nearest caller outside of torch and of this package."""
    inside = __file__.removesuffix("validate.py"), torch.__file__.removesuffix("__init__.py")
    frame, level = currentframe(), 1
    while frame is not None and frame.f_code.co_filename.startswith(inside):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


# -------------------------------------------------------------------- values of keywords


def plain(value: Any) -> Any:  # noqa: ANN401 - whatever a group holds
    """Turn numbers of other libraries, and pairs of them, into Python's; keep all other values."""
    if isinstance(value, tuple | list):
        return tuple(map(plain, value))
    if isinstance(value, Tensor) or type(value).__module__ == "numpy":
        return plain(value.tolist())
    if isinstance(value, Real) and not isinstance(value, bool):
        return int(value) if isinstance(value, Integral) else float(value)
    return value


def plain_unless_tensor(value: Any) -> Any:  # noqa: ANN401
    """Like `plain`, but keep tensors: the host does not read a learning rate from its device."""
    return value if isinstance(value, Tensor) else plain(value)


def whole_number(value: Any) -> Any:  # noqa: ANN401
    """Like `plain`, and turn a float without a fraction into a whole number: 10.0 becomes 10."""
    value = plain(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Rule(NamedTuple):
    """What a value must be, as a test and in words, and how it is read."""

    holds: Callable[[Any], bool]
    words: str
    read: Callable[[Any], Any] = plain

    def check(self, name: str, value: object) -> None:
        """Refuse a value with the usual error."""
        if not self.holds(value):
            raise ValueError(
                f"{name}={value!r} is not valid: {self.words}{_if_quoted(value)}. Pass such a "
                f"value to the constructor or write it into the param group"
            )


def _if_quoted(value: object) -> str:
    """What to say about a number in quotes."""
    if not isinstance(value, str) or not re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", value, re.I):
        return ""
    return f", and this is a string, not a number (as YAML reads 1e-3): write float({value!r})"


def number(value: object) -> float:
    """The value, or NaN, which no rule admits, if it is not a number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else math.nan  # type: ignore[arg-type]


def only_false(why: str) -> Rule:
    """For a switch of torch's own optimizers that cannot be on here."""
    return Rule(lambda v: v is None or v is False, f"it must be None or False, because {why}")


def also(rule: Rule, *others: object) -> Rule:
    """One of `others`, or what the rule says."""
    words = f"it must be {' or '.join(map(repr, others))}, or{rule.words.removeprefix('it must')}"
    return Rule(lambda v: v in others or rule.holds(v), words, rule.read)


def whole_from(least: int) -> Rule:
    """A whole number."""
    return Rule(
        lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= least,
        f"it must be a whole number of at least {least}",
        whole_number,
    )


def one_of(words: object, *more: object) -> Rule:
    """One of the words of a Literal, or one of `more`."""
    allowed = (*more, *get_args(words))
    return Rule(lambda v: v in allowed, f"it must be one of {', '.join(map(repr, allowed))}")


def _is_lr(value: object) -> bool:
    if isinstance(value, Tensor):  # its value is not read from other devices
        on_host = type(value) in (Tensor, Parameter) and value.is_cpu
        return value.numel() == 1 and (not on_host or 0 <= value.item() < math.inf)
    return 0 <= number(value) < math.inf


ANYTHING = Rule(lambda _: True, "")
AT_LEAST_0 = Rule(lambda v: 0 <= number(v) < math.inf, "it must be at least 0, and finite")
BELOW_1 = Rule(lambda v: 0 <= number(v) < 1, "it must lie in [0, 1)")
SHARE = Rule(lambda v: 0 <= number(v) <= 1, "it must lie in [0, 1]")
POSITIVE = Rule(lambda v: 0 < number(v) < math.inf, "it must be more than 0, and finite")
LR_WORDS = "it must be a finite number of at least 0, and a Tensor lr must be 1-element"
LR = Rule(_is_lr, LR_WORDS, plain_unless_tensor)
PAIR = Rule(lambda v: isinstance(v, tuple | list) and len(v) == 2, "it must be a pair (β1, β2)")
TAU = Rule(
    lambda v: callable(v) or number(v) >= 0,
    "it must be a number of at least 0 (0 recomputes at every check, 1 never) or a function of t",
)
WHOLE, COUNT = whole_from(0), whole_from(1)
ABOVE_0 = Rule(lambda v: 0 < number(v) <= 1, "it must lie in (0, 1]")
SWITCH = Rule(lambda v: isinstance(v, bool), "it must be True or False")

# Switches of torch's own optimizers, which programs pass to every optimizer.
SWITCHES: Mapping[str, Rule] = {
    "foreach": ANYTHING,
    "fused": ANYTHING,
    "capturable": only_false("a check reads from the device, which a CUDA graph cannot capture"),
    "differentiable": only_false("a step writes in place and cannot be differentiated"),
    "amsgrad": only_false("a maximum of second moments has no meaning in a basis that changes"),
}

# What other optimizers call our keywords.
NAMES_ELSEWHERE: Mapping[str, str] = {
    "learning_rate": "lr", "wd": "weight_decay", "epsilon": "eps", "momentum": "betas[0]",
    "precondition_frequency": "frequency", "shampoo_beta": "betas[1]", "max_precond_dim": "max_dim",
    "max_preconditioner_dim": "max_dim", "block_size": "max_dim", "grafting_config": "graft",
}  # fmt: skip


def check_contradictions(o: "Options") -> None:
    """Refuse values that contradict each other."""
    if o.rms and o.graft:
        raise ValueError(
            f"rms={o.rms!r} and graft={o.graft!r} both set the size; leave one of them at None"
        )
    if o.moment != "entry" and o.correction == "optimal":
        raise ValueError(
            f"moment={o.moment!r} and correction={o.correction!r} contradict each other; "
            "set moment='entry' or correction='naive'"
        )


def check_switches(values: Mapping[str, Any]) -> None:
    """Refuse a switch of torch's optimizers that cannot be on here."""
    for name in values.keys() & SWITCHES.keys():
        SWITCHES[name].check(name, values[name])


def misspelt(key: str, own: Collection[str], of_others: Collection[str]) -> str | None:
    """What the user may have meant by an unknown key; None for keys of other tools."""
    name = NAMES_ELSEWHERE.get(key, "")
    if name.partition("[")[0] in own:
        return f"did you mean {name!r}?"
    if key in of_others or name:
        return f"{name or key!r} belongs to other optimizers of this library."
    close = difflib.get_close_matches(key, own, 1, cutoff=0.7)
    close += [name for name in own if len(key) > 2 and name.startswith(key)]
    return f"did you mean {close[0]!r}?" if close else None


# Options that shape the state; they cannot change while the state exists.
SHAPING = (
    "max_dim", "oversize", "merge_dims", "vectors", "matrices", "sides", "state", "moment",
    "statistics", "factors", "batch_dims", "pieces",
)  # fmt: skip


def check_shaping(now: Iterable["Options"], before: Iterable["Options"]) -> None:
    """Refuse a change of options that would need a state with other shapes."""
    for o, old in zip(now, before, strict=True):
        for key, value in o.shaping.items():
            if value != old.shaping[key]:
                raise ValueError(
                    f"{key} is {value!r} now but was {old.shaping[key]!r} when the state was laid "
                    "out; the shapes of the state depend on it: set it back, or build a new "
                    "optimizer"
                )


# -------------------------------------------------------------------- parameters


def check_params(params: Iterable[Tensor], names: Mapping[Tensor, str]) -> None:
    """Refuse tensors that cannot be trained."""
    for p in params:
        if not p.is_floating_point() or p.is_inference():
            made = "made in inference_mode" if p.is_inference() else f"of dtype {p.dtype}"
            raise TypeError(
                f"{called(p, names)} is {made}; parameters must be real floating-point tensors, "
                "made outside of inference_mode: leave it out or view it as real"
            )


def check_successors(
    known: list[int],  # how many parameters the param groups had, and have
    sizes: list[int],
    looks: Iterable[tuple[Size, Any, Any]],  # their shapes, dtypes and devices
    now: Iterable[Tensor],
    names: Mapping[Tensor, str],
) -> None:
    """Refuse tensors in the param groups that cannot take over the state of those before them."""
    faults = [f"the param groups have {sizes} parameters now and had {known}"]
    if sizes == known:
        faults = [
            f"{called(q, names)} has taken the place of a tensor of shape {tuple(shape)}"
            for (shape, *_), q in zip(looks, now, strict=True)
            if q.shape != shape
        ]
    for fault in faults:
        raise ValueError(
            f"{fault}; state follows tensors of the same shapes by their place: put back the old "
            "tensors, use add_param_group(), or build a new optimizer"
        )


def check_materialised(params: Iterable[Tensor], names: Mapping[Tensor, str]) -> None:
    """Refuse a step of parameters that were left on the meta device."""
    for p in params:
        if p.is_meta and p.grad is None and p.requires_grad:
            raise RuntimeError(
                f"{called(p, names)} is on the meta device and has no gradient: write the model's "
                "tensors into param_groups[i]['params'], or build the optimizer after them"
            )


def check_copyable(teams: Collection[object]) -> None:
    """Refuse to copy an optimizer that shares work with other ranks."""
    if teams:
        raise TypeError(
            "an optimizer that shares its work over ranks cannot be copied or pickled; build "
            "another one and give it this one's state_dict()"
        )


def check_block(
    p: Tensor, shape: tuple[int, ...], o: "Options", names: Mapping[Tensor, str], limit: int
) -> None:
    """Refuse a block that an option has no meaning, or no memory, for, or no equal pieces."""
    rows = p.shape[o.batch_dims]
    if rows % o.pieces != 0:
        raise ValueError(
            f"pieces={o.pieces} does not divide dimension 0 of the matrices of {called(p, names)}, "
            f"{rows}: give the parameter a group of its own"
        )
    if o.moment == "row" and len(shape) == 1:
        raise ValueError(
            f"moment='row' needs rows, and {called(p, names)} has a block of one mode, {shape}. "
            "Set merge_dims=False and vectors='adam', or moment='block'"
        )
    if o.correction == "optimal" and len(shape) > 1 and math.prod(shape) > limit:
        raise ValueError(
            f"correction='optimal' takes blocks of at most {limit} elements, and {called(p, names)}"
            f" has one of shape {shape}. Lower max_dim, or use 'basis_aware'"
        )


def check_one_mode(shape: Sequence[int], max_dim: int) -> None:
    """Refuse a parameter that is too long for full-matrix Adam."""
    if math.prod(shape) > max_dim:
        raise ValueError(
            f"a parameter of shape {tuple(shape)} has {math.prod(shape)} elements, more than "
            f"max_dim={max_dim} of FullMatrixAdam. Raise it, set matrices='adam', or use EShampoo"
        )


def warn_if_without_basis(buckets: "Sequence[Bucket]", names: Mapping[Tensor, str]) -> None:
    """Tell the user that no parameter has a basis, because of options or a flattened model."""
    params = [p for bucket in buckets for p in bucket.parameters]
    if not params or not all(bucket.elementwise for bucket in buckets):
        return
    warn(
        f"nothing here has a basis, so this is AdamW: the largest of {len(params)} parameters is "
        f"{called(max(params, key=Tensor.numel), names)}. If a framework has flattened the model "
        "(DeepSpeed ZeRO, FSDP1), shard with FSDP2, or use DDP with process_group="
    )


# -------------------------------------------------------------------- calls and gradients


def check_observable(options: Sequence["Options"]) -> None:
    """Refuse an observation that no param group has a use for."""
    if all(o.statistics == "step" for o in options):
        raise RuntimeError(
            "observe() was called, but all param groups have statistics='step': their factors see "
            "the gradients of step(). Pass statistics='observe' to the constructor"
        )


def refuse_gradient(p: Tensor, grad: Tensor, names: Mapping[Tensor, str]) -> NoReturn:
    """Refuse a gradient of a kind that cannot be used."""
    raise RuntimeError(
        f"the gradient of {called(p, names)} is {'sparse' if grad.is_sparse else 'complex'}, not "
        "dense and real: use sparse=False in the embedding, or another optimizer for it"
    )


def not_finite(params: Sequence[Tensor], names: Mapping[Tensor, str]) -> str:
    """What to say about gradients that are not finite, with nonfinite="raise"."""
    return (
        f"the gradient of {', '.join(called(p, names) for p in params)} has NaN or Inf, or its "
        "squares overflow; nothing was changed. Find the cause, or set nonfinite='skip'"
    )


def warn_of_skipped(params: Sequence[Tensor], names: Mapping[Tensor, str]) -> None:
    """Tell the user about gradients that were left out."""
    bad = ", ".join(called(p, names) for p in params)
    warn(
        f"the gradient of {bad} had NaN or Inf; such blocks stand still for the step. "
        "basis_report() keeps counting them, without another warning"
    )


def failed_bases(failures: Sequence[Failure], names: Mapping[Tensor, str]) -> str:
    """What to say about bases that failed too often in a row."""
    listed = ", ".join(
        f"factor {mode} of {called(p, names)} ({in_a_row} times in a row)"
        for p, mode, in_a_row in failures
    )
    return (
        f"no basis could be computed for {listed}, not even in float64 on the host; the old "
        "basis was kept. Look at the gradients"
    )


# -------------------------------------------------------------------- states

# Entries that are whole numbers.
COUNTERS = ("basis_checks", "basis_computations", "basis_failures", "basis_waited")
# Entries that cannot be negative. Before its first gradient, SOAP is at step −1.
NOT_NEGATIVE = ("basis_", "criterion", "exp_avg_sq", "skipped", "observations", "norm_sq")


def check_state_dict(state_dict: object) -> None:
    """Refuse what does not have the form of an optimizer's state."""
    match state_dict:
        case {"state": Mapping() as state, "param_groups": [*groups]} if all(
            isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups
        ) and all(isinstance(entry, Mapping) for entry in state.values()):
            return
    raise ValueError(
        f"this {type(state_dict).__name__} is not the state of an optimizer, which has 'state' and "
        "'param_groups'. Pass what optimizer.state_dict() returned, on every rank"
    )


def check_groups(
    saved: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]], method: str
) -> None:
    """Refuse a state of another method, or of other param groups."""
    sizes, ours = [len(g["params"]) for g in saved], [len(g["params"]) for g in groups]
    if sizes != ours:
        raise ValueError(
            f"the state has param groups of {sizes} parameters, this optimizer of {ours}; they "
            "must agree: build the optimizer as it was when the state was saved"
        )
    for group in saved:
        if "method" not in group and not {"betas", "eps"} <= group.keys():
            found = f"a group with {sorted(group)}, without betas and eps"
        elif (found := str(group.get("method", method))) == method:
            continue
        raise ValueError(
            f"the state is of {found}, and {method} gives its entries another meaning; load a "
            "state of this class or of AdamW, or start without"
        )


def refuse_adam(method: str) -> NoReturn:
    """Refuse AdamW's state for, or from, a method that has no place for its second moment."""
    raise ValueError(
        f"a state of AdamW cannot continue in {method} without a second moment of its own, nor can "
        "this go on in AdamW; use EShampoo, SOAP or Shampoo with a graft, or start without a state"
    )


def check_entries(
    p: Tensor, entry: Mapping[str, Any], shapes: Shapes, names: Mapping[Tensor, str]
) -> None:
    """Refuse entries of a state that do not fit or cannot be right."""
    held = {name: local(value) for name, value in entry.items() if isinstance(value, Tensor)}
    for name in sorted({*entry, *shapes}):
        value = entry.get(name)
        if value is None and name.startswith("norm_sq"):
            continue  # a state from elsewhere: it starts with the next gradient
        if fault := fault_of(p, name, value, held.get(name), shapes.get(name)):
            raise ValueError(
                f"{name!r} in the state of {called(p, names)} {fault}; nothing was changed. Load "
                "an undamaged file, of the same parameters with the same "
                f"{', '.join(SHAPING)}, graft and correction"
            )


def fault_of(
    p: Tensor, name: str, value: object, held: Tensor | None, shape: tuple[int, ...] | None
) -> str:
    """What is wrong with an entry of a state; "" if nothing is. A rank looks at what it holds."""
    if shape is None:
        return "is not in the state of this optimizer"
    if name == "step" and 0 <= number(value) < math.inf:
        return ""
    if not isinstance(value, Tensor) or held is None:
        return "is missing" if value is None else f"is a {type(value).__name__}, not a tensor"
    if value.shape != shape:
        return f"has the shape {tuple(value.shape)}, which does not fit"
    if held.layout != torch.strided:
        return f"has the layout {held.layout}"
    if name.startswith(COUNTERS) and held.is_floating_point():
        return f"has the dtype {held.dtype}"
    if held.numel() == 0 or held.is_meta:
        return "is on the meta device, without values" if held.is_meta and not p.is_meta else ""
    least, most = torch.stack(torch.aminmax(held)).tolist()
    if not (math.isfinite(least) and math.isfinite(most)):
        return "has NaN or Inf"
    limit = -1.0 if name.startswith("step") else 0.0
    basis = name.startswith("basis_") and held.dim() == 3  # and not a counter
    negative = least < limit and name.startswith(("step", *NOT_NEGATIVE)) and not basis
    return "has negative numbers" if negative else ""


# -------------------------------------------------------------------- ranks


def refuse_difference(rank: int, there: str, here: str) -> NoReturn:
    """Refuse what is not the same on all ranks."""
    raise ValueError(
        f"rank {rank} of the process group has ({there}) and rank 0 has ({here}); ranks that share "
        "work must have the same parameters in the same order, and make the same calls with the "
        "same options. Nothing was changed. Do on every rank what you do on one"
    )


def check_member(rank: int) -> None:
    """Refuse a process group that this rank does not belong to."""
    if rank < 0:
        raise ValueError("this rank is not in its process_group; pass a group that it belongs to")


def refuse_placement(p: Tensor, fault: str) -> NoReturn:
    """Refuse a DTensor that this rank cannot work with."""
    raise ValueError(
        f"a parameter of shape {tuple(p.shape)} {fault}; parameters must be sharded or replicated "
        "over a mesh that this rank belongs to: redistribute it, or leave it out on this rank"
    )
