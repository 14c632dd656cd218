"""Each keyword, defined once: its name, type, default, rule and meaning.

Keywords come in groups, and a class of optimizers lists the groups that it takes. A param group is
an ordinary dictionary that users and schedulers write into. So the optimizer reads and checks it
again at every step, before anything changes.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from torch import Tensor
from torch.optim.optimizer import ParamsT

from . import validate
from .checks import is_new
from .math.solvers import Solver
from .validate import Rule, also, one_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Correction = Literal["naive", "basis_aware", "optimal"]
Vectors = Literal["adam", "full"]
Matrices = Literal["kronecker", "adam"]
Oversize = Literal["split", "identity"]
Merge = bool | Literal["kernel"]
NonFinite = Literal["skip", "raise", "propagate"]
Precision = Literal["highest", "high", "inherit"]
Factors = Literal["gram", "kl"]
Sides = Literal["both", "left", "right", "smaller"]
Moment = Literal["entry", "row", "block"]
Statistics = Literal["step", "observe"]
Storage = Literal["full", "lean"]
Variant = Literal["shampoo", "shampoo2"]
Graft = Literal["adam", "rmsprop", "adagrad", "sgd"]
GraftScope = Literal["block", "parameter"]
Eigenvalues = Literal["stale", "fresh"]
Frequency = int | Literal["auto"]
Size = float | Literal["auto"] | None
Tau = float | Callable[[int], float]
T = TypeVar("T")

# The keys that a group of `torch.optim.AdamW` shares with one of ours, and its schedulers' own.
ADAM_KEYS = ("lr", "betas", "eps", "weight_decay", "maximize", "initial_lr")

# Group keys that torch, its schedulers and known frameworks write. No step reads them.
FOREIGN_KEYS = {
    "params", "param_names", "method", "initial_lr", "kind", "name", "decoupled_weight_decay",
    "lr_scale", "swa_lr", "max_lr", "min_lr", "base_momentum", "max_momentum",
}  # fmt: skip


def keyword(default: T, rule: Rule) -> T:
    """A field of keywords with its rule."""
    return field(default=default, metadata={"rule": rule})


# -------------------------------------------------------------------- keywords, in groups


@dataclass(frozen=True)
class Parameters:
    """What is trained.

    Args:
        params: parameters, `model.named_parameters()` (reports then show names), or groups.
    """

    params: ParamsT


@dataclass(frozen=True)
class Common:
    """What every optimizer takes: AdamW's arguments first, in its order.

    Args:
        lr: α; a number or a tensor with one element.
        betas: β1 of the momentum and β2 of the factors; β2 = 1 sums instead of averaging (AdaGrad).
        eps: ε, added to the corrected √D as in AdamW.
        weight_decay: λ, decoupled.
        matrices: the method for parameters with two or more dimensions: "kronecker" for the
            method of this class, or "adam".
        batch_dims: how many leading dimensions are separate matrices (stacked experts, `vmap`).
        pieces: into how many equal pieces dimension 0 of each matrix is cut (fused QKV, heads).
        nesterov: look one step ahead in the momentum, as in NAdam. In `Muon` this concerns only
            Muon's own momentum.
        maximize: maximise the objective instead of minimising it.
        nonfinite: what to do with a gradient that has NaN or Inf. "skip" leaves its block out of
            the step, "raise" raises an error before anything changes, "propagate" uses it.
        precision: how the products of a step are computed, whatever the process is set to.
            "highest" is full float32. "high" lets rotations and Gram products use TF32, or bfloat16
            operands on some CPUs. "inherit" follows the process. All groups get the highest that
            one of them asks for. Changes of basis are always full float32.
        process_group: the group of `torch.distributed` whose ranks share work and state.
    """

    lr: float | Tensor = keyword(1e-3, validate.LR)
    betas: tuple[float, float] = keyword((0.9, 0.999), validate.PAIR)
    eps: float = keyword(1e-8, validate.AT_LEAST_0)
    weight_decay: float = keyword(1e-2, validate.AT_LEAST_0)
    _: KW_ONLY
    matrices: Matrices = keyword("kronecker", one_of(Matrices))
    batch_dims: int = keyword(0, validate.WHOLE)
    pieces: int = keyword(1, validate.COUNT)
    nesterov: bool = keyword(False, validate.SWITCH)
    maximize: bool = keyword(False, validate.SWITCH)
    nonfinite: NonFinite = keyword("skip", one_of(NonFinite))
    precision: Precision = keyword("highest", one_of(Precision))
    process_group: "ProcessGroup | None" = keyword(None, validate.ANYTHING)


@dataclass(frozen=True)
class Keywords(Common, Parameters):
    """What every constructor takes."""


@dataclass(frozen=True, kw_only=True)
class Bases:
    """Which blocks have a basis, and when it is computed.

    Args:
        rms: the size of the update of a block with a basis. "auto" sets its root mean square by the
            share of recent gradients that agree, ρ = ‖M̂‖/√(E‖G‖²). A number fixes it. None does not
            scale, as in the paper. It cannot be combined with `graft`.
        budget: what the bases of a factor may cost, as a share of the arithmetic of its plain
            steps. The first (1 + ln νt)/ν bases are free. None sets no limit.
        tau: τ; a basis is kept while its relative error is at most τ. A number, or a callable
            step → number (`eshampoo.schedules`). 0 recomputes at every check, 1 never.
        frequency: F; the criterion is evaluated every F steps. With "auto" it is evaluated when
            at least the share `novelty` of a factor's average is new since the last check. After
            step 20 the blocks then take turns.
        novelty: ν, the share that must be new with frequency="auto".
        solver: how to compute a basis: "eigh"; "qr" (Algorithm 4); "power" (SOAP's single step);
            or "partial", which diagonalises only the coordinates that carry the excess error.
        qr_iterations: I, the largest number of iterations of "qr".
        exponent: p of D^{-p}; 1 for the statistics of the Fisher. Parameters under Adam keep 1/2.
        state: "full", or "lean", which takes little more than half of the memory: one triangle of
            each factor, momentum in bfloat16 and bases in float16.
        record: keep the history of the criterion for `basis_report()`.
        vectors: the method for 1-D parameters: "adam", or "full" for full-matrix Adam.
        max_dim: the largest size of a block; larger dimensions are split into several blocks.
    """

    rms: Size = keyword("auto", also(validate.POSITIVE, "auto", None))
    budget: float | None = keyword(0.25, also(validate.AT_LEAST_0, None))
    tau: Tau = keyword(0.03, validate.TAU)
    frequency: Frequency = keyword("auto", also(validate.COUNT, "auto"))
    novelty: float = keyword(0.1, validate.ABOVE_0)
    solver: Solver = keyword("eigh", one_of(Solver))
    qr_iterations: int = keyword(10, validate.COUNT)
    exponent: float = keyword(0.5, validate.POSITIVE)
    state: Storage = keyword("full", one_of(Storage))
    record: bool = keyword(False, validate.SWITCH)
    vectors: Vectors = keyword("adam", one_of(Vectors))
    max_dim: int = keyword(1024, validate.COUNT)


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """How a parameter is cut into blocks with a basis on every side.

    Args:
        sides: which sides of a matrix have a basis: "both", or only the "left" (rows as stored: the
            outputs of `nn.Linear`), the "right" or the "smaller" one (one-sided Shampoo, ASGO). In
            a tensor with more dimensions "left" is the first one and "right" the last. A side that
            is 8 times as long as the rest of its block never has a basis.
        oversize: what to do with a dimension above max_dim: "split" it, or "identity" for no basis
            on that side.
        merge_dims: True merges neighbouring dimensions, from the last one, while their product is
            at most max_dim; a parameter that merges into one mode gets full-matrix Adam. "kernel"
            joins the kernel of a convolution to its inputs, and leaves matrices alone.
    """

    sides: Sides = keyword("both", one_of(Sides))
    oversize: Oversize = keyword("split", one_of(Oversize))
    merge_dims: Merge = keyword(False, one_of(Literal["kernel"], False, True))


@dataclass(frozen=True, kw_only=True)
class Averaged:
    """What a factor averages.

    Args:
        factors: "gram" averages GGᵀ and GᵀG; with "kl" the factors whiten each other, as in
            KL-Shampoo (KL-SOAP).
    """

    factors: Factors = keyword("gram", one_of(Factors))


@dataclass(frozen=True, kw_only=True)
class Observed:
    """Statistics that come from other gradients than the steps'.

    Args:
        statistics: which gradients the factors, and D of EShampoo, see: with "step" those of
            every step, with "observe" those present at `observe()`, for instance of
            sampled labels (Tensor Normal Training).
    """

    statistics: Statistics = keyword("step", one_of(Statistics))


@dataclass(frozen=True, kw_only=True)
class SecondMoment:
    """The scale D of methods that average G̃^{⊙2}.

    Args:
        beta3: β3, the averaging constant of D; None means β2.
        correction: what happens to D when a basis changes. "naive" keeps it (Algorithm 2);
            "basis_aware" maps it by V^{⊙2} (appendix); "optimal" takes diag(QᵀAQ) from the full
            matrix A (Algorithm 1; blocks of at most 4096 elements).
    """

    beta3: float | None = keyword(None, also(validate.SHARE, None))
    correction: Correction = keyword("naive", one_of(Correction))


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Second moments that have one number for many entries.

    Args:
        moment: whether D, or the moment of the grafting method, has one number per "entry" of a
            block, per "row", or per "block" (Adam-mini's saving).
    """

    moment: Moment = keyword("entry", one_of(Moment))


@dataclass(frozen=True, kw_only=True)
class Roots:
    """The inverse roots of Shampoo, and learning-rate grafting.

    Args:
        variant: "shampoo", with L^{-p/k} for each of k factors, or "shampoo2", with L^{-p}.
        trace_scaling: divide by S = Tr L = Tr R; each factor takes the share Tr^{-(k-1)/k}.
        eigenvalues: "stale", frozen with the basis, or "fresh", diag Λ̂ at every check.
        graft: the method whose norm the update takes: "adam", "rmsprop", "adagrad", "sgd" or None.
            Before the first basis this method takes the step alone.
        graft_scope: whether to take norms over the whole "parameter" or over each "block".
    """

    variant: Variant = keyword("shampoo", one_of(Variant))
    trace_scaling: bool = keyword(False, validate.SWITCH)
    eigenvalues: Eigenvalues = keyword("stale", one_of(Eigenvalues))
    graft: Graft | None = keyword(None, one_of(Graft, None))
    graft_scope: GraftScope = keyword("parameter", one_of(GraftScope))


@dataclass(frozen=True, kw_only=True)
class NewtonSchulz:
    """The polar factor of Muon.

    Args:
        momentum: μ of Muon's momentum; `betas` are those of the AdamW beside it.
        ns_steps: iterations of Newton–Schulz.
    """

    momentum: float = keyword(0.95, validate.BELOW_1)
    ns_steps: int = keyword(5, validate.COUNT)


# -------------------------------------------------------------------- what a step reads


@dataclass(frozen=True)
class Options(
    NewtonSchulz, Roots, Moments, SecondMoment, Observed, Averaged, Blocks, Bases, Common
):
    """What a param group says at this step; keywords of other classes have their defaults."""

    # Whether momentum of Adam's kind looks one step ahead: that of the AdamW beside Muon does not.
    looks_ahead: bool = False

    @classmethod
    def of(cls, group: Mapping[str, Any], own: Collection[str]) -> "Options":
        """Read and check a param group of an optimizer that takes the keywords `own`."""
        for key in group.keys() - own - FOREIGN_KEYS - validate.SWITCHES.keys():
            if hint := validate.misspelt(key, own, RULES):
                raise ValueError(
                    f"a param group has the key {key!r}, which is not a keyword of this optimizer: "
                    f"{hint} Write the keyword, or rename the key if it is meant for other code"
                )
        validate.check_switches(group)
        values = {name: RULES[name].read(group[name]) for name in own if name in group}
        looks_ahead = values.get("nesterov") is True and "ns_steps" not in own
        options = cls(**values, looks_ahead=looks_ahead)
        for name, value in values.items():
            RULES[name].check(name, value)
        validate.BELOW_1.check("betas[0]", options.betas[0])
        validate.SHARE.check("betas[1]", options.betas[1])
        validate.check_contradictions(options)
        return options

    @cached_property
    def beta_scale(self) -> float:
        """β3, or β2 if β3 is None."""
        return self.betas[1] if self.beta3 is None else self.beta3

    @cached_property
    def least_eps(self) -> float:
        """ε where it stands beside √D; never 0, because 0/0 is NaN."""
        return max(self.eps, 1e-30)

    @cached_property
    def rate(self) -> float | Tensor:
        """α as a number, or as a tensor without dimensions."""
        return self.lr.view(()) if isinstance(self.lr, Tensor) else self.lr

    def checks_at(self, step: int, offset: float = 0.0) -> bool:
        """Whether the criterion of a block with this offset is evaluated at step t."""
        if self.frequency == "auto":
            return is_new(self.betas[1], self.novelty, step, offset)
        return step % self.frequency == 0

    @cached_property
    def has_graft_moment(self) -> bool:
        """Whether the grafting method keeps a second moment."""
        return self.graft in ("adam", "rmsprop", "adagrad")

    @cached_property
    def shaping(self) -> dict[str, Any]:
        """What shapes the state."""
        return {name: getattr(self, name) for name in validate.SHAPING} | {
            "graft with a second moment": self.has_graft_moment,
            "correction='optimal'": self.correction == "optimal",
        }

    def threshold(self, step: int) -> float:
        """τ at step t, if it is a function."""
        assert callable(self.tau)
        value = validate.plain(self.tau(step))
        validate.TAU.check(f"tau({step})", value)
        return float(value)


RULES: dict[str, Rule] = {f.name: f.metadata["rule"] for f in fields(Options) if f.metadata}


def offered(keywords: type[Keywords]) -> list[str]:
    """The keywords of an optimizer, without `params`."""
    return [f.name for f in fields(keywords) if f.name in RULES]
