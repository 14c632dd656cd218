"""What the library's optimizers tell about their eigenbases, as records of the log."""

import math
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from eshampoo.engine import EigenbasisOptimizer
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
            "letter": letter(row),
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


def letter(row: FactorReport) -> str:
    """Return the paper's letter: A for a vector or a merged matrix, else L, R, then 3, 4, …"""
    vector = sum(size > 1 for size in row.shape) <= 1
    return "A" if vector or row.size == math.prod(row.shape) else "LR3456789"[row.mode]


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
