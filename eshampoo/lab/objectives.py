"""Losses and metrics of the workloads, and what a trivial predictor reaches in each metric."""

import math
from collections.abc import Iterable

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from eshampoo.lab.data import Batch, Dataset
from eshampoo.lab.data.pde import SPEED


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross entropy of images and labels, or of tokens and the next tokens."""
    inputs, targets = batch
    return functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def sampled_cross_entropy(model: nn.Module, batch: Batch, generator: Generator) -> Tensor:
    """Return √B times the mean cross entropy of B labels sampled from the model.

    The outer product of its gradient is on average the Fisher information of one example.
    """
    logits = model(batch[0]).flatten(0, -2)
    with torch.no_grad():
        labels = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)
    loss: Tensor = functional.cross_entropy(logits, labels) * math.sqrt(len(labels))
    return loss


def accuracy(model: nn.Module, batches: Iterable[Batch]) -> float:
    """Return the share of images whose label has the largest logit."""
    hits = [model(images).argmax(1) == labels for images, labels in batches]
    return float(torch.cat(hits).float().mean())


def majority_accuracy(dataset: Dataset) -> float:
    """Return the accuracy of always naming the most frequent class."""
    labels = torch.cat([labels for _, labels in dataset.validation()])
    return float(labels.bincount().max() / len(labels))


def validation_loss(model: nn.Module, batches: Iterable[Batch]) -> float:
    """Return the mean cross entropy per token."""
    losses = [(cross_entropy(model, batch).item(), batch[1].numel()) for batch in batches]
    return sum(loss * count for loss, count in losses) / sum(count for _, count in losses)


def unigram_loss(dataset: Dataset) -> float:
    """Return the cross entropy of predicting tokens by their frequency in the validation text."""
    tokens = torch.cat([targets.flatten() for _, targets in dataset.validation()])
    frequencies = tokens.bincount().double() / len(tokens)
    return float(torch.special.entr(frequencies).sum())


def reconstruction_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean absolute error of the normalised image."""
    return functional.l1_loss(model(batch[0]), batch[1])


def similarity(model: nn.Module, batches: Iterable[Batch]) -> float:
    """Return the mean structural similarity of the reconstructions."""
    values = [similarities(model(batch[0]), batch) for batch in batches]
    return float(torch.cat(values).mean())


def zero_filled_similarity(dataset: Dataset) -> float:
    """Return the structural similarity of the image from the measured columns alone."""
    values = [similarities(batch[0], batch) for batch in dataset.validation()]
    return float(torch.cat(values).mean())


def similarities(images: Tensor, batch: Batch) -> Tensor:
    """Return SSIM per slice with a uniform 7×7 window and the target's peak as range (fastMRI)."""
    _, target, mean, std, peak = batch
    mean, std, peak = (value.view(-1, 1, 1, 1) for value in (mean, std, peak))
    x, y = images * std + mean, target * std + mean
    means = [functional.avg_pool2d(part, 7, 1) for part in (x, y, x * x, y * y, x * y)]
    # the factor makes the covariances over the 49 pixels of a window unbiased
    scale = 49 / 48
    x_mean, y_mean = means[0], means[1]
    x_var, y_var = scale * (means[2] - x_mean**2), scale * (means[3] - y_mean**2)
    covariance = scale * (means[4] - x_mean * y_mean)
    c1, c2 = (0.01 * peak) ** 2, (0.03 * peak) ** 2
    upper = (2 * x_mean * y_mean + c1) * (2 * covariance + c2)
    lower = (x_mean**2 + y_mean**2 + c1) * (x_var + y_var + c2)
    return (upper / lower).mean((1, 2, 3))


def masked_binary_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the binary cross entropy averaged over the labels that are known."""
    *inputs, labels = batch
    known = labels.isfinite()
    return functional.binary_cross_entropy_with_logits(model(*inputs)[known], labels[known])


def mean_average_precision(model: nn.Module, batches: Iterable[Batch]) -> float:
    """Return the average precision, averaged over the tasks that have both labels."""
    scores, labels = [], []
    for *inputs, target in batches:
        scores.append(model(*inputs))
        labels.append(target)
    return average_precision(torch.cat(scores), torch.cat(labels))


def prevalence(dataset: Dataset) -> float:
    """Return what a constant score reaches: the share of positives, averaged over the tasks."""
    labels = torch.cat([batch[-1] for batch in dataset.validation()])
    known = labels.isfinite()
    shares = labels.nan_to_num().sum(0) / known.sum(0)
    return float(shares[(shares > 0) & (shares < 1)].mean())


def average_precision(scores: Tensor, labels: Tensor) -> float:
    """Return the mean over tasks of Σ over positives of precision at their rank / their number."""
    values = []
    for task in range(labels.shape[1]):
        known = labels[:, task].isfinite()
        truth = labels[known, task]
        if 0 < truth.sum() < len(truth):
            ranked = truth[scores[known, task].argsort(descending=True, stable=True)]
            precision = ranked.cumsum(0) / torch.arange(1, len(ranked) + 1, device=ranked.device)
            values.append(float((precision * ranked).sum() / ranked.sum()))
    return sum(values) / len(values) if values else float("nan")


def slopes(model: nn.Module, points: Tensor) -> tuple[Tensor, Tensor]:
    """Return ∂u/∂(point) at every point, and the points, so that it can be differentiated again.

    The value at a point does not depend on other points, so one derivative of the sum has them all.
    """
    points = points.detach().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(model(points).sum(), points, create_graph=True)
    return slope, points


def poisson_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean square of Δu + f in the interior plus that of u on the boundary."""
    inside, source, edge, value = batch
    slope, points = slopes(model, inside)
    curvature = [
        torch.autograd.grad(slope[:, i].sum(), points, create_graph=True)[0][:, i] for i in range(2)
    ]
    residual = curvature[0] + curvature[1] + source
    wrong: Tensor = model(edge).squeeze(1) - value
    return residual.square().mean() + wrong.square().mean()


def convection_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean squares of u_t + 40 u_x, of the difference at the two ends, of the start."""
    inside, left, right, start, value = batch
    slope, _ = slopes(model, inside)
    residual = slope[:, 1] + SPEED * slope[:, 0]
    parts = (residual, model(left) - model(right), model(start).squeeze(1) - value)
    return torch.stack([part.square().mean() for part in parts]).sum()


def relative_error(model: nn.Module, batches: Iterable[Batch]) -> float:
    """Return ‖u − solution‖ / ‖solution‖ over the points of all batches."""
    parts = [(model(points).squeeze(1) - solution, solution) for points, solution in batches]
    wrong, true = (torch.cat(column) for column in zip(*parts, strict=True))
    return float(wrong.norm() / true.norm())


def error_of_zero(dataset: Dataset) -> float:
    """Return the relative error of u = 0."""
    return 1.0
