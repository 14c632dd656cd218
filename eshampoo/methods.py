"""The methods of the paper as rows of a table.

Each method is the same line (Lemma 1):

    U = Q_L ( D^{-p} ⊙ (Q_Lᵀ M Q_R) ) Q_Rᵀ

They differ only in how they keep the bases Q, how they compute the scale D, and in p. A cell is
plain data or one small function, so a new method is a new row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from .options import Options
from .sides import Modes, every_side, no_side, one_matrix, one_side
from .step import phases
from .step.phases import Divide, Statistic


@dataclass(frozen=True)
class Method:
    """One row of the table below."""

    name: str
    # Which dimensions of a parameter have a basis.
    sides: Callable[[Sequence[int], Options], Modes] = every_side
    # What a factor averages.
    statistic: Statistic = phases.gram
    # Whether D is an average of its own, and not made of the factors.
    averages: bool = True
    # How the scale divides the momentum: D^{-p} ⊙ M̃.
    divide_: Divide = phases.eigenvalue_corrected_
    # p, if it is not the option's; Shampoo divides it among the k factors of a block.
    exponent: float | None = None
    # Whether momentum and factors are stored already rotated, or as they are, with cached roots.
    rotated: bool = True
    # t before the first gradient; with −1, that gradient only builds the basis.
    start: int = 0
    # Whether a basis changes before or after the update of the same step.
    refreshes: Literal["before", "after"] = "before"
    # Whether ε is added to √(D/(1−β3^t)) or to √D.
    epsilon: Literal["corrected", "uncorrected"] = "corrected"
    # Whether the weights decay with the update, W − α(U + λW), or after it, (1 − αλ)(W − αU).
    decay: Literal["with", "after"] = "with"

    def without_basis(self) -> "Method":
        """The row for parameters without a basis: Adam."""
        return replace(
            self,
            sides=no_side,
            statistic=phases.gram,
            averages=True,
            divide_=phases.adam_,
            exponent=0.5,
            rotated=True,
        )


ESHAMPOO = Method("EShampoo")
FULL_MATRIX_ADAM = Method("FullMatrixAdam", sides=one_side)
SHAMPOO = Method("Shampoo", averages=False, divide_=phases.momentum_, rotated=False)
CASPR = Method("CASPR", averages=False, divide_=phases.by_sum_of_sides_)
KL_SHAMPOO = Method(
    "KLShampoo", statistic=phases.whitened_gram, averages=False, divide_=phases.by_eigenvalues_
)
MUON = Method("Muon", sides=one_matrix, averages=False, divide_=phases.polar_)
SOAP = Method("SOAP", start=-1, refreshes="after", epsilon="uncorrected", decay="after")
