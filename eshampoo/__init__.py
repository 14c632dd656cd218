"""Eigenvalue-corrected Shampoo and its family for PyTorch (paper: "Purifying Shampoo", 2025)."""

from . import schedules
from .grouping import name_parameters, parameter_groups
from .optimizers import SOAP, EShampoo, FullMatrixAdam, KLShampoo, Shampoo

__version__ = "0.1.0"
__all__ = [
    "SOAP",
    "EShampoo",
    "FullMatrixAdam",
    "KLShampoo",
    "Shampoo",
    "name_parameters",
    "parameter_groups",
    "schedules",
]
