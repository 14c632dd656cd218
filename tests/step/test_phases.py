"""Gradients that are zero, of low rank, constant, tiny, huge or denormal: finite, bounded steps.

The bound is Adam's own. Its two averages m = Σ aₖ gₖ and v = Σ bₖ gₖ² have fixed weights, so by
Cauchy–Schwarz |m| ≤ √(Σ aₖ²/bₖ) √v whatever the gradients are; with the bias corrections this is
`most(t)` below: 1 at the first step, 7.3 at last for β = (0.9, 0.999).
"""

import math

import pytest
import torch
from keyword_table import METHODS, PAPER, keywords_of
from training import assert_close, parameters, run

from eshampoo import EShampoo
from eshampoo.math import linalg
from eshampoo.options import Options
from eshampoo.step import phases

STEPS = 40
SHAPE = (6, 5)
BETAS = (0.9, 0.999)


def most(t):
    """The largest |m̂|/√v̂ that Adam can reach at step t."""
    beta1, beta2 = BETAS
    total = sum((beta1**2 / beta2) ** k for k in range(t))
    corrections = math.sqrt(1 - beta2**t) / (1 - beta1**t)
    return corrections * (1 - beta1) / math.sqrt(1 - beta2) * math.sqrt(total)


def gradients(kind):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    one, u, v = draw(*SHAPE), draw(SHAPE[0], 1), draw(1, SHAPE[1])
    many = [draw(*SHAPE) for _ in range(STEPS)]
    zero = torch.zeros(SHAPE)
    return {
        "zero from the start": [zero] * STEPS,
        "rank 1 for ever": [u * v * draw(1) for _ in range(STEPS)],
        "constant": [one] * STEPS,
        "constant, then zero": [one] * 10 + [zero] * (STEPS - 10),
        "1e-30": [1e-30 * G for G in many],
        "1e+30": [1e30 * G for G in many],
        "denormal": [1e-40 * G for G in many],
        "1e-30 in places": [torch.where(G > 0, G, 1e-30) for G in many],
        "varying rank 1": [draw(SHAPE[0], 1) * draw(1, SHAPE[1]) for _ in range(STEPS)],
        "1e+10": [1e10 * G for G in many],
        "1e-5": [1e-5 * G for G in many],
        "random": many,
    }[kind]


NAMED = [
    "zero from the start", "rank 1 for ever", "constant", "constant, then zero", "1e-30", "1e+30",
    "denormal",
]  # fmt: skip


def steps(method, kind, **options):
    """(t, update / lr, in the eigenbasis if there is one) of every step of a 6×5 matrix."""
    (W,) = parameters([torch.zeros(SHAPE)])
    optimizer = METHODS[method]([W], lr=1.0, betas=BETAS, weight_decay=0.0, **options)
    for t, G in enumerate(gradients(kind), start=1):
        before = W.detach().clone()
        W.grad = G.clone()
        optimizer.step()
        state = optimizer.state[W]
        assert all(bool(value.isfinite().all()) for value in state.values()), t
        U = (W.detach() - before).view(state["exp_avg"].shape)
        bases = {k: state[f"basis_{k}"] for k in range(U.dim() - 1)}
        yield t, U, linalg.rotate_(U.clone(), bases, {i: Q.mT for i, Q in bases.items()})


overflowing = pytest.mark.filterwarnings("ignore:.*had NaN or Inf")  # 1e+30: the squares overflow


@overflowing
@pytest.mark.parametrize("frequency", [1, 3])
@pytest.mark.parametrize("kind", NAMED)
@pytest.mark.parametrize("method", ["EShampoo", "SOAP", "FullMatrixAdam"])
def test_no_coordinate_of_the_eigenbasis_moves_further_than_ten_rates(method, kind, frequency):
    """Adam's bound is 1 to 1.5 in these 40 steps. A new basis hands the D of one direction to
    another (Algorithm 2), and then up to 5 times as much was seen."""
    for t, _, rotated in steps(method, kind, frequency=frequency, tau=0.0, rms=None):
        assert rotated.abs().max() <= 10, t


EVERY = [*NAMED, "1e-30 in places", "varying rank 1", "1e+10", "1e-5", "random"]


@overflowing
@pytest.mark.parametrize("frequency", [1, 3])
@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("method", ["Shampoo", "KLShampoo"])
def test_no_update_is_longer_than_adams(method, kind, frequency):
    """Shampoo has the length of its graft, so Adam's bound holds for the root mean square. That of
    KL-Shampoo has no bound, but its factors are means of whitened squares: 2.7 rates were seen."""
    for t, U, _ in steps(method, kind, frequency=frequency, tau=0.0, merge_dims=False):
        rms = U.norm() / math.sqrt(U.numel())
        assert rms <= (1.01 * most(t) if method == "Shampoo" else 4), t


@overflowing
@pytest.mark.parametrize("kind", EVERY)
def test_with_the_basis_aware_correction_adams_bound_holds_from_the_first_basis_on(kind):
    options = {"frequency": 1, "tau": 0.0, **PAPER, "correction": "basis_aware"}
    for t, _, rotated in steps("EShampoo", kind, **options):
        assert rotated.abs().max() <= 2 * most(t), t


@pytest.mark.parametrize("method", METHODS)
def test_after_zero_gradients_the_first_real_one_is_an_ordinary_step(method):
    (W,) = parameters([torch.zeros(SHAPE)])
    optimizer = METHODS[method]([W], lr=1.0, betas=BETAS, weight_decay=0.0, frequency=4)
    for G in [torch.zeros(SHAPE)] * 9 + gradients("random"):
        before = W.detach().clone()
        W.grad = G.clone()
        optimizer.step()
        assert W.isfinite().all()
        assert (W.detach() - before).abs().max() <= 10


def test_a_single_huge_gradient_brings_no_huge_step():
    (W,) = parameters([torch.zeros(SHAPE)])
    optimizer = EShampoo([W], lr=1.0, weight_decay=0.0, frequency=2, merge_dims=False)
    for t, G in enumerate(gradients("random")):
        before = W.detach().clone()
        W.grad = G * (1e6 if t == 5 else 1)
        optimizer.step()
        assert all(bool(value.isfinite().all()) for value in optimizer.state[W].values())
        assert (W.detach() - before).abs().max() <= 10


@pytest.mark.parametrize("kind", ["varying rank 1", "random"])
def test_factors_of_kl_shampoo_stand_still_where_the_whitened_gradient_overflows(kind):
    (W,) = parameters([torch.zeros(SHAPE)])
    optimizer = METHODS["KLShampoo"]([W], weight_decay=0.0, frequency=2, merge_dims=False)
    for G in gradients(kind):
        W.grad = 1e17 * G
        optimizer.step()
        assert all(bool(value.isfinite().all()) for value in optimizer.state[W].values())
        assert W.isfinite().all()


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("EShampoo", {}),
        ("EShampoo", {"betas": (0.9, 1.0)}),
        ("EShampoo", {"beta3": 0.5}),
        ("EShampoo", {"factors": "kl"}),
        ("SOAP", {}),
    ],
)
def test_rounding_in_directions_without_signal_does_not_grow_to_a_step(method, options):
    """In the basis of its only gradients a matrix of rank 2 has four entries; what float32 shows in
    the other 60 is rounding, which √D would bring to full size. Where float64, with ε far above
    its own rounding, stands still, float32 moves by a small part of a learning rate."""
    ends = {}
    for dtype in (torch.float64, torch.float32):
        generator = torch.Generator().manual_seed(0)
        left, right = (torch.randn(8, 2, generator=generator, dtype=torch.float64) for _ in "lr")
        (W,) = parameters([torch.zeros(8, 8, dtype=dtype)])
        common = {"weight_decay": 0.0, "frequency": 1, "tau": 0.0, "eps": 1e-12, "rms": None}
        optimizer = METHODS[method]([W], lr=1.0, **common, **options)
        moved = []
        for _ in range(6):
            before = W.detach().clone()
            inner = torch.randn(2, 2, generator=generator, dtype=torch.float64)
            W.grad = (left @ inner @ right.T).to(dtype)
            optimizer.step()
            moved.append((W.detach() - before).double())
        outside = [torch.linalg.qr(X, mode="complete").Q[:, 2:] for X in (left, right)]
        ends[dtype] = max((outside[0].T @ U @ outside[1]).abs().max().item() for U in moved)
    assert ends[torch.float64] < 1e-3
    assert ends[torch.float32] < 0.2


# The numbers of a step --------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.9, 0.999, 1 - 1e-6, 1 - 1e-9])
def test_a_bias_has_all_digits_of_float32_also_for_beta_near_1(beta):
    """1 − β^t, where 1.0 − beta**t in float32 has none left: β is 1 there."""
    t = torch.tensor([1.0, 2.0, 10.0, 1000.0, 1e6])
    expected = -torch.expm1(t.double() * math.log(beta))
    torch.testing.assert_close(phases.bias(beta, t).double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_eigenvalues_of_shampoo_are_scaled_by_the_trace_and_shifted_to_be_at_least_0(k):
    """With S⁻¹ = 1/Tr^{k−1} shared out among k factors; a shift moves all eigenvalues alike."""
    age = torch.full((2, 1), 3.0, dtype=torch.float64)
    values = torch.tensor([[-0.25, 1.0, 7.25], [0.5, 3.5, 4.0]], dtype=torch.float64)
    shifted = values - torch.tensor([[-0.25], [0.0]])
    for trace_scaling, scale in ((False, 1.0), (True, 8.0 ** (-(k - 1) / k))):
        o = Options(betas=(0.9, 0.99), eps=1e-3, trace_scaling=trace_scaling)
        found = phases.spectrum(values * (1 - 0.99**3), age, k, o, 0.0)
        assert_close(found, shifted * scale + 1e-3, 1e-12)


# Averages -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.9, 1.0])
@pytest.mark.parametrize(("d", "r"), [(384, 256), (517, 300), (512, 40), (40, 512)])
def test_a_factor_averages_the_whole_gram_matrix_whether_in_strips_or_not(d, r, beta):
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(3, d, r, generator=generator, dtype=torch.float64)
    before = torch.randn(3, d, d, generator=generator, dtype=torch.float64)
    before = before + before.mT
    live = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    factor = before.clone()
    linalg.average_gram_(factor, X, 0, beta, phases.share(beta, live.view(-1, 1, 1)))
    expected = beta * before + (1 - beta if beta < 1 else 1.0) * (X @ X.mT)
    assert_close(factor[[0, 2]], expected[[0, 2]], 1e-11)
    assert torch.equal(factor[1], before[1])


@pytest.mark.parametrize("size", [1e-15, 1e-16, 1e-17, 1e-18])
@pytest.mark.parametrize("eps", [1e-16, 1e-20, 0.0])
@pytest.mark.parametrize("method", ["EShampoo", "SOAP", "FullMatrixAdam", "CASPR"])
def test_a_moment_that_vanishes_takes_its_momentum_along(method, eps, size):
    """Gradients whose squares are nearly denormal: no step is longer than Adam's bound allows."""
    torch.manual_seed(0)
    (p,) = parameters([torch.zeros(6, 5)])
    options = {"frequency": 200, "eps": eps, "lr": 1.0, "weight_decay": 0.0}
    options |= {name: None for name in ("rms", "graft") if name in keywords_of(method)}
    optimizer, furthest = METHODS[method]([p], **options), 0.0
    for _ in range(140):
        before = p.detach().clone()
        run(optimizer, [p], [[torch.randn(6, 5) * size]])
        furthest = max(furthest, (p.detach() - before).abs().max().item())
    assert furthest < 10, furthest
