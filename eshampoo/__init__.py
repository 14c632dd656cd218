"""Eigenvalue-corrected Shampoo and its family for PyTorch (paper: "Purifying Shampoo", 2025)."""

from . import schedules
from .classes import CASPR, SOAP, EShampoo, FullMatrixAdam, KLShampoo, Muon, Shampoo
from .grouping import name_parameters, parameter_groups
from .integrations.matplotlib import plot_basis
from .report import BasisReport, FactorReport

__version__ = "0.3.0"
__all__ = [
    "CASPR",
    "SOAP",
    "BasisReport",
    "EShampoo",
    "FactorReport",
    "FullMatrixAdam",
    "KLShampoo",
    "Muon",
    "Shampoo",
    "name_parameters",
    "parameter_groups",
    "plot_basis",
    "schedules",
]
