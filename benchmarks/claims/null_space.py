"""Rounding noise in directions without signal: rules against it, measured.

    python -m benchmarks.claims.null_space [--seeds 5] [--steps 200]

With F = 1 from the first step, and with vectors="full", a factor has fewer independent gradients
than rows. Its basis then has directions that no gradient has ever had a part in. What a rotated
gradient shows there is rounding, about (machine epsilon) · ‖G‖, and Adam in the eigenbasis divides
it by its own root mean square: a full-size step, unless ε is larger than the noise.

The rules, all with √Tr = √(average of ‖G‖²), which diag Λ̂ has at hand:

    none     Algorithm 2 as printed
    floor    divide by max(√D̃ + ε, κ u √Tr): u is the machine epsilon, so the divisor is never
             below what rounding alone can produce
    cut      zero where √D̃ ≤ κ u √Tr: the same threshold, as a pseudo-inverse
    pinv     zero where an eigenvalue of a factor is ≤ d u λ_max: the usual pseudo-inverse of L
    aware    correction="basis_aware", an option of the library, for comparison

Measured on an MLP on scikit-learn's digits: the share of the first updates that lies in null
spaces, how far one disturbance of the last bit brings two runs apart (both at a learning rate of
1e-3), and the loss in training at the best of four learning rates for every rule.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol
from unittest.mock import patch

import torch
from sklearn import datasets  # type: ignore[import-untyped]
from torch import Tensor, nn

from eshampoo import EShampoo, methods

from ..command import command_line

RATES = (3e-3, 1e-2, 3e-2, 1e-1)
RULES = {
    "none": ("none", 0.0),
    "floor 64": ("floor", 64.0),
    "cut 64": ("cut", 64.0),
    "pinv": ("pinv", 1.0),
    "aware": ("none", 0.0),
}
SETTINGS = {
    "F = 1, ε = 1e-8": {"frequency": 1, "tau": 0.0, "vectors": "full", "eps": 1e-8},
    "F = 1, ε = 1e-10": {"frequency": 1, "tau": 0.0, "vectors": "full", "eps": 1e-10},
    "F = 10, ε = 1e-8": {"frequency": 10, "tau": 0.0, "vectors": "full", "eps": 1e-8},
    "F = 10, τ = 0.1, ε = 1e-10": {"frequency": 10, "tau": 0.1, "vectors": "adam", "eps": 1e-10},
}


# The rules ----------------------------------------------------------------------------------------


class State(Protocol):
    """What a rule reads of the state of N blocks of one shape; D is an average here, never D*."""

    exp_avg: Tensor  # [N, *block]
    exp_avg_sq: Tensor  # [N, *block]
    factors: dict[int, Tensor]  # Λ̂ [N, d, d] by mode; empty without a basis
    step: Tensor  # [N]


class Settings(Protocol):
    """What a rule reads of the options."""

    betas: tuple[float, float]
    eps: float


@contextmanager
def rule(kind: str, kappa: float) -> Iterator[list[float]]:
    """EShampoo under a rule; collects the largest entry of every update.

    This function alone reaches into the library: it replaces the cell of the row in which the scale
    divides the momentum.
    """
    largest: list[float] = []

    def divide_(s: Any, G: Tensor, _c: object, o: Any, _p: float) -> Tensor:  # noqa: ANN401
        U, root = adam(s, G, o)
        U = ruled(U, root, s, o, kind, kappa)
        largest.append(U.abs().max().item())
        return U

    with patch.object(EShampoo, "method", replace(methods.ESHAMPOO, divide_=divide_)):
        yield largest


def adam(s: State, G: Tensor, o: Settings) -> tuple[Tensor, Tensor]:
    """Algorithm 2 as printed, where every block has a gradient: M̃ ⊘ (√D̃ + ε), and √D̃."""
    beta1, beta2 = o.betas
    s.exp_avg.lerp_(G, 1 - beta1)
    s.exp_avg_sq.lerp_(G.square(), 1 - beta2)
    root = (s.exp_avg_sq / per_block(bias(beta2, s.step), G)).sqrt()
    return s.exp_avg / per_block(bias(beta1, s.step), G) / (root + o.eps), root


def ruled(U: Tensor, root: Tensor, s: State, o: Settings, kind: str, kappa: float) -> Tensor:
    """The update after a rule."""
    spectra = {i: factor.diagonal(dim1=1, dim2=2) for i, factor in s.factors.items()}
    trace = next(iter(spectra.values())).sum(1) / bias(o.betas[1], s.step)
    u = torch.finfo(U.dtype).eps
    noise = per_block(kappa * u * trace.sqrt(), U)
    if kind == "floor":
        divisor = root + o.eps
        U = U * (divisor / torch.maximum(divisor, noise))
    if kind == "cut":
        U = U.masked_fill(root <= noise, 0.0)
    if kind == "pinv":
        for i, values in spectra.items():
            least = values.shape[1] * u * values.amax(1, keepdim=True)
            shape = [1] * U.dim()
            shape[0], shape[i + 1] = values.shape
            U = U * (values > least).view(shape)
    return U


def bias(beta: float, t: Tensor) -> Tensor:
    """1 − β^t, accurate in float32 also for β near 1."""
    return -torch.expm1(t * math.log(beta))


def per_block(x: Tensor, like: Tensor) -> Tensor:
    """Shape [N] as [N, 1, …, 1]."""
    return x.view(-1, *[1] * (like.dim() - 1))


# The problem --------------------------------------------------------------------------------------


@dataclass
class Digits:
    """Images and labels, split in two."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor

    @classmethod
    def load(cls) -> "Digits":
        pixels, labels = datasets.load_digits(return_X_y=True)
        x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        train, test = order[:1400], order[1400:]
        return cls(x[train], y[train], x[test], y[test])


def mlp(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)
    )


def optimizer(model: nn.Module, lr: float, options: dict[str, Any]) -> EShampoo:
    params = model.parameters()
    more = {"weight_decay": 0.0, "budget": None, "rms": None, **options}
    return EShampoo(params, lr=lr, betas=(0.9, 0.999), **more)


def train(
    data: Digits,
    seed: int,
    lr: float,
    options: dict[str, Any],
    steps: int,
    disturbance: float = 0.0,
    watch: Callable[[nn.Module, EShampoo, list[Tensor]], None] | None = None,
) -> tuple[list[float], float, Tensor]:
    """Losses of all steps, test error and the parameters at the end."""
    model = mlp(seed)
    ours = optimizer(model, lr, options)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.Generator().manual_seed(1)
    losses = []
    for t in range(steps):
        batch = torch.randint(len(data.x), (64,), generator=generator)
        loss = nn.CrossEntropyLoss()(model(data.x[batch]), data.y[batch])
        ours.zero_grad()
        loss.backward()
        if disturbance and t == 0:
            for p in model.parameters():
                assert p.grad is not None
                p.grad *= 1 + disturbance * torch.randn(p.shape, generator=noise)
        for group in ours.param_groups:  # cosine to zero
            group["lr"] = lr * (0.5 + 0.5 * math.cos(math.pi * t / steps))
        before = [p.detach().clone() for p in model.parameters()]
        ours.step()
        if watch is not None:
            watch(model, ours, before)
        losses.append(loss.item())
    with torch.no_grad():
        wrong = (model(data.x_test).argmax(1) != data.y_test).float().mean().item()
    return losses, wrong, nn.utils.parameters_to_vector(model.parameters()).detach()


# What is measured ---------------------------------------------------------------------------------


def noise_share(data: Digits, options: dict[str, Any], steps: int = 8) -> float:
    """Share of the squared update that lies where no gradient has ever been, over some steps.

    The spans are taken from the gradients themselves in float64: all of them so far, as columns
    (and rows) of what each parameter has seen.
    """
    seen: dict[int, list[Tensor]] = {}
    total = outside = 0.0

    def watch(model: nn.Module, ours: EShampoo, before: list[Tensor]) -> None:
        nonlocal total, outside
        for i, (p, old) in enumerate(zip(model.parameters(), before, strict=True)):
            assert p.grad is not None
            seen.setdefault(i, []).append(p.grad.double().reshape(p.shape[0], -1))
            U = (p.detach().double() - old.double()).reshape(p.shape[0], -1)
            inside = U
            for mode in range(2):
                stacked = torch.cat([g if mode == 0 else g.T for g in seen[i]], 1)
                left, values, _ = torch.linalg.svd(stacked, full_matrices=False)
                span = left[:, values > 1e-9 * values[0]]
                inside = span @ (span.T @ inside) if mode == 0 else (inside @ span) @ span.T
            total += U.square().sum().item()
            outside += (U - inside).square().sum().item()

    train(data, 0, 1e-3, options, steps, watch=watch)
    return outside / total


def apart(data: Digits, options: dict[str, Any], steps: int = 8) -> float:
    """How far one disturbance at rounding level of the first gradient brings the parameters."""
    one = train(data, 0, 1e-3, options, steps)[2]
    two = train(data, 0, 1e-3, options, steps, disturbance=1e-7)[2]
    return (one - two).abs().max().item()


def mean_and_error(values: list[float]) -> str:
    x = torch.tensor(values, dtype=torch.float64)
    return f"{x.mean():.4f} ± {x.std() / len(values) ** 0.5:.4f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table per setting."""
    parser = command_line("claims.null_space", __doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--setting", default="", help="only settings with this in their name")
    parser.add_argument("--rules", nargs="+", default=list(RULES), choices=list(RULES))
    o = parser.parse_args(arguments)
    torch.set_num_threads(1)
    data, seeds, steps = Digits.load(), range(o.seeds), o.steps
    for title, options in SETTINGS.items():
        if o.setting not in title:
            continue
        print(f"\n{title}; {len(seeds)} seeds, {steps} steps")
        print(
            "| rule | noise in 8 steps | apart after 8 | best lr | largest entry "
            "| loss of the first 50 | of the last 20 | test error |"
        )
        print("|---|---|---|---|---|---|---|---|", flush=True)
        for name in o.rules:
            kind, kappa = RULES[name]
            chosen = {**options, "correction": "basis_aware" if name == "aware" else "naive"}
            results = {}
            with rule(kind, kappa) as largest:
                share, far = noise_share(data, chosen), apart(data, chosen)
                for lr in RATES:
                    largest.clear()
                    runs = [train(data, s, lr, chosen, steps) for s in seeds]
                    results[lr] = runs, max(largest)
            best = min(results, key=lambda lr: sum(sum(run[0][-20:]) for run in results[lr][0]))
            runs, peak = results[best]
            early = mean_and_error([sum(losses[:50]) / 50 for losses, _, _ in runs])
            late = mean_and_error([sum(losses[-20:]) / 20 for losses, _, _ in runs])
            wrong = mean_and_error([error for _, error, _ in runs])
            print(
                f"| {name} | {share:.1e} | {far:.1e} | {best:g} | {peak:.3g} "
                f"| {early} | {late} | {wrong} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
