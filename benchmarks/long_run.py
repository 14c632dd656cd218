"""A long run on a small problem with F = 1 and τ = 0.01: does anything grow, wear out or drift?

    python -m benchmarks.long_run [--steps 20000]

A layer is fitted to noisy data, one batch after another, in float32, in float64, and in float32
with the first gradients disturbed by one rounding. Watched on the way: memory, the length of the
history, how orthogonal the bases and how symmetric the factors are, and how far the float32 run is
from the float64 run, compared with how far the disturbance brings it.
"""

import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from eshampoo import EShampoo

from . import timing
from .command import command_line
from .states import state_bytes

SAMPLES = 20  # times at which a run is looked at
BATCH = 16


@dataclass
class Sample:
    """What a run looks like at one moment."""

    step: int
    parameters: list[float]
    loss: float
    orthogonality: float  # max |QᵀQ − I|
    symmetry: float  # max |Λ̂ − Λ̂ᵀ| / max |Λ̂|
    history: int  # entries of the longest
    tensors: int  # alive in the process
    state_bytes: int
    peak_bytes: int  # of the process


def run(steps: int, dtype: torch.dtype, disturbance: float = 0.0) -> Iterator[Sample]:
    """Train, and stop to look."""
    torch.manual_seed(0)
    teacher, model = nn.Linear(8, 6).double(), nn.Linear(8, 6).double().to(dtype)
    optimizer = EShampoo(
        model.parameters(), lr=1e-3, frequency=1, tau=0.01, vectors="full", betas=(0.9, 0.99),
        budget=None, rms=None, record=True,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    scales = torch.logspace(0, -1, 8, dtype=torch.float64)
    losses = []
    for step in range(1, steps + 1):
        x = torch.randn(BATCH, 8, generator=generator, dtype=torch.float64) * scales
        noise = torch.randn(BATCH, 6, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            y = teacher(x) + 0.1 * noise
        loss = nn.MSELoss()(model(x.to(dtype)), y.to(dtype))
        optimizer.zero_grad()
        loss.backward()
        if step == 1 and disturbance:
            for p in model.parameters():
                assert p.grad is not None
                p.grad *= 1 + disturbance * torch.randn(p.shape).sign()
        optimizer.step()
        losses.append(loss.item())
        if step % (steps // SAMPLES) == 0:
            yield look(step, model, optimizer, sum(losses) / len(losses))
            losses.clear()


def look(step: int, model: nn.Module, optimizer: EShampoo, loss: float) -> Sample:
    """Everything that is watched, now."""
    bases, factors = [0.0], [0.0]
    for values in optimizer.state.values():
        for name, value in values.items():
            if name.startswith("basis_") and value.dim() == 3:
                eye = torch.eye(value.shape[1], dtype=torch.float64)
                Q = value.double()
                bases.append((Q.transpose(1, 2) @ Q - eye).abs().max().item())
            if name.startswith("factor"):
                gap = (value - value.transpose(1, 2)).abs().max() / value.abs().max()
                factors.append(gap.item())
    gc.collect()
    return Sample(
        step,
        nn.utils.parameters_to_vector(model.parameters()).tolist(),
        loss,
        max(bases),
        max(factors),
        max(len(row.history) for row in optimizer.basis_report()),
        sum(issubclass(type(x), Tensor) for x in gc.get_objects()),
        state_bytes(optimizer),
        timing.peak(),
    )


def distances(a: list[Sample], b: list[Sample]) -> list[float]:
    """Largest difference of a parameter, sample by sample."""
    return [
        max(abs(p - q) for p, q in zip(x.parameters, y.parameters, strict=True))
        for x, y in zip(a, b, strict=True)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row per sample."""
    parser = command_line("long_run", __doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    steps = parser.parse_args(arguments).steps
    torch.set_num_threads(1)
    begin = time.perf_counter()
    single = list(run(steps, torch.float32))
    double = list(run(steps, torch.float64))
    disturbed = list(run(steps, torch.float32, torch.finfo(torch.float32).eps))
    rounding, noise = distances(single, double), distances(single, disturbed)
    titles = ["step", "loss", "QᵀQ − I", "asymmetry", "history", "tensors", "peak MB"]
    print("| " + " | ".join([*titles, "to float64", "disturbed"]) + " |")
    print("|---" * (len(titles) + 2) + "|")
    for s, to_double, to_disturbed in zip(single, rounding, noise, strict=True):
        print(
            f"| {s.step} | {s.loss:.5f} | {s.orthogonality:.1e} | {s.symmetry:.1e} | {s.history} "
            f"| {s.tensors} | {s.peak_bytes / 1e6:.0f} | {to_double:.1e} | {to_disturbed:.1e} |"
        )
    print(f"{3 * steps} steps in {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
