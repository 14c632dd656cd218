"""The methods of the paper as rows of data.

Every one of them is the same line (Lemma 1),

    U = Q_L ( D^{-p} ⊙ (Q_Lᵀ M Q_R) ) Q_Rᵀ ,

and they differ only in how the bases Q are kept, how the scale D is computed, and in p.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Method:
    """One row of the table below."""

    name: str
    second_moment: bool = True
    """D is an average of (Q_LᵀGQ_R)^{⊙2}; otherwise D = λ_L ⊗ λ_R, from the factors."""
    rotated: bool = True
    """State lives in the eigenbasis; otherwise in parameter space, with cached inverse roots."""
    whitened: bool = False
    """Factors average G R⁻¹ Gᵀ/n instead of GGᵀ."""
    one_mode: bool = False
    """A parameter is one flat vector g, and its only factor averages g gᵀ."""
    delayed: bool = False
    """The first gradient only builds the basis; later the basis changes after the update."""
    bias_in_step: bool = False
    """ε joins the uncorrected √D and the bias corrections scale the step, decay comes last."""

    def without_basis(self) -> "Method":
        """The same row for parameters with Q = I: Adam."""
        return replace(self, second_moment=True, rotated=True, whitened=False)


# p is 1/2 throughout, except in Shampoo: 1/(2k) per factor of an order-k block (`phases.roots`).
ESHAMPOO = Method("EShampoo")
SHAMPOO = Method("Shampoo", second_moment=False, rotated=False)
KL_SHAMPOO = Method("KLShampoo", second_moment=False, whitened=True)
SOAP = Method("SOAP", delayed=True, bias_in_step=True)
FULL_MATRIX_ADAM = Method("FullMatrixAdam", one_mode=True)
