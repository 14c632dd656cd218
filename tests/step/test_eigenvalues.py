"""KL-Shampoo: the scale of its start, what it adds to its eigenvalues, and that it trains."""

import pytest
import torch
from torch import nn
from training import parameters

from eshampoo import KLShampoo

SHAPES = [(6, 5), (4, 3, 2), (7,), (40, 3)]


def path(scale, dtype, sparse=False, **options):
    """The weights after every step, with gradients that are multiplied by `scale`."""
    generator = torch.Generator().manual_seed(0)
    params = parameters([torch.zeros(shape, dtype=dtype) for shape in SHAPES])
    settings = {"lr": 1.0, "eps": 0.0, "weight_decay": 0.0, "frequency": 3, "vectors": "full"}
    optimizer = KLShampoo(params, **settings, merge_dims=False, **options)
    for _ in range(12):
        for p in params:
            G = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            if sparse:  # most rows have seen nothing when their first gradient comes
                G = G * (torch.rand(len(p), generator=generator) < 0.2).view(
                    -1, *[1] * (p.dim() - 1)
                )
            p.grad = (scale * G).to(dtype)
        optimizer.step()
        yield torch.cat([p.detach().flatten() for p in params])


@pytest.mark.parametrize("beta2", [0.95, 1.0])
@pytest.mark.parametrize("sparse", [False, True])
def test_the_scale_of_the_gradients_does_not_matter(sparse, beta2):
    """Powers of two, so that only their roots round."""
    options = {"dtype": torch.float64, "sparse": sparse, "betas": (0.9, beta2)}
    for scale in (2.0**-40, 2.0**40):
        for one, other in zip(path(1.0, **options), path(scale, **options), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scale", [1e-12, 1e-4, 1.0, 1e4, 1e12])
@pytest.mark.parametrize("sparse", [False, True])
def test_every_step_is_about_as_long_as_adams(sparse, scale):
    before = 0.0
    for W in path(scale, torch.float32, sparse):
        assert (W - before).square().mean().sqrt() <= 2
        before = W


@pytest.mark.parametrize("zeros", [0, 1, 9])
def test_the_first_gradient_moves_a_matrix_as_far_as_adam_does(zeros):
    """After t − 1 zeros D is G²/t, so that Adam's step is √t."""
    (W,) = parameters([torch.zeros(8, 8, dtype=torch.float64)])
    options = {"betas": (0.0, 1 - 1e-9), "eps": 0.0, "frequency": 1000, "merge_dims": False}
    optimizer = KLShampoo([W], lr=1.0, **options)
    G = torch.randn(8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for gradient in [torch.zeros_like(G)] * zeros + [1e-5 * G]:
        W.grad = gradient
        optimizer.step()
    assert W.detach().square().mean().sqrt().item() == pytest.approx((1 + zeros) ** 0.5, rel=0.2)


def test_rare_rows_do_not_stall_the_others():
    """A new row is large beside its eigenvalue; with a share of 1e-7 the others moved by 0.001."""
    generator = torch.Generator().manual_seed(0)
    (W,) = parameters([torch.zeros(64, 16, dtype=torch.float64)])
    options = {"betas": (0.9, 0.95), "eps": 0.0, "weight_decay": 0.0, "frequency": 5}
    optimizer = KLShampoo([W], lr=1.0, **options, merge_dims=False)
    for _ in range(60):
        present = torch.rand(64, 1, generator=generator) < 0.03
        present[:8] = True
        W.grad = torch.randn(64, 16, generator=generator, dtype=torch.float64) * present
        before = W.detach().clone()
        optimizer.step()
        assert (W.detach() - before)[:8].square().mean().sqrt() > 0.08


def test_it_trains_where_rounding_and_unseen_directions_would_fill_the_factors():
    """A small net on tokens, some of them rare, with the ε of the paper."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    tokens = (torch.rand(512, 4, generator=generator) ** 3 * 64).long()
    labels = tokens.sum(1) % 8
    model = nn.Sequential(nn.Embedding(64, 32), nn.Flatten(), nn.Linear(128, 64), nn.ReLU())
    model.append(nn.Linear(64, 8))
    options = {"lr": 1e-2, "eps": 1e-10, "frequency": 5, "merge_dims": False}
    optimizer = KLShampoo(model.parameters(), **options)
    losses = []
    for _ in range(80):
        batch = torch.randint(512, (32,), generator=generator)
        loss = nn.functional.cross_entropy(model(tokens[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert max(losses) < 4
    assert sum(losses[-10:]) / 10 < 0.8
