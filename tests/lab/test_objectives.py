"""Metrics against independent computations."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score
from torch import nn

from eshampoo.lab import objectives
from eshampoo.lab.data import pde


def test_average_precision_agrees_with_scikit_learn():
    rng = np.random.default_rng(0)
    scores, labels = rng.normal(size=(50, 4)), rng.integers(0, 2, (50, 4)).astype(float)
    labels[rng.random((50, 4)) < 0.3] = np.nan
    labels[:, 3] = 0  # a task without positives does not count
    expected = [
        average_precision_score(labels[known, task], scores[known, task])
        for task in range(3)
        for known in [np.isfinite(labels[:, task])]
    ]
    found = objectives.average_precision(torch.tensor(scores), torch.tensor(labels))
    assert found == pytest.approx(np.mean(expected))


def test_similarity_is_one_for_the_target_and_follows_the_definition():
    target, image = torch.rand(2, 1, 2, 20, 20).unbind(0)
    batch = (image[:, :1], target[:, :1], torch.zeros(1), torch.ones(1), torch.tensor([0.9]))
    assert objectives.similarities(batch[1], batch).item() == pytest.approx(1)
    x, y = image[0, 0].double().numpy(), target[0, 0].double().numpy()
    values = []
    for i in range(14):
        for j in range(14):
            a, b = x[i : i + 7, j : j + 7], y[i : i + 7, j : j + 7]
            covariance = np.cov(a.ravel(), b.ravel())
            c1, c2 = (0.01 * 0.9) ** 2, (0.03 * 0.9) ** 2
            values.append(
                (2 * a.mean() * b.mean() + c1)
                * (2 * covariance[0, 1] + c2)
                / (a.mean() ** 2 + b.mean() ** 2 + c1)
                / (covariance[0, 0] + covariance[1, 1] + c2)
            )
    found = objectives.similarities(batch[0], batch).item()
    assert found == pytest.approx(np.mean(values), abs=1e-5)


def test_unknown_labels_do_not_count():
    labels = torch.tensor([[1.0, float("nan")], [0.0, 1.0]])
    logits = torch.tensor([[0.3, 5.0], [-1.0, 2.0]], requires_grad=True)
    loss = objectives.masked_binary_loss(lambda: logits, (labels,))
    known = torch.tensor([0.3, 1.0, 2.0]).sigmoid().log().mean()
    assert loss.item() == pytest.approx(-known.item())
    loss.backward()
    assert logits.grad[0, 1] == 0


class Known(nn.Module):
    """A formula in place of a network."""

    def __init__(self, formula):
        super().__init__()
        self.formula = formula

    def forward(self, points):
        return self.formula(points[:, 0], points[:, 1])[:, None]


def sines(x, y):
    return torch.sin(math.pi * x) * torch.sin(math.pi * y)


def wave(x, t):
    return torch.sin(x - 40 * t)


POISSON = (
    pde.load_poisson(None, interior=300, boundary=40, test=200), objectives.poisson_loss, sines
)  # fmt: skip
CONVECTION = (
    pde.load_convection(None, interior=300, boundary=20, initial=20, test=200),
    objectives.convection_loss,
    wave,
)


@pytest.mark.parametrize(("data", "loss", "solution"), [POISSON, CONVECTION])
def test_the_solution_of_an_equation_has_no_loss_and_no_error(data, loss, solution):
    batch = data.batch(torch.tensor([0]), torch.Generator())
    assert loss(Known(solution), batch).item() < 1e-20
    assert objectives.relative_error(Known(solution), data.validation()) < 1e-14
    half = Known(lambda *at: 0.5 * solution(*at))
    assert objectives.relative_error(half, data.validation()) == pytest.approx(0.5)
    assert loss(half, batch).item() > 1e-2


def test_the_losses_of_other_functions_are_those_of_the_formulas():
    """u = x²: Δu = 2; u_t + 40 u_x = 80x; the ends differ by 4π², the start by x² − sin x."""
    square = Known(lambda x, _: x**2)
    _, source, edge, _ = POISSON[0].train
    expected = (2 + source).square().mean() + edge[:, 0].pow(4).mean()
    assert objectives.poisson_loss(square, POISSON[0].train).item() == pytest.approx(
        expected.item()
    )
    inside, _, _, start, value = CONVECTION[0].train
    expected = (80 * inside[:, 0]).square().mean() + (2 * math.pi) ** 4
    expected += (start[:, 0] ** 2 - value).square().mean()
    found = objectives.convection_loss(square, CONVECTION[0].train)
    assert found.item() == pytest.approx(expected.item())
