"""Does a step need all bits? Training with the operands of a step rounded as hardware rounds them.

    python -m benchmarks.claims.precision [--workload digits-vit] [--data PATH] [--seeds 5]
                                          [--steps N] [--bits 24 10 7] [--drift 2000] [--empty]

TF32 has 10 bits after the point, bfloat16 7, float32 23. `precision="high"` allows the first on a
GPU and the second on some CPUs, for rotations and Gram products; changes of basis keep all bits.
Here the operands of exactly these products are rounded on a CPU, and sums are float32, as on the
hardware. The floor under √D knows the rounding, as with "high".

For every number of bits, the final loss of EShampoo with its defaults for every seed, and Welch's
t-test of its difference to 24 bits. With --drift the largest entry of QᵀQ − I over so many steps of
a small network, instead. With --empty the share of an update that is rounding, where gradients of a
64 × 64 matrix have rank 16 or 48.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import TypeVar
from unittest.mock import patch

import torch
from torch import Tensor, nn

from eshampoo import EShampoo
from eshampoo.lab.figures.ours import STEPS
from eshampoo.lab.report.significance import difference
from eshampoo.options import Options
from eshampoo.state.state import State
from eshampoo.step import phases

from ..command import command_line
from ..overhead import trained
from .correction import batches
from .level import final_loss

LR, FULL = 3e-3, 24
T = TypeVar("T")


def rounded(X: Tensor, bits: int) -> Tensor:
    """X with so many bits after the point, to nearest even; float64 keeps all of its bits."""
    if X.dtype != torch.float32:
        return X
    drop = 23 - bits
    whole = X.contiguous().view(torch.int32)
    odd = (whole >> drop) & 1
    return ((whole + (1 << (drop - 1)) - 1 + odd) >> drop << drop).view(torch.float32)


def emulated(function: Callable[..., T], bits: int) -> Callable[..., T]:
    """A function of phases.py whose products have operands of so many bits."""
    bmm = torch.bmm

    def product(X: Tensor, Y: Tensor, *, out: Tensor | None = None) -> Tensor:
        return bmm(rounded(X, bits), rounded(Y, bits), out=out)

    def with_rounding(*args: object) -> T:
        with patch.object(torch, "bmm", product):
            return function(*args)

    return with_rounding


@contextmanager
def operands_of(bits: int) -> Iterator[None]:
    """Rotations and Gram products of a step with operands of so many bits; 24: as they are."""
    if bits >= FULL:
        yield
        return

    def floor(s: State, o: Options) -> float:
        return 2.0**-bits / sqrt(min(Q.shape[1] for Q in s.bases.values())) if s.bases else 0.0

    products = ("rotate_", "average_gram_", "average_triangle_")
    with ExitStack() as stack:
        stack.enter_context(patch.object(phases, "product_rounding", floor))
        for name in products:
            function = emulated(getattr(phases, name), bits)
            stack.enter_context(patch.object(phases, name, function))
        yield


def drift(bits: int, steps: int, seed: int = 0) -> tuple[float, int]:
    """The largest entry of QᵀQ − I over the steps of a small MLP on digits, and its bases."""
    torch.manual_seed(seed)
    sizes = (64, 48, 32, 10)
    layers = [nn.Linear(m, n) for m, n in pairwise(sizes)]
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])
    ours, worst = EShampoo(model.parameters(), lr=LR, budget=None), 0.0
    for x, y in batches(seed, steps):
        loss = nn.functional.cross_entropy(model(x.float()), y)
        ours.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        with operands_of(bits):
            ours.step()
        for layer in layers:
            for mode in range(2):
                Q = ours.state[layer.weight].get(f"basis_{mode}")
                if Q is not None:
                    error = Q.double().mT @ Q.double() - torch.eye(Q.shape[-1]).double()
                    worst = max(worst, float(error.abs().max()))
    return worst, ours.basis_computations


def empty(bits: int, rank: int, d: int = 64, steps: int = 30) -> float:
    """The mean of ‖U − PUP‖/‖U‖ after five steps, where P projects onto what gradients can be."""
    generator = torch.Generator().manual_seed(0)
    sides = [torch.randn(d, rank, generator=generator) for _ in range(2)]
    bases = [torch.linalg.qr(X.double()).Q for X in sides]
    left, right = (Q @ Q.mT for Q in bases)
    W = nn.Parameter(torch.zeros(d, d))
    ours, shares = EShampoo([W], lr=LR, weight_decay=0.0), []
    for _ in range(steps):
        W.grad = sides[0] @ torch.randn(rank, rank, generator=generator) @ sides[1].mT
        before = W.detach().double()
        with operands_of(bits):
            ours.step()
        U = W.detach().double() - before
        shares.append(float((U - left @ U @ right).norm() / U.norm()))
    return fmean(shares[5:])


def compare(o: Namespace) -> None:
    """Print a row per number of bits."""
    steps = o.steps or STEPS[o.workload]
    exact: list[float] = []
    for bits in o.bits:
        with operands_of(bits):
            logs = [
                trained(o.workload, {"lr": LR, "betas": (0.9, 0.95)}, o.data, n, steps)
                for n in range(o.first, o.first + o.seeds)
            ]
        losses = [final_loss(log) for log in logs]
        exact = exact or losses
        shown = ", ".join(f"{loss:.4g}" for loss in losses)
        line = f"{o.workload}, {bits} bits: {fmean(losses):.4g}"
        if len(losses) > 1:
            line += f" ± {stdev(losses):.2g}, {difference(losses, exact)}"
        print(f"{line} ({shown})", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, the drift, or the share of rounding."""
    parser = command_line("claims.precision", __doc__)
    parser.add_argument("--workload", default="digits-vit", choices=STEPS)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=100, help="the first seed")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--bits", type=int, nargs="+", default=[FULL, 10, 7])
    parser.add_argument("--drift", type=int, help="steps of the small network")
    parser.add_argument("--empty", action="store_true")
    o = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if o.drift is None and not o.empty:
        compare(o)
        return
    for bits in o.bits:
        if o.drift:
            worst, bases = drift(bits, o.drift)
            print(f"{bits} bits: |QᵀQ − I| ≤ {worst:.1e} in {o.drift} steps with {bases} bases")
        if o.empty:
            shares = [f"{empty(bits, rank):.2g} for rank {rank}" for rank in (16, 48)]
            print(f"{bits} bits: rounding is {', '.join(shares)} of an update")


if __name__ == "__main__":
    main()
