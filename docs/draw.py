"""Draw the pictures of docs/how.md and docs/recipes.md, from a real run.

    python docs/draw.py          # needs the extra `lab`; a few seconds on one thread

The run trains an MLP on scikit-learn's digits, with EShampoo's defaults and record=True. Pictures
are narrow, so that they can be read on a phone.
"""

from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn

from eshampoo import EShampoo, plot_basis

IMAGES = Path(__file__).parent / "images"
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#8A8A8A"
STEPS, SNAPSHOT = 300, 40  # of the run; where a factor and a gradient are drawn
matplotlib.rcParams.update({"svg.hashsalt": "eshampoo", "font.size": 9, "svg.fonttype": "path"})


def save(figure: Figure, name: str) -> None:
    figure.savefig(IMAGES / f"{name}.svg", metadata={"Date": None}, bbox_inches="tight")


def bare(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)


class Run:
    """A trained MLP, with the factor of one layer before and after its basis is used."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        digits = load_digits()
        inputs = torch.tensor(digits.data / 16.0, dtype=torch.float32)
        labels = torch.tensor(digits.target)
        model = nn.Sequential()
        for name, sizes in {"input": (64, 48), "hidden": (48, 48), "head": (48, 10)}.items():
            model.add_module(name, nn.Linear(*sizes))
            if name != "head":
                model.add_module(f"{name}_tanh", nn.Tanh())
        self.optimizer = EShampoo(model.named_parameters(), lr=3e-3, record=True)
        self.weight = model.hidden.weight
        for step in range(1, STEPS + 1):
            rows = torch.randint(len(labels), (64,))
            loss = nn.functional.cross_entropy(model(inputs[rows]), labels[rows])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if step == SNAPSHOT:
                assert self.weight.grad is not None
                self.gradient = self.weight.grad.clone()
                self.state = {
                    key: value[0].clone()
                    for key, value in self.optimizer.state[self.weight].items()
                    if key.startswith(("basis_", "factor_"))
                }


def heat(axes: Axes, values: Tensor, title: str) -> None:
    """A matrix on a logarithmic scale over three powers of ten."""
    shown = np.log10(values.abs().numpy() / values.abs().max().item() + 1e-9)
    axes.imshow(shown, cmap="Blues", vmin=-3, vmax=0)
    axes.set_title(title, fontsize=11)
    axes.set_xticks([])
    axes.set_yticks([])


def draw_eigenbasis(run: Run) -> None:
    Q_L, Q_R, inside = (run.state[key] for key in ("basis_0", "basis_1", "factor_0"))
    figure = Figure(figsize=(7.6, 2.2), layout="constrained")
    panels = figure.subplots(1, 4).flat
    heat(panels[0], Q_L @ inside @ Q_L.T, "factor L")
    heat(panels[1], inside, "QᵀLQ")
    heat(panels[2], run.gradient, "gradient G")
    heat(panels[3], Q_L.T @ run.gradient @ Q_R, "Q_LᵀGQ_R")
    save(figure, "eigenbasis")


def draw_criterion(run: Run) -> None:
    """Left: the criterion of one factor. Right: the bases of all factors, and the free ones."""
    rows = run.optimizer.basis_report()
    row = next(r for r in rows if r.name == "hidden.weight" and r.mode == 0)
    figure = Figure(figsize=(8.4, 2.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps, values, _ = zip(*row.history, strict=True)
    new = [(step, value) for step, value, computed in row.history if computed]
    left.plot(steps, values, color=GREY, linewidth=1, marker=".", label="at a check")
    left.scatter(*zip(*new, strict=True), color=ORANGE, s=22, zorder=3, label="basis computed")
    left.axhline(0.03, color=BLUE, linewidth=1, linestyle="--")
    left.text(1, 0.032, "τ = 0.03", color=BLUE, ha="left", va="bottom")
    left.set(xscale="log", yscale="log", xlabel="step", title="‖Λ̂ − diag Λ̂‖ / ‖Λ̂‖ of one factor")
    left.legend(frameon=False)
    for row in rows:
        computed = np.cumsum([was_new for _, _, was_new in row.history])
        at = [step for step, _, _ in row.history]
        right.step(at, computed, where="post", color=GREEN, linewidth=0.9, alpha=0.8)
    line = np.arange(1, STEPS + 1)
    free = np.minimum(line, (1 + np.log(np.maximum(1.0, 0.1 * line))) / 0.1)
    right.plot(line, free, color=ORANGE, linestyle="--", linewidth=1.2, label="free")
    right.set(xlabel="step", title="bases computed so far, one line per factor")
    right.legend(frameon=False)
    bare(left)
    bare(right)
    save(figure, "criterion")


def main() -> None:
    torch.set_num_threads(1)
    run = Run()
    draw_eigenbasis(run)
    draw_criterion(run)
    save(plot_basis(run.optimizer.basis_report()), "bases")
    print(run.optimizer.basis_report())


if __name__ == "__main__":
    main()
