"""The user's classes: each is a row of the table in `methods.py` and the keywords that it takes."""

import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, final

from torch.optim.optimizer import ParamsT

from . import methods
from .engine import EigenbasisOptimizer
from .options import (
    EShampooOptions,
    FullMatrixAdamOptions,
    KLShampooOptions,
    Options,
    ShampooOptions,
    SOAPOptions,
    misspelt,
    offered,
)

P = ParamSpec("P")


def takes(options: Callable[P, Options]) -> Callable[Concatenate[Any, ParamsT, P], None]:
    """A constructor with the keywords and defaults of a class of options."""
    assert isinstance(options, type)
    own = offered(options)

    def construct(
        self: EigenbasisOptimizer, params: ParamsT, *args: P.args, **kwargs: P.kwargs
    ) -> None:
        for key in kwargs.keys() - own:
            hint = misspelt(options, key) or f"it takes {', '.join(own)}"
            raise TypeError(f"{type(self).__name__} has no keyword {key!r}: {hint}")
        EigenbasisOptimizer.__init__(self, params, options(*args, **kwargs))

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    first = [inspect.Parameter("self", kind), inspect.Parameter("params", kind, annotation=ParamsT)]
    keywords = inspect.signature(options)
    signature = keywords.replace(parameters=[*first, *keywords.parameters.values()])
    construct.__signature__ = signature  # type: ignore[attr-defined]
    construct.__name__ = construct.__qualname__ = "__init__"
    return construct  # type: ignore[return-value]  # `params` may be given by name, too


@final
class EShampoo(EigenbasisOptimizer):
    """Eigenvalue-corrected Shampoo (Algorithm 2): Adam in the eigenbasis of Shampoo's factors.

        W ← W − α ( Q_L ( Q_LᵀM̃Q_R ⊘ (√D̃ + ε) ) Q_Rᵀ + λW ),   D ← β3 D + (1−β3) (Q_LᵀGQ_R)^{⊙2}

    Until the first basis, at step F, it is AdamW. The first arguments are those of
    `torch.optim.AdamW`. Every keyword is also a param-group key and is read anew at every step.
    """

    method, options = methods.ESHAMPOO, EShampooOptions
    __init__ = takes(EShampooOptions)


@final
class Shampoo(EigenbasisOptimizer):
    """Shampoo, as it won AlgoPerf by default: stale inverse roots and the step size of Adam.

        U = L^{-1/4} M R^{-1/4},   W ← W − α ( U ‖U_graft‖_F / ‖U‖_F + λW )   (Eq. grafting)

    L^{-1/(2k)} per factor for blocks of order k. The inverse roots are cached, so that a step costs
    two thirds of EShampoo's matrix products.
    """

    method, options = methods.SHAMPOO, ShampooOptions
    __init__ = takes(ShampooOptions)


@final
class SOAP(EigenbasisOptimizer):
    """SOAP, as its authors' code behaves: one power step every F steps, after the update.

        V = qr(Λ̂ P),  Q ← QV,  D permuted by P, which sorts diag Λ̂ in descending order

    The first gradient only builds the basis. ε is added to the uncorrected √D and weight decay is
    applied last. The defaults are those of its authors.
    """

    method, options = methods.SOAP, SOAPOptions
    __init__ = takes(SOAPOptions)


@final
class KLShampoo(EigenbasisOptimizer):
    """KL-Shampoo: factors that whiten each other, with eigenvalues averaged at every step.

        L ← β2 L + (1−β2)/n · G R⁻¹ Gᵀ,   R ← β2 R + (1−β2)/m · Gᵀ L⁻¹ G
        U = Q_L λ_L^{-1/2} ( Q_LᵀMQ_R ) λ_R^{-1/2} Q_Rᵀ

    with 0.01 of their mean added to all λ, also in R⁻¹ and L⁻¹, and L = R = √(E G²)·I at the first
    gradient. No grafting and no second moment of the parameter's size.
    """

    method, options = methods.KL_SHAMPOO, KLShampooOptions
    __init__ = takes(KLShampooOptions)


@final
class FullMatrixAdam(EigenbasisOptimizer):
    """Full-matrix Adam for small problems: every parameter is one vector g with one factor A.

        A ← β2 A + (1−β2) g gᵀ,   w ← w − α ( Q ( QᵀM̃ ⊘ (√D̃ + ε) ) + λw )

    It refuses parameters with more than `max_dim` elements. With `tau=0, frequency=1,
    correction="optimal"` it is A^{-1/2} m exactly; the defaults approximate it as EShampoo does.
    """

    method, options = methods.FULL_MATRIX_ADAM, FullMatrixAdamOptions
    __init__ = takes(FullMatrixAdamOptions)


CLASSES = (EShampoo, Shampoo, SOAP, KLShampoo, FullMatrixAdam)
