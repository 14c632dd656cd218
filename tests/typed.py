# pyright: strict, reportUnnecessaryTypeIgnoreComment=true
"""What the type checkers must take, and what they must refuse; `make type` reads it.

An ignored line that is not refused is an error itself.
"""

import torch
from torch import Tensor, nn

from eshampoo import EShampoo, Shampoo

model = nn.Linear(3, 2)
optimizer = EShampoo(params=model.parameters(), lr=1e-2, tau=lambda t: 0.1)
Shampoo(model.named_parameters(), 1e-3, (0.9, 0.99), graft=None)


def closure() -> Tensor:
    """Return a loss as a tensor."""
    loss: Tensor = model(torch.ones(3)).sum()
    return loss


loss: Tensor = optimizer.step(closure)
number: float = optimizer.step(lambda: 0.5)
nothing: None = optimizer.step()
base: torch.optim.Optimizer = optimizer
EShampoo(model.parameters(), frequncy=3)  # type: ignore[call-arg]
EShampoo(model.parameters(), solver="jacobi")  # type: ignore[arg-type]
