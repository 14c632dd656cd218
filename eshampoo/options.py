"""Every keyword once: its name, type, default, rule and meaning; and which class offers which.

A param group is an ordinary dictionary that users and schedulers write into, so it is read anew and
checked at every step, before anything changes.
"""

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from torch import Tensor

from .checks import Every, WhenNew, when_new
from .math.solvers import Slots, Solver
from .rules import (
    ABOVE_0,
    ANYTHING,
    AT_LEAST_0,
    AT_LEAST_0_OR_NONE,
    BELOW_1,
    COUNT,
    FREQUENCY,
    LR,
    PAIR,
    POSITIVE,
    POSITIVE_OR_NONE,
    SHARE,
    SHARE_OR_NONE,
    SWITCH,
    TAU,
    Rule,
    one_of,
    only_false,
    plain,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Correction = Literal["naive", "bounded", "basis_aware", "optimal"]
Vectors = Literal["adam", "full"]
Matrices = Literal["kronecker", "adam"]
Oversize = Literal["split", "identity"]
Merge = bool | Literal["kernel"]
NonFinite = Literal["skip", "raise", "propagate"]
Precision = Literal["highest", "inherit"]
Sides = Literal["both", "left", "right", "smaller"]
Moment = Literal["entry", "row", "block"]
Statistics = Literal["step", "observe"]
Variant = Literal["shampoo", "shampoo2"]
Graft = Literal["adam", "rmsprop", "adagrad", "sgd"]
GraftScope = Literal["block", "parameter"]
Eigenvalues = Literal["stale", "fresh"]
Frequency = int | Literal["auto"]
Tau = float | Callable[[int], float]
T = TypeVar("T")

# What a group of `torch.optim.AdamW` has in common with one of ours.
ADAM_KEYS = ("lr", "betas", "eps", "weight_decay", "maximize")

# Group keys that torch, its schedulers and known frameworks write; no step reads them.
FOREIGN_KEYS = {
    "params", "param_names", "method", "initial_lr", "kind", "name", "decoupled_weight_decay",
    "lr_scale", "swa_lr", "max_lr", "min_lr", "base_momentum", "max_momentum",
}  # fmt: skip


def keyword(default: T, rule: Rule) -> T:
    """A field of `Options` with its rule."""
    return field(default=default, metadata={"rule": rule})


# -------------------------------------------------------------------- keywords


@dataclass(frozen=True)
class Options:
    """What a param group says at this step.

    A field of a subclass with init=False is not offered by its optimizer, and stays as it is.

    Args:
        params: parameters, `model.named_parameters()` (names then appear in reports), or groups.
        lr: α; a number or a tensor with one element.
        betas: β1 of the momentum and β2 of the factors; β2 = 1 sums instead of averaging (AdaGrad).
        eps: ε, added to √D̃ as in AdamW.
        weight_decay: λ, decoupled.
        budget: the most that the bases of a factor may cost, as a share of the arithmetic of its
            plain steps, beyond 2.5 log₂(1 + t/2) of them, which are free. What is due without
            credit waits for another check (`basis_report()` says how often). None: no limit.
        rms: the root mean square that the update of every block with a basis is scaled to: the
            learning rate then means the same in every layer and method. √D counts as at least a
            thousandth of its root mean square, and no entry beyond Adam's own bound. None: the
            paper's rule, sizes as they come. Not together with `graft`.
        sides: which sides of a matrix have a basis: "both", or one alone, "left", "right" or
            "smaller" (one-sided Shampoo, ASGO), without products and state for the other. With more
            dimensions "left" is the first and "right" the last.
        max_dim: larger dimensions are split into blocks.
        process_group: share work and state over this group of `torch.distributed`.
        nonfinite: a gradient with NaN or Inf: "skip" leaves its block out of the step, "raise"
            raises before anything has changed, "propagate" takes it as it is.
        record: keep the history of the criterion for `basis_report()`.
        maximize: ascend.

    For models and machines that need more:
        momentum: μ of Muon's momentum; `betas` are those of the AdamW beside it.
        ns_steps: iterations of Newton–Schulz.
        nesterov: look one step ahead in the momentum, as in NAdam; Muon's own momentum alone.
        moment: what D, and the moment of the grafting method, have one number for: every "entry" of
            a block, every "row", or the "block" (Adam-mini's saving).
        vectors: 1-D parameters: "adam", or "full" for full-matrix Adam.
        matrices: parameters of two and more dimensions: "kronecker", by the method, or "adam".
        merge_dims: True merges neighbouring dimensions, from the last, while their product ≤
            max_dim; a parameter that merges into one mode gets full-matrix Adam. "kernel" joins
            the kernel of a convolution to its inputs, and leaves matrices alone.
        oversize: dimensions above max_dim: "split", or "identity" for no basis on that side.
        precision: of the products in a step: "highest", full float32 whatever the process is set
            to (no TF32), or "inherit", as it is set; one group with "highest" is enough.
        max_failures: how many failed decompositions of one factor in a row are an error.

    For the paper's experiments:
        tau: τ; a basis is kept while its relative error is at most τ. A number or a callable
            step → number (`eshampoo.schedules`). 0 recomputes at every check, 1 never.
        frequency: F; the criterion is evaluated every F steps. "auto": whenever at least the share
            `novelty` of a factor's average is new since the last check; the first at step 1.
        novelty: ν in (0, 1]; that share, with frequency="auto".
        solver: "eigh"; "qr", Algorithm 4; "power", SOAP's single step; "partial", which
            diagonalises only the coordinates that carry the excess error.
        refresh_to: "partial" brings the criterion down to refresh_to · τ.
        qr_iterations: I, the most iterations of "qr".
        graft: the method whose norm the update takes: "adam", "rmsprop", "adagrad", "sgd" or None.
            Before the first basis it takes the step alone.
        graft_scope: norms of the whole "parameter" or of each "block".
        variant: "shampoo", with L^{-p/k} for each of k factors, or "shampoo2" with L^{-p}.
        trace_scaling: divide by S = Tr L = Tr R, shared out as Tr^{-(k-1)/k} per factor.
        eigenvalues: "stale", frozen with the basis, or "fresh", diag Λ̂ at every check.
        exponent: p of D^{-p}; 1 for the statistics of the Fisher. Parameters under Adam keep 1/2.
        statistics: whose gradients the factors, and D of EShampoo, see: those of every "step", or
            those at `optimizer.observe()`, of sampled labels for instance (Tensor Normal Training).
            Checks then count observations; before the first, a block has no basis.
        beta3: β3, the averaging constant of D; None means β2.
        correction: D on a change of basis: "naive" keeps it (Algorithm 2); "bounded" keeps it and
            cuts off what Adam could not reach in a basis that stands still; "basis_aware" maps it
            by V^{⊙2} (appendix); "optimal" takes diag(QᵀAQ) from the full matrix A (Algorithm 1;
            blocks of at most 4096 elements).
        slots: which new column inherits which entry of D: "rank", as the solver orders them, or
            "match", by largest overlap with the old columns.

    For programs that pass them to every optimizer:
        foreach: None or False; True is an error that says why, here and below.
        fused: None or False.
        capturable: None or False.
        differentiable: None or False.
        amsgrad: None or False.
    """

    lr: float | Tensor = keyword(1e-3, LR)
    betas: tuple[float, float] = keyword((0.9, 0.999), PAIR)
    eps: float = keyword(1e-8, AT_LEAST_0)
    weight_decay: float = keyword(1e-2, AT_LEAST_0)
    _: KW_ONLY
    budget: float | None = keyword(0.25, AT_LEAST_0_OR_NONE)
    rms: float | None = keyword(0.4, POSITIVE_OR_NONE)
    sides: Sides = keyword("both", one_of(Sides))
    max_dim: int = keyword(1024, COUNT)
    process_group: "ProcessGroup | None" = keyword(None, ANYTHING)
    nonfinite: NonFinite = keyword("skip", one_of(NonFinite))
    record: bool = keyword(False, SWITCH)
    maximize: bool = keyword(False, SWITCH)
    momentum: float = keyword(0.95, BELOW_1)
    ns_steps: int = keyword(5, COUNT)
    nesterov: bool = keyword(False, SWITCH)
    moment: Moment = keyword("entry", one_of(Moment))
    vectors: Vectors = keyword("adam", one_of(Vectors))
    matrices: Matrices = keyword("kronecker", one_of(Matrices))
    merge_dims: Merge = keyword(False, one_of(Literal["kernel"], False, True))
    oversize: Oversize = keyword("split", one_of(Oversize))
    precision: Precision = keyword("highest", one_of(Precision))
    max_failures: int = keyword(3, COUNT)
    tau: Tau = keyword(0.03, TAU)
    frequency: Frequency = keyword("auto", FREQUENCY)
    novelty: float = keyword(0.1, ABOVE_0)
    solver: Solver = keyword("eigh", one_of(Solver))
    refresh_to: float = keyword(0.5, SHARE)
    qr_iterations: int = keyword(10, COUNT)
    graft: Graft | None = keyword(None, one_of(Graft, None))
    graft_scope: GraftScope = keyword("parameter", one_of(GraftScope))
    variant: Variant = keyword("shampoo", one_of(Variant))
    trace_scaling: bool = keyword(False, SWITCH)
    eigenvalues: Eigenvalues = keyword("stale", one_of(Eigenvalues))
    exponent: float = keyword(0.5, POSITIVE)
    statistics: Statistics = keyword("step", one_of(Statistics))
    beta3: float | None = keyword(None, SHARE_OR_NONE)
    correction: Correction = keyword("naive", one_of(Correction))
    slots: Slots = keyword("rank", one_of(Slots))
    foreach: bool | None = keyword(
        None, only_false("a step works on stacks of blocks, which is what foreach is for")
    )
    fused: bool | None = keyword(None, only_false("there is no fused kernel for a step"))
    capturable: bool | None = keyword(
        None, only_false("a check reads from the device, which a CUDA graph cannot capture")
    )
    differentiable: bool | None = keyword(
        None, only_false("a step writes in place and cannot be differentiated")
    )
    amsgrad: bool | None = keyword(
        None, only_false("a largest second moment has no meaning in a basis that changes")
    )
    # β3, or β2 if β3 is None; known to the options of a step.
    beta_scale: float = field(default=math.nan, init=False)
    # ε where it stands beside √D, never 0, because 0/0 is NaN; known to the options of a step.
    least_eps: float = field(default=math.nan, init=False)
    # α without dimensions, whatever the shape of a tensor; known to the options of a step.
    rate: float | Tensor = field(default=math.nan, init=False)
    # Whether the criterion is evaluated at step t; known to the options of a step.
    checks_at: Every | WhenNew = field(default=Every(1), init=False)
    # Whether momentum of Adam's kind looks one step ahead; known to the options of a step.
    ahead: bool = field(default=False, init=False)
    # Whether entries are cut off at Adam's own bound; known to the options of a step. Where the
    # size of an update is fixed, an entry beyond it would be at the cost of all others. Another p,
    # one number of D for many entries, or D of other gradients than M, has no such bound.
    bounded: bool = field(default=False, init=False)

    # Whether `nesterov` is of Adam's momentum.
    adam_looks_ahead: ClassVar[bool] = True

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> "Options":
        """Read and check a param group."""
        own = offered(cls)
        for key in group.keys() - own - FOREIGN_KEYS:
            if hint := misspelt(cls, key):
                raise ValueError(
                    f"a param group has the key {key!r}, which is no keyword of this optimizer: "
                    f"{hint} Write the keyword, or rename the key if it is meant for other code"
                )
        options = cls(**{name: _RULES[name].read(group[name]) for name in own if name in group})
        for name, rule in _RULES.items():
            rule.check(name, getattr(options, name))
        beta1, beta2 = options.betas
        BELOW_1.check("betas[0]", beta1)
        SHARE.check("betas[1]", beta2)
        for contradicts, names, why in CONTRADICTIONS:
            if contradicts(options):
                both = " and ".join(f"{name}={getattr(options, name)!r}" for name in names)
                raise ValueError(f"{both} {why}")
        F = options.frequency
        as_adam = (options.exponent, options.moment, options.statistics) == (0.5, "entry", "step")
        derived = {
            "beta_scale": beta2 if options.beta3 is None else options.beta3,
            "least_eps": max(options.eps, 1e-30),
            "rate": options.lr.view(()) if isinstance(options.lr, Tensor) else options.lr,
            "checks_at": when_new(beta2, options.novelty) if F == "auto" else Every(F),
            "ahead": options.nesterov and cls.adam_looks_ahead,
            "bounded": options.correction == "bounded" or (options.rms is not None and as_adam),
        }
        for name, value in derived.items():
            object.__setattr__(options, name, value)
        return options

    @property
    def graft_moment(self) -> bool:
        """Whether the grafting method keeps a second moment."""
        return self.graft in ("adam", "rmsprop", "adagrad")

    @property
    def shapes(self) -> dict[str, Any]:
        """What the shapes of the state depend on, and so cannot change while the state lives."""
        return {
            "max_dim": self.max_dim,
            "oversize": self.oversize,
            "merge_dims": self.merge_dims,
            "vectors": self.vectors,
            "matrices": self.matrices,
            "sides": self.sides,
            "moment": self.moment,
            "statistics": self.statistics,
            "graft with a second moment": self.graft_moment,
            "correction='optimal'": self.correction == "optimal",
        }

    def check_shapes(self, before: Mapping[str, Any]) -> None:
        """Refuse a change of what the state was laid out by."""
        for key, value in self.shapes.items():
            if value != before[key]:
                raise ValueError(
                    f"{key} is {value!r} now but was {before[key]!r} when the state was laid out; "
                    "the shapes of the state depend on it: set it back, or build a new optimizer"
                )

    def threshold(self, step: int) -> float:
        """τ at step t."""
        if not callable(self.tau):
            return self.tau
        value = plain(self.tau(step))
        TAU.check(f"tau({step})", value)
        return float(value)


# Values that do not go together: the test, their names, and what an error says of them.
CONTRADICTIONS: tuple[tuple[Callable[[Options], bool], tuple[str, str], str], ...] = (
    (
        lambda o: o.rms is not None and o.graft is not None,
        ("rms", "graft"),
        "both set the size of an update; leave one of them at None",
    ),
    (
        lambda o: o.sides != "both" and o.vectors == "full",
        ("sides", "vectors"),
        "contradict each other, for a vector has one side; set sides='both' or vectors='adam'",
    ),
    (
        lambda o: o.exponent != 0.5 and o.correction == "bounded",
        ("exponent", "correction"),
        "contradict each other, for Adam's bound is of √D; set exponent=0.5 or correction='naive'",
    ),
    (
        lambda o: o.statistics != "step" and o.correction == "bounded",
        ("statistics", "correction"),
        "contradict each other, for Adam's bound is of M and D of the same gradients; set "
        "statistics='step' or correction='naive'",
    ),
    (
        lambda o: o.moment != "entry" and o.correction in ("bounded", "optimal"),
        ("moment", "correction"),
        "contradict each other, for it speaks of every entry of D; set moment='entry' or "
        "correction='naive'",
    ),
)
_RULES: dict[str, Rule] = {f.name: f.metadata["rule"] for f in fields(Options) if f.metadata}


# -------------------------------------------------------------------- who offers what


def offered(options: type[Options]) -> list[str]:
    """The keywords that an optimizer with these options takes."""
    return [f.name for f in fields(options) if f.init]


def misspelt(options: type[Options], key: str) -> str | None:
    """What the user may have meant by a key that is no keyword; other tools have keys of theirs."""
    if key in _RULES:
        return f"{key!r} belongs to other optimizers of this library."
    own = offered(options)
    close = difflib.get_close_matches(key, own, 1, cutoff=0.7)
    close += [name for name in own if len(key) > 2 and name.startswith(key)]
    return f"did you mean {close[0]!r}?" if close else None
