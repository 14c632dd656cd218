"""What the library's optimizers report about their eigenbases, as records of the log."""

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from eshampoo.optimizer import EigenbasisOptimizer
from eshampoo.report import FactorReport


def computations(optimizer: Optimizer) -> int:
    """Count the basis computations so far; an optimizer without bases has none."""
    return optimizer.basis_computations if isinstance(optimizer, EigenbasisOptimizer) else 0


def factors_record(optimizer: Optimizer, kinds: Mapping[str, str]) -> dict[str, Any] | None:
    """Record where each factor belongs; an optimizer without bases has no such record."""
    if not isinstance(optimizer, EigenbasisOptimizer):
        return None
    factors = [
        {
            "parameter": row.name,
            "kind": kinds[row.name or ""],
            "letter": row.letter,
            "block": row.block,
            "mode": row.mode,
            "size": row.size,
        }
        for row in factor_rows(optimizer)
    ]
    return {"kind": "factors", "factors": factors}


def factor_rows(optimizer: EigenbasisOptimizer) -> list[FactorReport]:
    """Return the report without the rows of parameters that have no factor."""
    return [row for row in optimizer.basis_report() if row.mode >= 0]


def basis_record(optimizer: Optimizer, step: int) -> dict[str, Any] | None:
    """Record checks, computations and last criterion of every factor, in the order of factors."""
    if not isinstance(optimizer, EigenbasisOptimizer):
        return None
    report = factor_rows(optimizer)
    return {
        "kind": "basis",
        "step": step,
        "work": sum(row.work for row in report),
        "checks": [row.checks for row in report],
        "computations": [row.computations for row in report],
        "criterion": [float(f"{row.criterion:.4g}") for row in report],
    }
