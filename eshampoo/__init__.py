"""Eigenvalue-corrected Shampoo and its family for PyTorch (paper: "Purifying Shampoo", 2025)."""

from . import schedules
from .grouping import name_parameters, parameter_groups
from .optimizers import CASPR, SOAP, EShampoo, FullMatrixAdam, KLShampoo, Muon, Shampoo

__version__ = "0.1.0"
__all__ = [
    "CASPR",
    "SOAP",
    "EShampoo",
    "FullMatrixAdam",
    "KLShampoo",
    "Muon",
    "Shampoo",
    "name_parameters",
    "parameter_groups",
    "schedules",
]
