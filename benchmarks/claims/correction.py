"""Why does the basis-aware correction hurt? D against its exact value, change by change.

    python -m benchmarks.claims.correction [--seeds 3] [--steps 200] [--lr 3e-3 1e-2 3e-2 1e-1]

D should be the diagonal of QᵀAQ, where A averages vec(G) vec(G)ᵀ and Q = Q_L ⊗ Q_R. The middle
layer of an MLP on scikit-learn's digits (64-32-32-10) is small enough to keep all of A, 1024²,
so that D can be compared with the exact D* at every change of basis:

    before     D against D* in the old basis: how good D is anyhow
    naive      the same D in the new basis, Algorithm 2
    aware      V^{⊙2} D: what the basis-aware correction makes of it

Errors are the mean of |ln D/D*| over entries; `spread` is the standard deviation of ln D, and
beside it that of ln D*. `size` is the root mean square of the layer's updates over the learning
rate. Then the final loss of training with each correction, for every learning rate.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Literal

import torch
from sklearn import datasets  # type: ignore[import-untyped]
from torch import Tensor, nn

from eshampoo import EShampoo

from ..command import command_line

Correction = Literal["naive", "basis_aware", "optimal"]
CORRECTIONS: tuple[Correction, ...] = ("naive", "basis_aware", "optimal")
BETA2 = 0.999
WARM = 5
"""Changes before this step say little: A has the rank of a few gradients."""


def batches(seed: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random batches of digits."""
    data, target = datasets.load_digits(return_X_y=True)
    images, labels = torch.tensor(data, dtype=torch.float64) / 16, torch.tensor(target)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        chosen = torch.randint(len(images), (64,), generator=generator)
        yield images[chosen], labels[chosen]


def rotated(A: Tensor, bases: list[Tensor]) -> Tensor:
    """D* = diag(QᵀAQ) as a matrix."""
    Q = torch.kron(bases[0], bases[1])
    return ((A @ Q) * Q).sum(0).view(len(bases[0]), -1)


def error(D: Tensor, exact: Tensor) -> float:
    """Mean |ln D/D*| over entries that have seen a gradient."""
    seen = (exact > 1e-12 * exact.max()) & (D > 0)
    return float((D[seen] / exact[seen]).log().abs().mean())


def spread(D: Tensor) -> float:
    """Standard deviation of ln D over entries that have seen a gradient."""
    return float(D[1e-12 * D.max() < D].log().std())


def network(seed: int) -> tuple[nn.Sequential, nn.Linear]:
    """The MLP, and its middle layer."""
    torch.manual_seed(seed)
    middle = nn.Linear(32, 32)
    layers = (nn.Linear(64, 32), nn.Tanh(), middle, nn.Tanh(), nn.Linear(32, 10))
    return nn.Sequential(*layers).double(), middle


def train(
    correction: Correction, lr: float, seed: int, steps: int, found: dict[str, list[float]]
) -> float:
    """Final loss; `found` takes what every step and change of the middle layer showed."""
    model, middle = network(seed)
    # The paper's algorithm: no fixed size, which would hide what D does.
    ours = EShampoo(
        model.parameters(),
        lr=lr,
        betas=(0.9, BETA2),
        correction=correction,
        rms=None,
        budget=None,
        tau=0.1,
    )
    W = middle.weight
    A = torch.zeros(W.numel(), W.numel(), dtype=torch.float64)
    losses = []
    for t, (x, y) in enumerate(batches(seed, steps), start=1):
        rate = lr * 0.5 * (1 + math.cos(math.pi * (t - 1) / steps))
        for group in ours.param_groups:
            group["lr"] = rate
        loss = nn.functional.cross_entropy(model(x), y)
        ours.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        state = {name: value.clone() for name, value in first(ours.state[W]).items()}
        weight, average = W.detach().clone(), A / (1 - BETA2 ** max(1, t - 1))
        assert W.grad is not None
        g = W.grad.flatten()
        A.lerp_(torch.outer(g, g), 1 - BETA2)
        ours.step()
        found["size"].append(float((W.detach() - weight).square().mean().sqrt()) / rate)
        old, new = ([s[f"basis_{i}"] for i in range(2)] for s in (state, first(ours.state[W])))
        moved = any(not torch.equal(a, b) for a, b in zip(old, new, strict=True))
        if correction != "optimal" and t > WARM and moved:
            compare(state["exp_avg_sq"] / (1 - BETA2 ** (t - 1)), average, old, new, found)
    return fmean(losses[-20:])


def first(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of the only block."""
    return {name: value[0] for name, value in state.items()}


def compare(
    D: Tensor, A: Tensor, old: list[Tensor], new: list[Tensor], found: dict[str, list[float]]
) -> None:
    """Note how far D is from D* before a change, and after it by each rule."""
    V = [a.T @ b for a, b in zip(old, new, strict=True)]
    was, now = rotated(A, old), rotated(A, new)
    aware = V[0].square().T @ D @ V[1].square()
    found["before"].append(error(D, was))
    for name, kept in (("naive", D), ("aware", aware)):
        found[name].append(error(kept, now))
        found[f"spread {name}"].append(spread(kept))
    found["spread D* before"].append(spread(was))
    found["spread D* after"].append(spread(now))


def report(correction: Correction, lr: float, seeds: int, steps: int) -> None:
    """Print the losses of one correction at one rate, and what its changes of basis showed."""
    found: dict[str, list[float]] = defaultdict(list)
    losses = [train(correction, lr, seed, steps, found) for seed in range(seeds)]
    shown = ", ".join(f"{loss:.4f}" for loss in losses)
    print(f"correction={correction!r}, lr {lr:g}: final loss {fmean(losses):.4f} ({shown})")
    for name, values in found.items():
        print(f"    {name:<18} {fmean(values):.3f}   ({len(values)})", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a paragraph for every correction and rate."""
    parser = command_line("claims.correction", __doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, nargs="+", default=[3e-3, 1e-2, 3e-2, 1e-1])
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for correction in CORRECTIONS:
        for lr in options.lr:
            report(correction, lr, options.seeds, options.steps)


if __name__ == "__main__":
    main()
