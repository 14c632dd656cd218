"""The classes that users see. Each is a row of the table in `methods.py`, with its keywords."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import ClassVar, Concatenate, ParamSpec, TypeVar, final

from torch import Tensor
from torch.optim.optimizer import ParamsT

from . import methods
from .describe import described
from .engine import EigenbasisOptimizer
from .math.solvers import Slots, Solver
from .options import (
    Correction,
    Eigenvalues,
    Form,
    Frequency,
    Graft,
    GraftScope,
    Merge,
    Moment,
    Options,
    Oversize,
    Sides,
    Statistics,
    Tau,
    Variant,
    Vectors,
    misspelt,
    offered,
)

P = ParamSpec("P")
S = TypeVar("S", bound=EigenbasisOptimizer)
Plain = Callable[[S, ParamsT, Options], None]
Constructor = Callable[Concatenate[S, ParamsT, P], None]


def takes(options: Callable[P, Options]) -> Callable[[Plain[S]], Constructor[S, P]]:
    """Give a constructor the keywords and defaults of a class of options."""
    assert isinstance(options, type)
    own = offered(options)

    def decorate(plain: Plain[S]) -> Constructor[S, P]:
        @wraps(plain)
        def construct(self: S, params: ParamsT, *args: P.args, **kwargs: P.kwargs) -> None:
            for key in kwargs.keys() - own:
                hint = misspelt(options, key) or f"it takes {', '.join(own)}"
                raise TypeError(f"{type(self).__name__} has no keyword {key!r}: {hint}")
            if kwargs.get("graft") is not None:  # a graft sets the size of updates instead
                kwargs.setdefault("rms", None)
            plain(self, params, options(*args, **kwargs))

        first = list(inspect.signature(plain).parameters.values())[:2]  # self and params
        keywords = inspect.signature(options)
        signature = keywords.replace(parameters=[*first, *keywords.parameters.values()])
        construct.__signature__ = signature  # type: ignore[attr-defined]
        return construct  # type: ignore[return-value]  # callers may pass `params` by name, too

    return decorate


@dataclass(frozen=True, kw_only=True)
class EShampooOptions(Options):
    """All keywords except those of Shampoo and Muon."""

    momentum: float = field(default=0.95, init=False)
    ns_steps: int = field(default=5, init=False)
    variant: Variant = field(default="shampoo", init=False)
    trace_scaling: bool = field(default=False, init=False)
    eigenvalues: Eigenvalues = field(default="stale", init=False)


@final
class EShampoo(EigenbasisOptimizer):
    """Eigenvalue-corrected Shampoo (Algorithm 2): Adam in the eigenbasis of Shampoo's factors.

        W ← W − α ( Q_L ( Q_LᵀM̂Q_R ⊘ (√D̂ + ε) ) Q_Rᵀ + λW ),   D ← β3 D + (1−β3) (Q_LᵀGQ_R)^{⊙2}

    Hats mean that an average is corrected for its bias. By default each update has a fixed root
    mean square (`rms`). The paper's own rule is rms=None, budget=None, frequency=F; until step F it
    is AdamW. The first arguments are those of `torch.optim.AdamW`. Every keyword is also a
    param-group key, and the optimizer reads it again at every step.
    """

    method, options = methods.ESHAMPOO, EShampooOptions

    @takes(EShampooOptions)
    def __init__(self, params: ParamsT, options: Options) -> None:
        super().__init__(params, options)


@dataclass(frozen=True, kw_only=True)
class ShampooOptions(Options):
    """The defaults of the winner of AlgoPerf, without the keywords of the second moment D."""

    tau: Tau = 0.0
    frequency: Frequency = 100
    budget: float | None = None
    graft: Graft | None = "adam"
    rms: float | None = None
    momentum: float = field(default=0.95, init=False)
    ns_steps: int = field(default=5, init=False)
    slots: Slots = field(default="rank", init=False)
    beta3: float | None = field(default=None, init=False)
    correction: Correction = field(default="naive", init=False)


@final
class Shampoo(EigenbasisOptimizer):
    """Shampoo; by default the AlgoPerf winner, with stale inverse roots and Adam's step size.

        U = L^{-1/4} M R^{-1/4},   W ← W − α ( U ‖U_graft‖_F / ‖U‖_F + λW )   (Eq. grafting)

    A block of order k has k factors, each raised to −1/(2k). The optimizer caches the inverse
    roots, so a step costs two thirds of EShampoo's matrix products.
    """

    method, options = methods.SHAMPOO, ShampooOptions

    @takes(ShampooOptions)
    def __init__(self, params: ParamsT, options: Options) -> None:
        super().__init__(params, options)


@dataclass(frozen=True, kw_only=True)
class CASPROptions(ShampooOptions):
    """The options of Shampoo, without a graft and without cached roots."""

    graft: Graft | None = None
    variant: Variant = field(default="shampoo", init=False)
    trace_scaling: bool = field(default=False, init=False)
    eigenvalues: Eigenvalues = field(default="stale", init=False)


@final
class CASPR(EigenbasisOptimizer):
    """CASPR averages the two sides of a matrix, where Shampoo multiplies them.

        U = (L^{-1/2} M + 2 L^{-1/4} M R^{-1/4} + M R^{-1/2}) / 4
          = Q_L ( ((λ_L^{-1/4} + λ_R^{-1/4})/2)² ⊙ (Q_LᵀMQ_R) ) Q_Rᵀ

    The eigenvalues are those of the current step. For order k, the scale is
    (Σ_i λ_i^{-1/(2k)} / k)^k.
    """

    method, options = methods.CASPR, CASPROptions

    @takes(CASPROptions)
    def __init__(self, params: ParamsT, options: Options) -> None:
        super().__init__(params, options)


@dataclass(frozen=True, kw_only=True)
class SOAPOptions(EShampooOptions):
    """The defaults of SOAP's authors."""

    lr: float | Tensor = field(default=3e-3, kw_only=False)
    betas: tuple[float, float] = field(default=(0.95, 0.95), kw_only=False)
    tau: Tau = 0.0
    frequency: Frequency = 10
    budget: float | None = None
    rms: float | None = None
    solver: Solver = "power"
    # SOAP's first gradient only builds the basis, and the basis changes after the update. Neither
    # rule has a meaning for observations.
    statistics: Statistics = field(default="step", init=False)
    max_dim: int = 10000
    oversize: Oversize = "identity"
    merge_dims: Merge = False


@final
class SOAP(EigenbasisOptimizer):
    """SOAP, as its authors' code behaves: one power step every F steps, after the update.

        V = qr(Λ̂ P),  Q ← QV,  D permuted by P, which sorts diag Λ̂ in descending order

    The first gradient only builds the basis. ε is added to the uncorrected √D, and weights decay
    last. The defaults are those of its authors. One rule is ours: a side has no basis if its factor
    would have at least 8 times the entries of its block.
    """

    method, options = methods.SOAP, SOAPOptions

    @takes(SOAPOptions)
    def __init__(self, params: ParamsT, options: Options) -> None:
        super().__init__(params, options)


@dataclass(frozen=True, kw_only=True)
class KLShampooOptions(EShampooOptions):
    """EShampoo's options without those of the second moment D, which KL-Shampoo does not keep."""

    tau: Tau = 0.0
    frequency: Frequency = 10
    budget: float | None = None
    rms: float | None = None
    moment: Moment = field(default="entry", init=False)
    graft: Graft | None = field(default=None, init=False)
    graft_scope: GraftScope = field(default="parameter", init=False)
    slots: Slots = field(default="rank", init=False)
    beta3: float | None = field(default=None, init=False)
    correction: Correction = field(default="naive", init=False)


@final
class KLShampoo(EigenbasisOptimizer):
    """KL-Shampoo: its factors whiten each other, and it averages eigenvalues at every step.

        L ← β2 L + (1−β2)/n · G R⁻¹ Gᵀ,   R ← β2 R + (1−β2)/m · Gᵀ L⁻¹ G
        U = Q_L λ_L^{-1/2} ( Q_LᵀMQ_R ) λ_R^{-1/2} Q_Rᵀ

    It adds 0.01 times their mean to all eigenvalues λ, also in R⁻¹ and L⁻¹, and starts with
    L = R = √(E G²)·I at the first gradient. It needs no grafting, and no second moment of the
    parameter's size.
    """

    method, options = methods.KL_SHAMPOO, KLShampooOptions

    @takes(KLShampooOptions)
    def __init__(self, params: ParamsT, options: Options) -> None:
        super().__init__(params, options)


@dataclass(frozen=True, kw_only=True)
class FullMatrixAdamOptions(EShampooOptions):
    """EShampoo's options without those that merge or split: each parameter is one vector."""

    vectors: Vectors = "full"
    graft: Graft | None = field(default=None, init=False)
    graft_scope: GraftScope = field(default="parameter", init=False)
    sides: Sides = field(default="both", init=False)
    moment: Moment = field(default="entry", init=False)
    oversize: Oversize = field(default="split", init=False)
    merge_dims: Merge = field(default=True, init=False)


@final
class FullMatrixAdam(EigenbasisOptimizer):
    """Full-matrix Adam for small problems: every parameter is one vector g with one factor A.

        A ← β2 A + (1−β2) g gᵀ,   w ← w − α ( Q ( Qᵀm̂ ⊘ (√D̂ + ε) ) + λw )

    It refuses parameters with more than `max_dim` elements. With `tau=0, frequency=1,
    correction="optimal"` it is A^{-1/2} m exactly; the defaults approximate it as EShampoo does.
    """

    method, options = methods.FULL_MATRIX_ADAM, FullMatrixAdamOptions

    @takes(FullMatrixAdamOptions)
    def __init__(self, params: ParamsT, options: Options) -> None:
        super().__init__(params, options)


@dataclass(frozen=True, kw_only=True)
class MuonOptions(EShampooOptions):
    """Options with the defaults of `torch.optim.Muon`, without those of bases, D and blocks."""

    weight_decay: float = field(default=0.1, kw_only=False)
    momentum: float = 0.95
    ns_steps: int = 5
    nesterov: bool = True
    tau: Tau = field(default=1.0, init=False)
    frequency: Frequency = field(default=50, init=False)
    novelty: float = field(default=0.1, init=False)
    budget: float | None = field(default=None, init=False)
    sides: Sides = field(default="both", init=False)
    state: Form = field(default="full", init=False)
    moment: Moment = field(default="entry", init=False)
    exponent: float = field(default=0.5, init=False)
    statistics: Statistics = field(default="step", init=False)
    graft: Graft | None = field(default=None, init=False)
    graft_scope: GraftScope = field(default="parameter", init=False)
    rms: float | None = field(default=None, init=False)
    solver: Solver = field(default="eigh", init=False)
    slots: Slots = field(default="rank", init=False)
    refresh_to: float = field(default=0.5, init=False)
    qr_iterations: int = field(default=10, init=False)
    beta3: float | None = field(default=None, init=False)
    correction: Correction = field(default="naive", init=False)
    vectors: Vectors = field(default="adam", init=False)
    max_dim: int = field(default=1024, init=False)
    oversize: Oversize = field(default="split", init=False)
    merge_dims: Merge = field(default=True, init=False)
    stagger: bool = field(default=False, init=False)
    max_failures: int = field(default=3, init=False)
    record: bool = field(default=False, init=False)

    # The AdamW beside Muon does not look ahead.
    adam_looks_ahead: ClassVar[bool] = False


@final
class Muon(EigenbasisOptimizer):
    """Muon with the step size of AdamW (Liu et al., 2025): the polar factor of the momentum.

        W ← W − α ( 0.2 √max(m, n) · polar(M) + λW ),   M ← μM + (1−μ)G

    Newton–Schulz computes the polar factor in the precision of the state, for all layers of one
    shape at a time. This is `torch.optim.Muon` with adjust_lr_fn="match_rms_adamw". The kernel of a
    convolution is joined to its inputs. AdamW trains vectors, and groups with matrices="adam" (use
    `parameter_groups` for embeddings and the head).
    """

    method, options = methods.MUON, MuonOptions

    @takes(MuonOptions)
    def __init__(self, params: ParamsT, options: Options) -> None:
        super().__init__(params, options)


CLASSES = (EShampoo, Shampoo, SOAP, KLShampoo, CASPR, FullMatrixAdam, Muon)
for cls in CLASSES:
    cls.__doc__ = f"{cls.__doc__}\n{described(cls.options)}    "
