"""The hyperparameters of one param group, typed and checked.

A group is an ordinary dictionary that users and schedulers write into, so it is read anew and
checked at every step, before anything changes.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from torch import Tensor

from .methods import Method

Solver = Literal["eigh", "qr", "power", "partial"]
Slots = Literal["rank", "match"]
Correction = Literal["naive", "bounded", "basis_aware", "optimal"]
Vectors = Literal["adam", "full"]
Matrices = Literal["kronecker", "adam"]
Oversize = Literal["split", "identity"]
NonFinite = Literal["skip", "raise", "propagate"]
Variant = Literal["shampoo", "shampoo2"]
Graft = Literal["adam", "rmsprop", "adagrad", "sgd"]
GraftScope = Literal["block", "parameter"]
Eigenvalues = Literal["stale", "fresh"]
Tau = float | Callable[[int], float]

TAU_RULE = "it must be a number of at least 0 (0 recomputes at every check, 1 never)"

ADAM_KEYS = ("lr", "betas", "eps", "weight_decay", "maximize")
"""What a group of `torch.optim.AdamW` has in common with one of ours."""


@dataclass(frozen=True)
class Options:
    """What a param group says at this step; the meaning of each is in `optimizers.py`."""

    lr: float | Tensor
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    tau: Tau
    frequency: int
    solver: Solver
    slots: Slots
    refresh_to: float
    qr_iterations: int
    beta3: float | None
    correction: Correction
    vectors: Vectors
    matrices: Matrices
    max_dim: int
    oversize: Oversize
    merge_dims: bool
    nesterov: bool
    maximize: bool
    nonfinite: NonFinite
    max_failures: int
    record: bool
    # Shampoo only; the other methods carry the defaults.
    variant: Variant = "shampoo"
    trace_scaling: bool = False
    graft: Graft | None = None
    graft_scope: GraftScope = "parameter"
    eigenvalues: Eigenvalues = "stale"

    @classmethod
    def of(cls, group: Mapping[str, Any], method: Method) -> "Options":
        """Read and check a param group."""
        options = cls(**{field.name: group[field.name] for field in _FIELDS if field.name in group})
        for name, allowed in _CHOICES.items():
            _require(
                name,
                getattr(options, name),
                getattr(options, name) in allowed,
                f"it must be one of {', '.join(map(repr, allowed))}",
            )
        options._check_numbers()
        if options.correction != "naive" and not method.second_moment:
            raise ValueError(
                f"correction={options.correction!r} speaks of the second moment D, which "
                f"{method.name} does not keep; leave it at 'naive' or use EShampoo"
            )
        return options

    def _check_numbers(self) -> None:
        if isinstance(self.lr, Tensor):
            _require("lr", self.lr, self.lr.numel() == 1, "a tensor lr must have one element")
        else:
            _require("lr", self.lr, 0 <= _number(self.lr) < math.inf, "it must be at least 0")
        pair = isinstance(self.betas, tuple | list) and len(self.betas) == 2
        _require("betas", self.betas, pair, "it must be a pair (β1, β2)")
        beta1, beta2 = self.betas
        _require("betas[0]", beta1, 0 <= _number(beta1) < 1, "it must lie in [0, 1)")
        _require("betas[1]", beta2, 0 <= _number(beta2) <= 1, "it must lie in [0, 1]; 1 sums")
        if self.beta3 is not None:
            _require("beta3", self.beta3, 0 <= _number(self.beta3) <= 1, "it must lie in [0, 1]")
        for name in ("eps", "weight_decay"):
            value = getattr(self, name)
            _require(name, value, 0 <= _number(value) < math.inf, "it must be at least 0")
        if not callable(self.tau):
            _require("tau", self.tau, _number(self.tau) >= 0, TAU_RULE)
        for name in ("frequency", "qr_iterations", "max_dim", "max_failures"):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            _require(name, value, whole and value >= 1, "it must be a whole number of at least 1")
        share = _number(self.refresh_to)
        _require("refresh_to", self.refresh_to, 0 <= share <= 1, "it must lie in [0, 1]")
        for name in ("merge_dims", "nesterov", "maximize", "record", "trace_scaling"):
            value = getattr(self, name)
            _require(name, value, isinstance(value, bool), "it must be True or False")

    @property
    def beta_scale(self) -> float:
        """β3, the averaging constant of D."""
        return self.betas[1] if self.beta3 is None else self.beta3

    @property
    def graft_moment(self) -> bool:
        """Whether the grafting method keeps a second moment of its own."""
        return self.graft in ("adam", "rmsprop", "adagrad")

    @property
    def layout(self) -> dict[str, Any]:
        """What the shapes of the state depend on, and so cannot change while the state lives."""
        return {
            "max_dim": self.max_dim,
            "oversize": self.oversize,
            "merge_dims": self.merge_dims,
            "vectors": self.vectors,
            "matrices": self.matrices,
            "graft with a second moment": self.graft_moment,
            "correction='optimal'": self.correction == "optimal",
        }

    def threshold(self, step: int) -> float:
        """τ at step t."""
        if not callable(self.tau):
            return self.tau
        value = self.tau(step)
        _require(f"tau({step})", value, _number(value) >= 0, TAU_RULE)
        return float(value)


_FIELDS = fields(Options)
_CHOICES = {
    name: get_args(hint)
    for name, hint in get_type_hints(Options).items()
    if get_origin(hint) is Literal
} | {"graft": (None, *get_args(Graft))}


def _number(value: object) -> float:
    """The value, or NaN, which no rule admits, if it is not a number."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number else math.nan  # type: ignore[arg-type]


def _require(name: str, value: object, holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(
            f"{name}={value!r} is not valid: {rule}. Pass such a value to the constructor or "
            f"write it into the param group"
        )
