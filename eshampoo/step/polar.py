"""The cell of Muon, whose update is the polar factor of the momentum.

Legend: as in `phases.py`; a matrix is m × n.
"""

import math

import torch
from torch import Tensor

from ..math.linalg import polar_factor
from ..options import Options
from ..state.state import State
from .phases import Coefficients, average_momentum_, share

# The root mean square of AdamW's updates, to which Muon's are scaled (Liu et al., 2025).
ADAMW_RMS = 0.2


def polar_(s: State, G: Tensor, c: Coefficients, o: Options, p: float) -> Tensor:
    """0.2 √max(m, n) · polar(M), M ← μM + (1−μ)G, in place of G; M looks ahead with nesterov."""
    M = average_momentum_(s, G, share(o.momentum, c.moving))
    M = torch.lerp(G, M, o.momentum) if o.nesterov else M
    size = ADAMW_RMS * math.sqrt(max(G.shape[1:]))
    return torch.mul(polar_factor(M, o.ns_steps), size, out=G)
