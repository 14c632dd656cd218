"""The methods of the paper as rows of a table.

Each method is the same line (Lemma 1):

    U = Q_L ( D^{-p} ⊙ (Q_Lᵀ M Q_R) ) Q_Rᵀ

They differ only in how they keep the bases Q, how they compute the scale D, and in p. A cell is
plain data or one small function, so a new method is a new row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from .options import Options
from .state import cutting
from .state.state import Home
from .step import eigenvalues, phases, polar
from .step.phases import Divide, Statistic


@dataclass(frozen=True)
class Method:
    """One row of the table below."""

    name: str
    # Which dimensions of a parameter have a basis.
    sides: Callable[[Sequence[int], Options], cutting.Sides] = cutting.every_side
    # What a factor averages.
    statistic: Statistic = phases.gram
    # What the scale D keeps besides the factors.
    keeps: Callable[[Options], tuple[str, ...]] = phases.second_moment
    # How the scale divides the momentum: D^{-p} ⊙ M̃.
    divide_: Divide = phases.eigenvalue_corrected_
    # p; Shampoo divides it among the k factors of a block.
    exponent: Callable[[Options], float] = phases.as_asked
    # Where momentum and factors live.
    home: Home = "eigenbasis"
    # t before the first gradient; with -1 the first gradient does not count.
    start: int = 0
    # Which gradients move their block: all of them, or all except the first.
    moves: Callable[[Tensor, Tensor], Tensor] = phases.always
    # Whether a basis changes before or after the update of the same step.
    refreshes: Literal["before", "after"] = "before"
    # Where ε stands.
    epsilon: Callable[[Tensor, Tensor], Tensor] = phases.beside_corrected
    # Whether the weights decay with the update, W − α(U + λW), or after it, (1 − αλ)(W − αU).
    decay: Literal["with", "after"] = "with"

    def without_basis(self) -> "Method":
        """The row for parameters without a basis: Adam."""
        return replace(
            self,
            sides=cutting.no_side,
            statistic=phases.gram,
            keeps=phases.one_moment,
            divide_=phases.adam_,
            exponent=phases.one_half,
            home="eigenbasis",
        )


ESHAMPOO = Method("EShampoo")
FULL_MATRIX_ADAM = Method("FullMatrixAdam", sides=cutting.one_side)
SHAMPOO = Method(
    "Shampoo", keeps=eigenvalues.moment_of_graft, divide_=eigenvalues.momentum_, home="parameters"
)
CASPR = Method(
    "CASPR", keeps=eigenvalues.moment_of_graft_beside, divide_=eigenvalues.by_sum_of_sides_
)
KL_SHAMPOO = Method(
    "KLShampoo",
    statistic=eigenvalues.whitened_gram,
    keeps=eigenvalues.nothing,
    divide_=eigenvalues.by_eigenvalues_,
)
MUON = Method("Muon", sides=cutting.whole, keeps=eigenvalues.nothing, divide_=polar.polar_)
SOAP = Method(
    "SOAP",
    start=-1,
    moves=phases.after_the_first,
    refreshes="after",
    epsilon=phases.beside_uncorrected,
    decay="after",
)
