"""What a basis costs on a device, in units of a product: the numbers that `budget` needs.

A product is d³ multiply-adds in a batch of d × d matrices. Factors are nearly diagonal, as they are
when a basis is renewed. Every time is of one matrix of a stack, the least of several runs.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from .timing import Action, Clock, race, use_device, warm_up

SIZES = (128, 256, 512, 1024, 2048)
QUICK_SIZES = (32, 64, 128)
STACKS = (1, 8, 64)


class Cost(NamedTuple):
    """Seconds per matrix of size d, in stacks of so many; None for what would take too long."""

    d: int
    stack: int
    product: float
    eigh: float | None
    qr: float | None

    @property
    def eigh_products(self) -> float | None:
        """How many products take as long as one `eigh`."""
        return None if self.eigh is None else self.eigh / self.product


def factors(d: int, stack: int, device: str) -> Tensor:
    """Nearly diagonal positive factors [K, d, d] with a spectrum over six decades."""
    generator = torch.Generator().manual_seed(d)
    noise = torch.randn(d, d, generator=generator).mul_(1e-4)
    spectrum = torch.logspace(-6, 0, d)
    scale = spectrum.sqrt()
    A = torch.diag(spectrum) + scale.unsqueeze(1) * (noise + noise.t()) * scale
    return A.to(device).repeat(stack, 1, 1)


def least_seconds(actions: dict[str, Action], device: str, repetitions: int) -> dict[str, float]:
    """The least time of each; CPU seconds where one thread works."""
    one_thread = device == "cpu" and torch.get_num_threads() == 1
    for action in actions.values():
        action()
    found = race(actions, repetitions, budget=10.0, least=2)
    return {name: clock["cpu" if one_thread else "least"] for name, clock in found.items()}


def measure(
    device: str, sizes: Sequence[int], stacks: Sequence[int], limit: float, repetitions: int = 5
) -> Iterator[Cost]:
    """The costs of every size and stack; a solve longer than `limit` seconds is left out."""
    use_device(device)
    warm_up()
    for d in sizes:
        single: dict[str, float] = {}  # seconds of one matrix, once known
        for stack in stacks:
            A = factors(d, stack, device)
            out = torch.empty_like(A)
            actions: dict[str, Action] = {"product": partial(torch.bmm, A, A, out=out)}
            solvers: dict[str, Action] = {
                "eigh": partial(torch.linalg.eigh, A),
                "qr": partial(torch.linalg.qr, A),
            }
            for name, solver in solvers.items():
                if name not in single:  # the first run decides whether there are more
                    clock = Clock()
                    clock.time(solver)
                    single[name] = clock.wall[0] / stack
                if single[name] * stack <= limit:
                    actions[name] = solver
            seconds = least_seconds(actions, device, repetitions)
            per_matrix = {name: total / stack for name, total in seconds.items()}
            yield Cost(
                d, stack, per_matrix["product"], per_matrix.get("eigh"), per_matrix.get("qr")
            )


def row(cost: Cost) -> str:
    """A row of the table."""

    def cells(seconds: float | None) -> list[str]:
        return (
            ["–", "–"] if seconds is None else [f"{seconds:.2e}", f"{seconds / cost.product:.0f}"]
        )

    words = [
        str(cost.d),
        str(cost.stack),
        f"{cost.product:.2e}",
        *cells(cost.eigh),
        *cells(cost.qr),
    ]
    return f"| {' | '.join(words)} |"


def advice(costs: Sequence[Cost], device: str) -> str:
    """The one line that sets the cost: the median over the sizes, each in its largest stack."""
    largest = {cost.d: cost.eigh_products for cost in costs if cost.eigh_products is not None}
    products = median(largest.values())
    return f'eshampoo.math.solvers.EIGH_PRODUCTS["{torch.device(device).type}"] = {products:.0f}.0'
