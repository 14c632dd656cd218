"""Gradients that are zero, of low rank, constant, tiny, huge or denormal: finite, bounded steps.

The bound is Adam's own. Its two averages m = Σ aₖ gₖ and v = Σ bₖ gₖ² have fixed weights, so by
Cauchy–Schwarz |m| ≤ √(Σ aₖ²/bₖ) √v whatever the gradients are; with the bias corrections this is
`most(t)` below: 1 at the first step, 7.3 at last for β = (0.9, 0.999).
"""

import math
from types import SimpleNamespace

import oracles
import pytest
import torch
from keyword_table import METHODS, PAPER, keywords_of
from training import assert_close, parameters, run

from eshampoo import EShampoo
from eshampoo.math import linalg
from eshampoo.options import Options
from eshampoo.state.state import RotatedState
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
    options = {} if method == "FullMatrixAdam" else {"merge_dims": False}
    for t, _, rotated in steps(method, kind, frequency=frequency, tau=0.0, **options):
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


FIXED_SIZE = {
    "EShampoo": {},
    "FullMatrixAdam": {},
    "SOAP": {"rms": 0.4},
    "KLShampoo": {"rms": 0.4, "frequency": 1},
    "CASPR": {"rms": 0.4, "frequency": 1},
    "Shampoo": {"rms": 0.4, "frequency": 1, "graft": None},
}


@pytest.mark.parametrize("method", FIXED_SIZE)
def test_an_update_of_fixed_size_fades_when_gradients_stop(method):
    """‖U‖ falls by a tenth a step: from 10 to 1e-4 in 110 steps of 0.4 lr, then steps shrink too.

    Always scaled up, U would move W by 0.4 lr until M̃ underflows, 800 steps later."""
    (W,) = parameters([torch.zeros(SHAPE)])
    options = {"betas": BETAS, "weight_decay": 0.0, **FIXED_SIZE[method]}
    optimizer = METHODS[method]([W], lr=1.0, **options)
    way, last = 0.0, math.inf
    for G in gradients("random")[:20] + [torch.zeros(SHAPE)] * 300:
        before = W.detach().clone()
        W.grad = G.clone()
        optimizer.step()
        last = float((W.detach() - before).norm()) / math.sqrt(W.numel())
        way += last
    assert way <= 0.4 * (20 + 110 + 10) + 1
    assert last <= 1e-6


@pytest.mark.parametrize("options", [{"exponent": 0.25}, {"statistics": "observe"}])
def test_updates_whose_length_depends_on_the_scale_are_always_brought_to_their_size(options):
    """With p = 1/4, gradients of 1e-18 make updates of 1e-9, which have not faded."""
    (W,) = parameters([torch.zeros(SHAPE, dtype=torch.float64)])
    optimizer = EShampoo([W], lr=1.0, weight_decay=0.0, **options)
    for G in gradients("random"):
        if "statistics" in options:
            W.grad = G.double()
            optimizer.observe()
        before = W.detach().clone()
        W.grad = G.double() * 1e-18
        optimizer.step()
        size = float((W.detach() - before).norm()) / math.sqrt(W.numel())
    assert size == pytest.approx(0.4)


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


@pytest.mark.parametrize("method", ["EShampoo", "SOAP"])
def test_rounding_in_directions_without_signal_does_not_grow_to_a_step(method):
    """In the basis of its only gradients a matrix of rank 2 has four entries; what float32 shows in
    the other 60 is rounding, which √D would bring to full size. Where float64, with ε far above
    its own rounding, stands still, float32 moves by a small part of a learning rate."""
    ends = {}
    for dtype in (torch.float64, torch.float32):
        generator = torch.Generator().manual_seed(0)
        left, right = (torch.randn(8, 2, generator=generator, dtype=torch.float64) for _ in "lr")
        (W,) = parameters([torch.zeros(8, 8, dtype=dtype)])
        optimizer = METHODS[method](
            [W], lr=1.0, weight_decay=0.0, frequency=1, tau=0.0, eps=1e-12, merge_dims=False
        )
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


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("beta3", [0.5, 0.81, 0.999, 1.0])
def test_the_bound_of_an_entry_is_the_sum_of_its_weights(beta3, nesterov):
    t = torch.tensor([1.0, 2.0, 7.0, 40.0], dtype=torch.float64)
    o = Options(betas=(0.9, 0.99), nesterov=nesterov)
    biases = phases.bias(0.9, t + nesterov), phases.bias(beta3, t)
    found = phases.adam_bound(t, o, beta3, *biases).tolist()
    assert found == pytest.approx([oracles.bound(o, int(at), beta3) for at in t.tolist()])


def floor(age, **options):
    """The least √D of two 3×4 blocks with √E‖G‖² = 5, the second without a basis; before 1 − β^t.

    The factors of the first have a negative entry, which is rounding."""
    o = Options(**options)
    state = RotatedState.zeros(["exp_avg_sq"], 0, 2, (3, 4), (3, 4), (0, 1), torch.zeros(0), False)
    weight = age if o.betas[1] == 1 else 1 - o.betas[1] ** age
    state.factors[0].copy_(weight * torch.diag(torch.tensor([20.0, 4.0, -1.0])))
    state.has_basis[0] = 1.0
    c = SimpleNamespace(age=torch.full((2, 1), float(age)))
    return phases.floor(state, c, o, o.beta_scale)


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 1.0)])
@pytest.mark.parametrize("beta3", [None, 0.5, 0.999, 1.0])
def test_the_least_root_of_d_is_64_ulps_of_all_gradients_or_a_thousandth_of_the_rms(beta3, betas):
    """√D itself has the weight 1 − β3^t of what it averages, or t in a sum, not 1 − β2^t."""
    age, beta = 7, betas[1] if beta3 is None else beta3
    weight = math.sqrt(age if beta == 1 else 1 - beta**age)
    shares = {None: 64 * torch.finfo(torch.float32).eps, 0.4: 1e-3 / math.sqrt(3 * 4)}
    for rms, share in shares.items():
        least = floor(age, rms=rms, betas=betas, beta3=beta3)
        assert least.flatten().tolist() == pytest.approx([share * 5 * weight, 0.0], rel=1e-5)


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
