"""The user's classes: each is a row of the table in `methods.py` and the keywords that it takes."""

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
            if kwargs.get("graft") is not None:  # a graft sets the size of updates, in place of
                kwargs.setdefault("rms", None)  # the default of rms
            plain(self, params, options(*args, **kwargs))

        first = list(inspect.signature(plain).parameters.values())[:2]  # self and params
        keywords = inspect.signature(options)
        signature = keywords.replace(parameters=[*first, *keywords.parameters.values()])
        construct.__signature__ = signature  # type: ignore[attr-defined]
        return construct  # type: ignore[return-value]  # `params` may be given by name, too

    return decorate


@dataclass(frozen=True, kw_only=True)
class EShampooOptions(Options):
    """All but the keywords of Shampoo and Muon."""

    momentum: float = field(default=0.95, init=False)
    ns_steps: int = field(default=5, init=False)
    variant: Variant = field(default="shampoo", init=False)
    trace_scaling: bool = field(default=False, init=False)
    eigenvalues: Eigenvalues = field(default="stale", init=False)


@final
class EShampoo(EigenbasisOptimizer):
    """Eigenvalue-corrected Shampoo (Algorithm 2): Adam in the eigenbasis of Shampoo's factors.

        W ← W − α ( Q_L ( Q_LᵀM̃Q_R ⊘ (√D̃ + ε) ) Q_Rᵀ + λW ),   D ← β3 D + (1−β3) (Q_LᵀGQ_R)^{⊙2}

    Each update has a fixed root mean square (`rms`). The paper's own rule is rms=None, budget=None,
    frequency=F; until step F it is AdamW. The first arguments are those of `torch.optim.AdamW`.
    Every keyword is also a param-group key and is read anew at every step.
    """

    method, options = methods.ESHAMPOO, EShampooOptions

    @takes(EShampooOptions)
    def __init__(self, params: ParamsT, options: Options) -> None:
        super().__init__(params, options)


@dataclass(frozen=True, kw_only=True)
class ShampooOptions(Options):
    """As the winner of AlgoPerf; no keyword that speaks of the second moment D."""

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
    """Shampoo, as it won AlgoPerf by default: stale inverse roots and the step size of Adam.

        U = L^{-1/4} M R^{-1/4},   W ← W − α ( U ‖U_graft‖_F / ‖U‖_F + λW )   (Eq. grafting)

    L^{-1/(2k)} per factor for blocks of order k. The inverse roots are cached, so that a step costs
    two thirds of EShampoo's matrix products.
    """

    method, options = methods.SHAMPOO, ShampooOptions

    @takes(ShampooOptions)
    def __init__(self, params: ParamsT, options: Options) -> None:
        super().__init__(params, options)


@dataclass(frozen=True, kw_only=True)
class CASPROptions(ShampooOptions):
    """Those of Shampoo without a graft; its roots are not cached."""

    graft: Graft | None = None
    variant: Variant = field(default="shampoo", init=False)
    trace_scaling: bool = field(default=False, init=False)
    eigenvalues: Eigenvalues = field(default="stale", init=False)


@final
class CASPR(EigenbasisOptimizer):
    """CASPR: the two sides of a matrix are averaged instead of multiplied.

        U = (L^{-1/2} M + 2 L^{-1/4} M R^{-1/4} + M R^{-1/2}) / 4
          = Q_L ( ((λ_L^{-1/4} + λ_R^{-1/4})/2)² ⊙ (Q_LᵀMQ_R) ) Q_Rᵀ

    with the eigenvalues of every step. For order k it is (Σ_i λ_i^{-1/(2k)} / k)^k.
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
    # A first gradient that only builds the basis, and a basis that waits for updates, are of steps.
    statistics: Statistics = field(default="step", init=False)
    max_dim: int = 10000
    oversize: Oversize = "identity"
    merge_dims: Merge = False


@final
class SOAP(EigenbasisOptimizer):
    """SOAP, as its authors' code behaves: one power step every F steps, after the update.

        V = qr(Λ̂ P),  Q ← QV,  D permuted by P, which sorts diag Λ̂ in descending order

    The first gradient only builds the basis. ε is added to the uncorrected √D and weight decay is
    applied last. The defaults are those of its authors, but a side whose factor would have 8 times
    the entries of its block or more has no basis.
    """

    method, options = methods.SOAP, SOAPOptions

    @takes(SOAPOptions)
    def __init__(self, params: ParamsT, options: Options) -> None:
        super().__init__(params, options)


@dataclass(frozen=True, kw_only=True)
class KLShampooOptions(EShampooOptions):
    """No keyword that speaks of the second moment D, which KL-Shampoo does not keep."""

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
    """KL-Shampoo: factors that whiten each other, with eigenvalues averaged at every step.

        L ← β2 L + (1−β2)/n · G R⁻¹ Gᵀ,   R ← β2 R + (1−β2)/m · Gᵀ L⁻¹ G
        U = Q_L λ_L^{-1/2} ( Q_LᵀMQ_R ) λ_R^{-1/2} Q_Rᵀ

    with 0.01 of their mean added to all λ, also in R⁻¹ and L⁻¹, and L = R = √(E G²)·I at the first
    gradient. No grafting and no second moment of the parameter's size.
    """

    method, options = methods.KL_SHAMPOO, KLShampooOptions

    @takes(KLShampooOptions)
    def __init__(self, params: ParamsT, options: Options) -> None:
        super().__init__(params, options)


@dataclass(frozen=True, kw_only=True)
class FullMatrixAdamOptions(EShampooOptions):
    """Every parameter is one vector: there is nothing to merge or to split."""

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

        A ← β2 A + (1−β2) g gᵀ,   w ← w − α ( Q ( QᵀM̃ ⊘ (√D̃ + ε) ) + λw )

    It refuses parameters with more than `max_dim` elements. With `tau=0, frequency=1,
    correction="optimal"` it is A^{-1/2} m exactly; the defaults approximate it as EShampoo does.
    """

    method, options = methods.FULL_MATRIX_ADAM, FullMatrixAdamOptions

    @takes(FullMatrixAdamOptions)
    def __init__(self, params: ParamsT, options: Options) -> None:
        super().__init__(params, options)


@dataclass(frozen=True, kw_only=True)
class MuonOptions(EShampooOptions):
    """As `torch.optim.Muon`; nothing that speaks of a basis, of D or of blocks."""

    weight_decay: float = field(default=0.1, kw_only=False)
    momentum: float = 0.95
    ns_steps: int = 5
    nesterov: bool = True
    tau: Tau = field(default=1.0, init=False)
    frequency: Frequency = field(default=50, init=False)
    novelty: float = field(default=0.1, init=False)
    budget: float | None = field(default=None, init=False)
    sides: Sides = field(default="both", init=False)
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
    max_failures: int = field(default=3, init=False)
    record: bool = field(default=False, init=False)

    # The AdamW beside Muon does not look ahead.
    adam_looks_ahead: ClassVar[bool] = False


@final
class Muon(EigenbasisOptimizer):
    """Muon with the step size of AdamW (Liu et al., 2025): the polar factor of the momentum.

        W ← W − α ( 0.2 √max(m, n) · polar(M) + λW ),   M ← μM + (1−μ)G

    by Newton–Schulz in the precision of the state, all layers of one shape at a time. It is
    `torch.optim.Muon` with adjust_lr_fn="match_rms_adamw". Kernels of convolutions are joined to
    their inputs. Vectors, and groups with matrices="adam" (embeddings and the head: see
    `parameter_groups`), are under AdamW.
    """

    method, options = methods.MUON, MuonOptions

    @takes(MuonOptions)
    def __init__(self, params: ParamsT, options: Options) -> None:
        super().__init__(params, options)


CLASSES = (EShampoo, Shampoo, SOAP, KLShampoo, CASPR, FullMatrixAdam, Muon)
for cls in CLASSES:
    cls.__doc__ = f"{cls.__doc__}\n{described(cls.options)}    "
