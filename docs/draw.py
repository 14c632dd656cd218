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
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from eshampoo import EShampoo, plot_basis
from eshampoo.checks import when_new

IMAGES = Path(__file__).parent / "images"
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#8A8A8A"
STEPS = 300
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
        for _ in range(STEPS):
            rows = torch.randint(len(labels), (64,))
            loss = nn.functional.cross_entropy(model(inputs[rows]), labels[rows])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        self.gradient = self.weight.grad.clone()

    def of_layer(self, key: str) -> Tensor:
        return self.optimizer.state[self.weight][key][0]


def heat(axes: Axes, values: Tensor, title: str) -> None:
    """A matrix on a logarithmic scale over three powers of ten."""
    shown = np.log10(values.abs().numpy() / values.abs().max().item() + 1e-9)
    axes.imshow(shown, cmap="Blues", vmin=-3, vmax=0)
    axes.set_title(title, fontsize=9)
    axes.set_xticks([])
    axes.set_yticks([])


def draw_eigenbasis(run: Run) -> None:
    Q_L, Q_R = run.of_layer("basis_0"), run.of_layer("basis_1")
    inside = run.of_layer("factor_0")
    figure = Figure(figsize=(5.4, 5.8), layout="constrained")
    panels = figure.subplots(2, 2).flat
    heat(panels[0], Q_L @ inside @ Q_L.T, "factor L")
    heat(panels[1], inside, "in its basis: Λ̂ = QᵀLQ")
    heat(panels[2], run.gradient, "a gradient G")
    heat(panels[3], Q_L.T @ run.gradient @ Q_R, "in both bases: G̃ = Q_LᵀGQ_R")
    save(figure, "eigenbasis")


def draw_criterion(run: Run) -> None:
    left = next(
        r for r in run.optimizer.basis_report() if r.name == "hidden.weight" and r.mode == 0
    )
    steps = [step for step, _, _ in left.history]
    values = [value for _, value, _ in left.history]
    new = [(step, value) for step, value, computed in left.history if computed]
    figure = Figure(figsize=(6.4, 2.7), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, values, color=GREY, linewidth=1, marker=".", label="criterion at a check")
    axes.scatter(*zip(*new, strict=True), color=ORANGE, s=22, zorder=3, label="basis computed")
    axes.axhline(0.03, color=BLUE, linewidth=1, linestyle="--")
    axes.text(1, 0.032, "τ = 0.03", color=BLUE, ha="left", va="bottom")
    axes.set(xscale="log", yscale="log", xlabel="step", ylabel="‖Λ̂ − diag Λ̂‖ / ‖Λ̂‖")
    axes.legend(frameon=False)
    bare(axes)
    save(figure, "criterion")


def draw_novelty(run: Run) -> None:
    figure = Figure(figsize=(5.8, 5.0), layout="constrained")
    checks, bases = figure.subplots(2, 1)
    for height, beta in enumerate((0.95, 0.99, 0.999)):
        looks = when_new(beta, 0.1)
        steps = [t for t in range(1, 1001) if looks(t)]
        checks.scatter(steps, [height] * len(steps), marker="|", s=140, color=BLUE)
    checks.set(xscale="log", xlabel="step", ylim=(-0.6, 2.6), title="when a factor is checked")
    checks.set_yticks([0, 1, 2], ["β2 = 0.95", "β2 = 0.99", "β2 = 0.999"])
    rows = run.optimizer.basis_report()
    for row in rows:
        steps = [step for step, _, _ in row.history]
        computed = np.cumsum([new for _, _, new in row.history])
        bases.step(steps, computed, where="post", color=GREEN, linewidth=0.9, alpha=0.8)
    line = np.arange(1, STEPS + 1)
    bases.plot(line, 2.5 * np.log2(1 + line / 2), color=ORANGE, linestyle="--", linewidth=1)
    bases.text(STEPS, 14, "dashed: the number that is free", color=ORANGE, ha="right", va="top")
    bases.set(xlabel="step", title="bases computed so far, one line per factor")
    bare(checks)
    bare(bases)
    save(figure, "novelty")


def draw_step() -> None:
    """Boxes and arrows: what happens to a gradient in one step."""
    figure = Figure(figsize=(5.4, 5.0))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 54), ylim=(0, 50))
    axes.axis("off")
    boxes = {
        "gradient G": (2, 42, GREY), "rotate\nG̃ = Q_LᵀGQ_R": (2, 32, BLUE),
        "average\nmomentum M̃, scale D": (2, 22, BLUE), "divide\nM̃ ⊘ (√D + ε)": (2, 12, BLUE),
        "rotate back,\nscale, move W": (2, 2, GREY), "factors\naverage G̃G̃ᵀ, G̃ᵀG̃": (30, 32, GREEN),
        "check, at some steps\nis the criterion ≤ τ ?": (30, 22, GREEN),
        "if not: new basis\nQ ← QV, rotate M̃, Λ̂, G̃": (30, 12, ORANGE),
    }  # fmt: skip
    width, height = 21, 6
    middle = {}
    for text, (x, y, colour) in boxes.items():
        style = "round,pad=0.2,rounding_size=1"
        box = FancyBboxPatch(
            (x, y), width, height, boxstyle=style, fc="white", ec=colour, linewidth=1.5
        )
        axes.add_patch(box)
        axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=9.5)
        middle[text.partition("\n")[0]] = (x + width / 2, y)
    down = [("gradient G", "rotate"), ("rotate", "average"), ("average", "divide")]
    down += [("divide", "rotate back,"), ("factors", "check, at some steps")]
    down += [("check, at some steps", "if not: new basis")]
    arrows = [
        ((middle[a][0], middle[a][1]), (middle[b][0], middle[b][1] + height)) for a, b in down
    ]
    arrows.append(((23.3, 35), (29.7, 35)))
    arrows.append(((29.7, 16), (23.3, 24)))
    for start, end in arrows:
        arrow = FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, color="#555555")
        axes.add_patch(arrow)
    save(figure, "step")


def main() -> None:
    torch.set_num_threads(1)
    run = Run()
    draw_eigenbasis(run)
    draw_criterion(run)
    draw_novelty(run)
    draw_step()
    save(plot_basis(run.optimizer.basis_report()), "bases")
    print(run.optimizer.basis_report())


if __name__ == "__main__":
    main()
