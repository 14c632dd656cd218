"""Each keyword, defined once: its name, type, default, rule and meaning, and which class offers it.

A param group is an ordinary dictionary that users and schedulers write into. So the optimizer reads
and checks it again at every step, before anything changes.
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
    CONTRADICTIONS,
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
Form = Literal["full", "lean"]
Variant = Literal["shampoo", "shampoo2"]
Graft = Literal["adam", "rmsprop", "adagrad", "sgd"]
GraftScope = Literal["block", "parameter"]
Eigenvalues = Literal["stale", "fresh"]
Frequency = int | Literal["auto"]
Tau = float | Callable[[int], float]
T = TypeVar("T")

# The keys that a group of `torch.optim.AdamW` shares with one of ours.
ADAM_KEYS = ("lr", "betas", "eps", "weight_decay", "maximize")

# Group keys that torch, its schedulers and known frameworks write. No step reads them.
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

    An optimizer does not offer the fields that have init=False in its own options class.

    Args:
        params: parameters, `model.named_parameters()` (reports then show names), or groups.
        lr: α; a number or a tensor with one element.
        betas: β1 of the momentum and β2 of the factors; β2 = 1 sums instead of averaging (AdaGrad).
        eps: ε, added to the corrected √D as in AdamW.
        weight_decay: λ, decoupled.
        budget: the most that the bases of a factor may cost, as a share of the arithmetic of its
            plain steps. The first 2.5 log₂(1 + t/2) bases are free. A factor without credit waits
            for a later check (`basis_report()` says how often). None sets no limit.
        rms: scale the update of every block with a basis to this root mean square, so that the
            learning rate means the same in every layer and method. √D then counts as at least a
            thousandth of its root mean square, and no entry exceeds Adam's own bound. An update
            that has faded because its gradients have stopped is not scaled up again. None does not
            scale, which is the paper's rule. You cannot combine it with `graft`.
        sides: which sides of a matrix have a basis: "both", or only the "left", the "right" or the
            "smaller" one (one-sided Shampoo, ASGO). The other side then needs no products and no
            state. In a tensor with more dimensions "left" is the first one and "right" the last.
            A side that is 8 times as long as the rest of its block, or longer, never has a basis.
        state: "full", or "lean", which takes little more than half of the memory: one triangle of
            each factor, momentum in bfloat16 (rounded so that it does not stall) and bases in
            float16.
        max_dim: the largest size of a block; larger dimensions are split into several blocks.
        process_group: the group of `torch.distributed` whose ranks share work and state.
        nonfinite: what to do with a gradient that has NaN or Inf. "skip" leaves its block out of
            the step, "raise" raises an error before anything changes, "propagate" uses it.
        record: keep the history of the criterion for `basis_report()`.
        maximize: maximise the objective instead of minimising it.

    For models and machines that need more:
        momentum: μ of Muon's momentum; `betas` are those of the AdamW beside it.
        ns_steps: iterations of Newton–Schulz.
        nesterov: look one step ahead in the momentum, as in NAdam. In `Muon` this concerns only
            Muon's own momentum.
        moment: whether D and the moment of the grafting method have one number per "entry" of a
            block, per "row", or per "block" (Adam-mini's saving).
        vectors: the method for 1-D parameters: "adam", or "full" for full-matrix Adam.
        matrices: the method for parameters with two or more dimensions: "kronecker" for the
            method of this class, or "adam".
        merge_dims: True merges neighbouring dimensions, from the last one, while their product is
            at most max_dim; a parameter that merges into one mode gets full-matrix Adam. "kernel"
            joins the kernel of a convolution to its inputs, and leaves matrices alone.
        oversize: what to do with a dimension above max_dim: "split" it, or "identity" for no basis
            on that side.
        precision: the precision of the products of a step. "highest" is full float32 whatever the
            process is set to (no TF32), for the whole step if one group asks for it. "inherit"
            follows the process.
        stagger: from step 20 on, spread the checks of the blocks, by cost, over the steps between
            two checks, so that all steps take about the same time. The steps at which `budget`
            allows a basis are spread too.
        max_failures: raise an error after this many failed decompositions of a factor in a row.

    For the paper's experiments:
        tau: τ; the optimizer keeps a basis while its relative error is at most τ. A number, or a
            callable step → number (`eshampoo.schedules`). 0 recomputes at every check, 1 never.
        frequency: F; the optimizer evaluates the criterion every F steps. With "auto" it does so
            when at least the share `novelty` of a factor's average is new since the last check,
            and at step 1.
        novelty: ν, the share that must be new with frequency="auto".
        solver: how to compute a basis: "eigh"; "qr" (Algorithm 4); "power" (SOAP's single step);
            or "partial", which diagonalises only the coordinates that carry the excess error.
        refresh_to: "partial" brings the criterion down to refresh_to · τ.
        qr_iterations: I, the most iterations of "qr".
        graft: the method whose norm the update takes: "adam", "rmsprop", "adagrad", "sgd" or None.
            Before the first basis this method takes the step alone.
        graft_scope: whether to take norms over the whole "parameter" or over each "block".
        variant: "shampoo", with L^{-p/k} for each of k factors, or "shampoo2", with L^{-p}.
        trace_scaling: divide by S = Tr L = Tr R; each factor takes the share Tr^{-(k-1)/k}.
        eigenvalues: "stale", frozen with the basis, or "fresh", diag Λ̂ at every check.
        exponent: p of D^{-p}; 1 for the statistics of the Fisher. Parameters under Adam keep 1/2.
        statistics: which gradients the factors, and D of EShampoo, see: with "step" the gradients
            of every step, with "observe" those present at `optimizer.observe()`, for instance of
            sampled labels (Tensor Normal Training). Checks then count observations, and a block
            has no basis before its first one.
        beta3: β3, the averaging constant of D; None means β2.
        correction: what happens to D when a basis changes. "naive" keeps it (Algorithm 2);
            "bounded" keeps it and clips entries that Adam could not reach in a fixed basis;
            "basis_aware" maps it by V^{⊙2} (appendix); "optimal" takes diag(QᵀAQ) from the full
            matrix A (Algorithm 1; blocks of at most 4096 elements).
        slots: which new column inherits which entry of D: "rank", as the solver orders them, or
            "match", by largest overlap with the old columns.

    For programs that pass them to every optimizer:
        foreach: accepted, like the next four, so that such programs run.
        fused: as `foreach`.
        capturable: as `foreach`.
        differentiable: as `foreach`.
        amsgrad: as `foreach`.
    """

    lr: float | Tensor = keyword(1e-3, LR)
    betas: tuple[float, float] = keyword((0.9, 0.999), PAIR)
    eps: float = keyword(1e-8, AT_LEAST_0)
    weight_decay: float = keyword(1e-2, AT_LEAST_0)
    _: KW_ONLY
    budget: float | None = keyword(0.25, AT_LEAST_0_OR_NONE)
    rms: float | None = keyword(0.4, POSITIVE_OR_NONE)
    sides: Sides = keyword("both", one_of(Sides))
    state: Form = keyword("full", one_of(Form))
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
    stagger: bool = keyword(False, SWITCH)
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
        None, only_false("a maximum of second moments has no meaning in a basis that changes")
    )
    # The fields below are derived in `of`, from the fields above.
    # β3, or β2 if β3 is None.
    beta_scale: float = field(default=math.nan, init=False)
    # ε where it stands beside √D. It is never 0, because 0/0 is NaN.
    least_eps: float = field(default=math.nan, init=False)
    # α as a number, or as a tensor without dimensions.
    rate: float | Tensor = field(default=math.nan, init=False)
    # Whether the optimizer evaluates the criterion at step t.
    checks_at: Every | WhenNew = field(default=Every(1), init=False)
    # Whether momentum of Adam's kind looks one step ahead.
    ahead: bool = field(default=False, init=False)
    # Whether entries are clipped at Adam's own bound. Where the size of an update is fixed, an
    # entry beyond the bound would make all other entries smaller. The bound does not hold for
    # another p, for a D with one number for many entries, or if D and M see different gradients.
    bounded: bool = field(default=False, init=False)
    # Whether the length of an update does not depend on the scale of the gradients.
    scale_free: bool = field(default=False, init=False)

    # Whether `nesterov` concerns Adam's momentum.
    adam_looks_ahead: ClassVar[bool] = True

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> "Options":
        """Read and check a param group."""
        own = offered(cls)
        for key in group.keys() - own - FOREIGN_KEYS:
            if hint := misspelt(cls, key):
                raise ValueError(
                    f"a param group has the key {key!r}, which is not a keyword of this optimizer: "
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
        scale_free = (options.exponent, options.statistics) == (0.5, "step")
        as_adam = scale_free and options.moment == "entry"
        derived = {
            "beta_scale": beta2 if options.beta3 is None else options.beta3,
            "least_eps": max(options.eps, 1e-30),
            "rate": options.lr.view(()) if isinstance(options.lr, Tensor) else options.lr,
            "checks_at": when_new(beta2, options.novelty) if F == "auto" else Every(F),
            "ahead": options.nesterov and cls.adam_looks_ahead,
            "bounded": options.correction == "bounded" or (options.rms is not None and as_adam),
            "scale_free": scale_free and (options.variant == "shampoo" or options.trace_scaling),
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
        """The options that shape the state; they cannot change while the state exists."""
        return {
            "max_dim": self.max_dim,
            "oversize": self.oversize,
            "merge_dims": self.merge_dims,
            "vectors": self.vectors,
            "matrices": self.matrices,
            "sides": self.sides,
            "state": self.state,
            "moment": self.moment,
            "statistics": self.statistics,
            "graft with a second moment": self.graft_moment,
            "correction='optimal'": self.correction == "optimal",
        }

    def check_shapes(self, before: Mapping[str, Any]) -> None:
        """Refuse a change that would need a state with other shapes."""
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


_RULES: dict[str, Rule] = {f.name: f.metadata["rule"] for f in fields(Options) if f.metadata}


# -------------------------------------------------------------------- which class offers what


def offered(options: type[Options]) -> list[str]:
    """The keywords that an optimizer with these options takes."""
    return [f.name for f in fields(options) if f.init]


def misspelt(options: type[Options], key: str) -> str | None:
    """What the user may have meant by an unknown key; None for keys of other tools."""
    if key in _RULES:
        return f"{key!r} belongs to other optimizers of this library."
    own = offered(options)
    close = difflib.get_close_matches(key, own, 1, cutoff=0.7)
    close += [name for name in own if len(key) > 2 and name.startswith(key)]
    return f"did you mean {close[0]!r}?" if close else None
