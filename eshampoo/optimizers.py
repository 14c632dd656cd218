"""The user's classes: signatures and what they mean; everything else is in `engine.py`."""

from typing import TYPE_CHECKING, final

from torch import Tensor
from torch.optim.optimizer import ParamsT

from . import methods
from .engine import EigenbasisOptimizer
from .options import (
    Correction,
    Eigenvalues,
    Graft,
    GraftScope,
    Matrices,
    NonFinite,
    Oversize,
    Slots,
    Solver,
    Tau,
    Variant,
    Vectors,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@final
class EShampoo(EigenbasisOptimizer):
    """Eigenvalue-corrected Shampoo (Algorithm 2): Adam in the eigenbasis of Shampoo's factors.

        W ← W − α ( Q_L ( Q_LᵀM̃Q_R ⊘ (√D̃ + ε) ) Q_Rᵀ + λW ),   D ← β3 D + (1−β3) (Q_LᵀGQ_R)^{⊙2}

    Until the first basis, at step F, it is AdamW. The first arguments are those of
    `torch.optim.AdamW`. Every keyword is also a param-group key and is read anew at every step.

    Args:
        params: parameters, `model.named_parameters()` (names then appear in reports), or groups.
        lr: α; a number or a tensor with one element.
        betas: β1 of the momentum and β2 of the factors; β2 = 1 sums instead of averaging (AdaGrad).
        eps: ε, added to √D̃ as in AdamW.
        weight_decay: λ, decoupled.
        tau: τ; a basis is kept while its relative error is at most τ. A number or a callable
            step → number (`eshampoo.schedules`). 0 recomputes at every check, 1 never.
        frequency: F; the criterion is evaluated every F steps.
        solver: "eigh"; "qr", Algorithm 4; "power", SOAP's single step; "partial", which
            diagonalises only the coordinates that carry the excess error.
        slots: which new column inherits which entry of D: "rank", as the solver orders them, or
            "match", by largest overlap with the old columns.
        refresh_to: "partial" brings the criterion down to refresh_to · τ.
        qr_iterations: I, the most iterations of "qr".
        beta3: β3, the averaging constant of D; None means β2.
        correction: D on a change of basis: "naive" keeps it (Algorithm 2); "bounded" keeps it and
            cuts off what Adam could not reach in a basis that stands still; "basis_aware" maps it
            by V^{⊙2} (appendix); "optimal" takes diag(QᵀAQ) from the full matrix A (Algorithm 1;
            blocks of at most 4096 elements).
        vectors: 1-D parameters: "adam", or "full" for full-matrix Adam.
        matrices: parameters of two and more dimensions: "kronecker", or "adam".
        max_dim: larger dimensions are split into blocks.
        oversize: dimensions above max_dim: "split", or "identity" for no basis on that side.
        merge_dims: merge neighbouring dimensions, from the last, while their product ≤ max_dim; a
            parameter that merges into one mode gets full-matrix Adam.
        nesterov: look one step ahead in the momentum, as in NAdam.
        maximize: ascend.
        process_group: share work and state over this group of `torch.distributed`.
        nonfinite: a gradient with NaN or Inf: "skip" leaves its block out of the step, "raise"
            raises before anything has changed, "propagate" takes it as it is.
        max_failures: after so many failed decompositions of one factor in a row, an error.
        record: keep the history of the criterion for `basis_report()`.
    """

    method = methods.ESHAMPOO

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        tau: Tau = 0.1,
        frequency: int = 50,
        solver: Solver = "eigh",
        slots: Slots = "rank",
        refresh_to: float = 0.5,
        qr_iterations: int = 10,
        beta3: float | None = None,
        correction: Correction = "naive",
        vectors: Vectors = "adam",
        matrices: Matrices = "kronecker",
        max_dim: int = 1024,
        oversize: Oversize = "split",
        merge_dims: bool = True,
        nesterov: bool = False,
        maximize: bool = False,
        process_group: "ProcessGroup | None" = None,
        nonfinite: NonFinite = "skip",
        max_failures: int = 3,
        record: bool = False,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "tau": tau,
                "frequency": frequency,
                "solver": solver,
                "slots": slots,
                "refresh_to": refresh_to,
                "qr_iterations": qr_iterations,
                "beta3": beta3,
                "correction": correction,
                "vectors": vectors,
                "matrices": matrices,
                "max_dim": max_dim,
                "oversize": oversize,
                "merge_dims": merge_dims,
                "nesterov": nesterov,
                "maximize": maximize,
                "process_group": process_group,
                "nonfinite": nonfinite,
                "max_failures": max_failures,
                "record": record,
            },
        )


@final
class Shampoo(EigenbasisOptimizer):
    """Shampoo, as it won AlgoPerf by default: stale inverse roots and the step size of Adam.

        U = L^{-1/4} M R^{-1/4},   W ← W − α ( U ‖U_graft‖_F / ‖U‖_F + λW )   (Eq. grafting)

    L^{-1/(2k)} per factor for blocks of order k. The inverse roots are cached, so that a step costs
    two thirds of EShampoo's matrix products. Other arguments as in `EShampoo`.

    Args:
        variant: "shampoo", or "shampoo2" with L^{-1/2} per factor.
        trace_scaling: divide by S = Tr L = Tr R, shared out as Tr^{-(k-1)/k} per factor.
        graft: the method whose norm the update takes: "adam", "rmsprop", "adagrad", "sgd" or None.
            Before the first basis it takes the step alone.
        graft_scope: norms of the whole "parameter" or of each "block".
        eigenvalues: "stale", frozen with the basis, or "fresh", diag Λ̂ at every check.
    """

    method = methods.SHAMPOO

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        variant: Variant = "shampoo",
        trace_scaling: bool = False,
        graft: Graft | None = "adam",
        graft_scope: GraftScope = "parameter",
        eigenvalues: Eigenvalues = "stale",
        tau: Tau = 0.0,
        frequency: int = 100,
        solver: Solver = "eigh",
        slots: Slots = "rank",
        refresh_to: float = 0.5,
        qr_iterations: int = 10,
        beta3: float | None = None,
        correction: Correction = "naive",
        vectors: Vectors = "adam",
        matrices: Matrices = "kronecker",
        max_dim: int = 1024,
        oversize: Oversize = "split",
        merge_dims: bool = True,
        nesterov: bool = False,
        maximize: bool = False,
        process_group: "ProcessGroup | None" = None,
        nonfinite: NonFinite = "skip",
        max_failures: int = 3,
        record: bool = False,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "variant": variant,
                "trace_scaling": trace_scaling,
                "graft": graft,
                "graft_scope": graft_scope,
                "eigenvalues": eigenvalues,
                "tau": tau,
                "frequency": frequency,
                "solver": solver,
                "slots": slots,
                "refresh_to": refresh_to,
                "qr_iterations": qr_iterations,
                "beta3": beta3,
                "correction": correction,
                "vectors": vectors,
                "matrices": matrices,
                "max_dim": max_dim,
                "oversize": oversize,
                "merge_dims": merge_dims,
                "nesterov": nesterov,
                "maximize": maximize,
                "process_group": process_group,
                "nonfinite": nonfinite,
                "max_failures": max_failures,
                "record": record,
            },
        )


@final
class SOAP(EigenbasisOptimizer):
    """SOAP, as its authors' code behaves: one power step every F steps, after the update.

        V = qr(Λ̂ P),  Q ← QV,  D permuted by P, which sorts diag Λ̂ in descending order

    The first gradient only builds the basis. ε is added to the uncorrected √D and weight decay is
    applied last. Arguments as in `EShampoo`, with the authors' defaults.
    """

    method = methods.SOAP

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        tau: Tau = 0.0,
        frequency: int = 10,
        solver: Solver = "power",
        slots: Slots = "rank",
        refresh_to: float = 0.5,
        qr_iterations: int = 10,
        beta3: float | None = None,
        correction: Correction = "naive",
        vectors: Vectors = "adam",
        matrices: Matrices = "kronecker",
        max_dim: int = 10000,
        oversize: Oversize = "identity",
        merge_dims: bool = False,
        nesterov: bool = False,
        maximize: bool = False,
        process_group: "ProcessGroup | None" = None,
        nonfinite: NonFinite = "skip",
        max_failures: int = 3,
        record: bool = False,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "tau": tau,
                "frequency": frequency,
                "solver": solver,
                "slots": slots,
                "refresh_to": refresh_to,
                "qr_iterations": qr_iterations,
                "beta3": beta3,
                "correction": correction,
                "vectors": vectors,
                "matrices": matrices,
                "max_dim": max_dim,
                "oversize": oversize,
                "merge_dims": merge_dims,
                "nesterov": nesterov,
                "maximize": maximize,
                "process_group": process_group,
                "nonfinite": nonfinite,
                "max_failures": max_failures,
                "record": record,
            },
        )


@final
class KLShampoo(EigenbasisOptimizer):
    """KL-Shampoo: factors that whiten each other, with eigenvalues averaged at every step.

        L ← β2 L + (1−β2)/n · G R⁻¹ Gᵀ,   R ← β2 R + (1−β2)/m · Gᵀ L⁻¹ G
        U = Q_L λ_L^{-1/2} ( Q_LᵀMQ_R ) λ_R^{-1/2} Q_Rᵀ

    No grafting and no second moment of the parameter's size. Arguments as in `EShampoo`.
    """

    method = methods.KL_SHAMPOO

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        tau: Tau = 0.0,
        frequency: int = 10,
        solver: Solver = "eigh",
        slots: Slots = "rank",
        refresh_to: float = 0.5,
        qr_iterations: int = 10,
        beta3: float | None = None,
        correction: Correction = "naive",
        vectors: Vectors = "adam",
        matrices: Matrices = "kronecker",
        max_dim: int = 1024,
        oversize: Oversize = "split",
        merge_dims: bool = True,
        nesterov: bool = False,
        maximize: bool = False,
        process_group: "ProcessGroup | None" = None,
        nonfinite: NonFinite = "skip",
        max_failures: int = 3,
        record: bool = False,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "tau": tau,
                "frequency": frequency,
                "solver": solver,
                "slots": slots,
                "refresh_to": refresh_to,
                "qr_iterations": qr_iterations,
                "beta3": beta3,
                "correction": correction,
                "vectors": vectors,
                "matrices": matrices,
                "max_dim": max_dim,
                "oversize": oversize,
                "merge_dims": merge_dims,
                "nesterov": nesterov,
                "maximize": maximize,
                "process_group": process_group,
                "nonfinite": nonfinite,
                "max_failures": max_failures,
                "record": record,
            },
        )


@final
class FullMatrixAdam(EigenbasisOptimizer):
    """Full-matrix Adam for small problems: every parameter is one vector g with one factor A.

        A ← β2 A + (1−β2) g gᵀ,   w ← w − α ( Q ( QᵀM̃ ⊘ (√D̃ + ε) ) + λw )

    It refuses parameters with more than `max_dim` elements. With `tau=0, frequency=1,
    correction="optimal"` it is A^{-1/2} m exactly; the defaults approximate it as EShampoo does.
    Arguments as in `EShampoo`.
    """

    method = methods.FULL_MATRIX_ADAM

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        tau: Tau = 0.1,
        frequency: int = 50,
        solver: Solver = "eigh",
        slots: Slots = "rank",
        refresh_to: float = 0.5,
        qr_iterations: int = 10,
        beta3: float | None = None,
        correction: Correction = "naive",
        vectors: Vectors = "full",
        matrices: Matrices = "kronecker",
        max_dim: int = 1024,
        nesterov: bool = False,
        maximize: bool = False,
        process_group: "ProcessGroup | None" = None,
        nonfinite: NonFinite = "skip",
        max_failures: int = 3,
        record: bool = False,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "tau": tau,
                "frequency": frequency,
                "solver": solver,
                "slots": slots,
                "refresh_to": refresh_to,
                "qr_iterations": qr_iterations,
                "beta3": beta3,
                "correction": correction,
                "vectors": vectors,
                "matrices": matrices,
                "max_dim": max_dim,
                "nesterov": nesterov,
                "maximize": maximize,
                "process_group": process_group,
                "nonfinite": nonfinite,
                "max_failures": max_failures,
                "record": record,
                "oversize": "split",
                "merge_dims": True,
            },
        )


CLASSES = (EShampoo, Shampoo, SOAP, KLShampoo, FullMatrixAdam)
