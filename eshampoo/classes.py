"""The classes that users see. Each is a row of the table in `methods.py`, with its keywords."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, final

from torch import Tensor
from torch.optim.optimizer import ParamsT

from . import methods
from .math.solvers import Solver
from .optimizer import EigenbasisOptimizer
from .options import (
    RULES,
    Averaged,
    Bases,
    Blocks,
    Frequency,
    Graft,
    Keywords,
    Merge,
    Moments,
    NewtonSchulz,
    Observed,
    Oversize,
    Roots,
    SecondMoment,
    Size,
    Tau,
    Vectors,
    offered,
)
from .validate import SWITCHES, check_switches, misspelt

P = ParamSpec("P")
S = TypeVar("S")  # an optimizer, or its class
R = TypeVar("R")
Plain = Callable[[S, ParamsT, dict[str, Any]], R]
Constructor = Callable[Concatenate[S, P], R]


def takes(keywords: Callable[P, Keywords]) -> Callable[[Plain[S, R]], Constructor[S, P, R]]:
    """Give a constructor the arguments and defaults of a class of keywords."""
    assert isinstance(keywords, type)
    own, parameters = offered(keywords), inspect.signature(keywords).parameters.values()
    by_position = [p.name for p in parameters if p.kind != p.KEYWORD_ONLY]

    def decorate(plain: Plain[S, R]) -> Constructor[S, P, R]:
        name = plain.__qualname__.partition(".")[0]

        @wraps(plain)
        def construct(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
            check_switches(kwargs)
            if len(args) > len(by_position):
                first = ", ".join(by_position)
                raise TypeError(f"{name} takes only {first} by position: name all other keywords")
            for key in kwargs.keys() - own - SWITCHES.keys() - {"params"}:
                hint = misspelt(key, own, RULES) or f"it takes {', '.join(own)}"
                raise TypeError(f"{name} has no keyword {key!r}: {hint}")
            given = {key: value for key, value in kwargs.items() if key not in SWITCHES}
            values = keywords(*args, **given)
            return plain(self, values.params, {name: getattr(values, name) for name in own})

        # `help` prints all keywords once, for the class; here, those with a default of their own.
        this = next(iter(inspect.signature(plain).parameters.values()))
        shown = [p for p in parameters if p.name in (*by_position, *keywords.__annotations__)]
        rest = inspect.Parameter("keywords", inspect.Parameter.VAR_KEYWORD)
        construct.__signature__ = inspect.Signature([this, *shown, rest])  # type: ignore[attr-defined]
        return construct  # type: ignore[return-value]  # callers may pass `self` by name, too

    return decorate


def described(keywords: type[Keywords]) -> str:
    """The documentation of all keywords, group by group, with `params` first."""
    texts = [inspect.cleandoc(group.__doc__ or "") for group in reversed(keywords.__mro__)]
    entries = "\n".join(text.partition("Args:\n")[2] for text in texts if "Args:\n" in text)
    return "    Args:\n" + "\n".join(f"    {line}" for line in entries.splitlines())


@dataclass(frozen=True)
class EShampooKeywords(Moments, SecondMoment, Observed, Averaged, Blocks, Bases, Keywords):
    """The defaults of the groups of keywords are EShampoo's, but for a shorter memory."""

    betas: tuple[float, float] = field(default=(0.9, 0.95), kw_only=False)


@dataclass(frozen=True, kw_only=True)
class PublishedKeywords(EShampooKeywords):
    """The defaults of the paper's Algorithm 2."""

    betas: tuple[float, float] = field(default=(0.9, 0.999), kw_only=False)
    tau: Tau = 0.1
    frequency: Frequency = 50
    budget: float | None = None
    rms: Size = None
    merge_dims: Merge = True


@final
class EShampoo(EigenbasisOptimizer):
    """Eigenvalue-corrected Shampoo (Algorithm 2): Adam in the eigenbasis of Shampoo's factors.

        W ← W − α ( Q_L ( Q_LᵀM̂Q_R ⊘ (√D̂ + ε) ) Q_Rᵀ + λW ),   D ← β3 D + (1−β3) (Q_LᵀGQ_R)^{⊙2}

    Hats mean that an average is corrected for its bias. By default the size of an update says how
    much recent gradients agree (`rms`). `as_published` has the paper's own rules. The first
    arguments are those of `torch.optim.AdamW`. Every keyword is also a param-group key, and the
    optimizer reads it again at every step.
    """

    method, keywords = methods.ESHAMPOO, EShampooKeywords

    @takes(EShampooKeywords)
    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)

    @classmethod
    @takes(PublishedKeywords)
    def as_published(cls, params: ParamsT, defaults: dict[str, Any]) -> "EShampoo":
        """Algorithm 2 as printed: F = 50, τ = 0.1, merged dimensions, and no rule of ours.

        Until step F it is AdamW. All keywords of the class can be passed.
        """
        return cls(params, **defaults)


@dataclass(frozen=True, kw_only=True)
class ShampooKeywords(Roots, Moments, Observed, Blocks, Bases, Keywords):
    """The defaults of the winner of AlgoPerf."""

    tau: Tau = 0.0
    frequency: Frequency = 100
    budget: float | None = None
    graft: Graft | None = "adam"
    rms: Size = None


@final
class Shampoo(EigenbasisOptimizer):
    """Shampoo; by default the AlgoPerf winner, with stale inverse roots and Adam's step size.

        U = L^{-1/4} M R^{-1/4},   W ← W − α ( U ‖U_graft‖_F / ‖U‖_F + λW )   (Eq. grafting)

    A block of order k has k factors, each raised to −1/(2k). The optimizer caches the inverse
    roots, so a step costs two thirds of EShampoo's matrix products.
    """

    method, keywords = methods.SHAMPOO, ShampooKeywords

    @takes(ShampooKeywords)
    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)


@dataclass(frozen=True, kw_only=True)
class CASPRKeywords(Observed, Blocks, Bases, Keywords):
    """The defaults of Shampoo without a graft."""

    tau: Tau = 0.0
    frequency: Frequency = 100
    budget: float | None = None
    rms: Size = None


@final
class CASPR(EigenbasisOptimizer):
    """CASPR averages the two sides of a matrix; Shampoo multiplies them.

        U = (L^{-1/2} M + 2 L^{-1/4} M R^{-1/4} + M R^{-1/2}) / 4
          = Q_L ( ((λ_L^{-1/4} + λ_R^{-1/4})/2)² ⊙ (Q_LᵀMQ_R) ) Q_Rᵀ

    The eigenvalues are those of the current step. For order k, the scale is
    (Σ_i λ_i^{-1/(2k)} / k)^k.
    """

    method, keywords = methods.CASPR, CASPRKeywords

    @takes(CASPRKeywords)
    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)


@dataclass(frozen=True, kw_only=True)
class SOAPKeywords(Moments, SecondMoment, Averaged, Blocks, Bases, Keywords):
    """The defaults of SOAP's authors.

    There is no `statistics`: SOAP's first gradient only builds the basis, and the basis changes
    after the update. Neither rule has a meaning for observations.
    """

    lr: float | Tensor = field(default=3e-3, kw_only=False)
    betas: tuple[float, float] = field(default=(0.95, 0.95), kw_only=False)
    tau: Tau = 0.0
    frequency: Frequency = 10
    budget: float | None = None
    rms: Size = None
    solver: Solver = "power"
    max_dim: int = 10000
    oversize: Oversize = "identity"


@final
class SOAP(EigenbasisOptimizer):
    """SOAP, as its authors' code behaves: one power step every F steps, after the update.

        V = qr(Λ̂ P),  Q ← QV,  D permuted by P, which sorts diag Λ̂ in descending order

    The first gradient only builds the basis. ε is added to the uncorrected √D, and weights decay
    last. The defaults are those of its authors. One rule is ours: a side has no basis if its factor
    would have at least 8 times the entries of its block.
    """

    method, keywords = methods.SOAP, SOAPKeywords

    @takes(SOAPKeywords)
    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)


@dataclass(frozen=True, kw_only=True)
class KLShampooKeywords(Observed, Blocks, Bases, Keywords):
    """No second moment D, which KL-Shampoo does not keep."""

    tau: Tau = 0.0
    frequency: Frequency = 10
    budget: float | None = None
    rms: Size = None


@final
class KLShampoo(EigenbasisOptimizer):
    """KL-Shampoo: its factors whiten each other, and it averages eigenvalues at every step.

        L ← β2 L + (1−β2)/n · G R⁻¹ Gᵀ,   R ← β2 R + (1−β2)/m · Gᵀ L⁻¹ G
        U = Q_L λ_L^{-1/2} ( Q_LᵀMQ_R ) λ_R^{-1/2} Q_Rᵀ

    It adds 0.01 times their mean to all eigenvalues λ, also in R⁻¹ and L⁻¹, and starts with
    L = R = √(E G²)·I at the first gradient. It needs no grafting, and no second moment of the
    parameter's size.
    """

    method, keywords = methods.KL_SHAMPOO, KLShampooKeywords

    @takes(KLShampooKeywords)
    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)


@dataclass(frozen=True, kw_only=True)
class FullMatrixAdamKeywords(SecondMoment, Observed, Bases, Keywords):
    """Nothing that merges or splits: each parameter is one vector."""

    vectors: Vectors = "full"


@final
class FullMatrixAdam(EigenbasisOptimizer):
    """Full-matrix Adam for small problems: every parameter is one vector g with one factor A.

        A ← β2 A + (1−β2) g gᵀ,   w ← w − α ( Q ( Qᵀm̂ ⊘ (√D̂ + ε) ) + λw )

    It refuses parameters with more than `max_dim` elements. With `tau=0, frequency=1,
    correction="optimal"` it is A^{-1/2} m exactly; the defaults approximate it as EShampoo does.
    """

    method, keywords = methods.FULL_MATRIX_ADAM, FullMatrixAdamKeywords

    @takes(FullMatrixAdamKeywords)
    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)


@dataclass(frozen=True, kw_only=True)
class MuonKeywords(NewtonSchulz, Keywords):
    """The defaults of `torch.optim.Muon`; nothing about bases and blocks."""

    weight_decay: float = field(default=0.1, kw_only=False)
    nesterov: bool = True


@final
class Muon(EigenbasisOptimizer):
    """Muon with the step size of AdamW (Liu et al., 2025): the polar factor of the momentum.

        W ← W − α ( 0.2 √max(m, n) · polar(M) + λW ),   M ← μM + (1−μ)G

    Newton–Schulz computes the polar factor in the precision of the state, for all layers of one
    shape at a time. This is `torch.optim.Muon` with adjust_lr_fn="match_rms_adamw". The kernel of a
    convolution is joined to its inputs. AdamW trains vectors, and groups with matrices="adam" (use
    `parameter_groups` for embeddings and the head).
    """

    method, keywords = methods.MUON, MuonKeywords

    @takes(MuonKeywords)
    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)


CLASSES = (EShampoo, Shampoo, SOAP, KLShampoo, CASPR, FullMatrixAdam, Muon)
for optimizer_class in CLASSES:
    keywords_class: type[Keywords] = optimizer_class.keywords
    optimizer_class.__signature__ = inspect.signature(keywords_class)  # type: ignore[union-attr]
    optimizer_class.__doc__ = f"{optimizer_class.__doc__}\n{described(keywords_class)}\n    "
