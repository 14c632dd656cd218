"""Every method against its oracle: shapes, orders, blockings, options."""

import oracles
import pytest
import torch
from beside_oracles import Pair, compare, full_rank_after
from keyword_table import FIRST_IS_FAST, METHODS, PAPER, choices, keywords_of, thinned
from training import (
    BALANCED,
    FULL_RANK,
    LAYOUTS,
    SHAPES,
    assert_close,
    feed,
    parameters,
    problem,
    run,
)

from eshampoo import EShampoo, FullMatrixAdam, KLShampoo, Shampoo, schedules
from eshampoo.step.phases import DAMPING

TWO_CHECKS = 2 * FULL_RANK + 2


# Shapes and blockings -----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", ["EShampoo", "Shampoo", "KLShampoo", "CASPR"])
def test_every_order_and_every_blocking_follows_the_oracle(method, layout):
    options = {"tau": 0.0, "vectors": "full", **LAYOUTS[layout]}
    tensors, _ = problem(SHAPES, 0)
    frequency = full_rank_after(getattr(oracles, method)(tensors, **options))
    compare(method, SHAPES, 2 * frequency + 2, frequency=frequency, **options)


@pytest.mark.parametrize("layout", ["not merged", "oversize identity", "ragged blocks"])
def test_soap_follows_the_oracle_for_every_order_and_blocking(layout):
    shapes = BALANCED if layout != "oversize identity" else [*BALANCED, (3, 9), (9, 3), (2, 9, 2)]
    compare("SOAP", shapes, 25, frequency=4, **LAYOUTS[layout])


def test_full_matrix_adam_follows_the_oracle_for_every_order():
    compare("FullMatrixAdam", SHAPES, TWO_CHECKS, tau=0.0, frequency=FULL_RANK, vectors="full")


@pytest.mark.parametrize("method", FIRST_IS_FAST)
def test_a_missing_gradient_leaves_its_parameter_and_its_clock_alone(method):
    shapes = BALANCED if method == "SOAP" else SHAPES
    layout = {} if method == "FullMatrixAdam" else LAYOUTS["not merged"]
    missing = {(1, 0), (2, 4), (3, 4), (7, 2), (8, 3), (9, 3), (10, 3), (20, 5), (27, 4), (30, 5)}
    missing |= {(t, 6) for t in range(1, 20)}
    options = {"tau": 0.0, "frequency": 7 if layout else FULL_RANK, **layout}
    compare(method, shapes, 2 * FULL_RANK + 4, missing=missing, **options)


# Options ------------------------------------------------------------------------------------------

ESHAMPOO_OPTIONS = {
    "no decay": {"weight_decay": 0.0},
    "no momentum": {"betas": (0.0, 0.95)},
    "no memory": {"betas": (0.9, 0.0), "vectors": "adam", "eps": 0.1},
    "a large eps": {"eps": 0.3},
    "no eps": {"eps": 0.0},
    "the adagrad sum": {"betas": (0.9, 1.0)},
    "the adagrad sum of the factors alone": {"betas": (0.9, 1.0), "beta3": 0.9},
    "beta3": {"beta3": 0.8},
    "a sum in D alone": {"beta3": 1.0},
    "nesterov": {"nesterov": True},
    "nesterov without momentum": {"nesterov": True, "betas": (0.0, 0.9)},
    "maximize": {"maximize": True},
    "basis aware": {"correction": "basis_aware"},
    "basis aware power": {"correction": "basis_aware", "solver": "power"},
    "basis aware qr": {"correction": "basis_aware", "solver": "qr", "tau": 0.1},
    "basis aware partial": {"correction": "basis_aware", "solver": "partial", "tau": 0.1},
    "optimal": {"correction": "optimal"},
    "optimal with the sum": {"correction": "optimal", "betas": (0.9, 1.0)},
    "optimal partial": {"correction": "optimal", "solver": "partial", "tau": 0.1},
    "optimal with beta3 of plain Adam": {"correction": "optimal", "beta3": 0.8},
    "qr": {"solver": "qr", "tau": 0.1},
    "few qr iterations": {"solver": "qr", "tau": 0.01, "qr_iterations": 2},
    "power": {"solver": "power"},
    "partial": {"solver": "partial", "tau": 0.2},
    "partial at tau 0": {"solver": "partial", "tau": 0.0},
    "a fixed size": {"rms": 0.4},
    "a fixed size of blocks": {"rms": 0.3, "max_dim": 3},
    "the size of the signal": {"rms": "auto"},
    "the size of the signal of blocks, ahead": {"rms": "auto", "max_dim": 3, "nesterov": True},
    "the size of the signal without momentum": {"rms": "auto", "betas": (0.0, 0.95)},
    "KL factors": {"factors": "kl"},
    "KL factors of a sum": {"factors": "kl", "betas": (0.9, 1.0), "beta3": 0.9},
    "KL factors of blocks": {"factors": "kl", "max_dim": 3, "rms": "auto"},
    "kernels joined to inputs": {"merge_dims": "kernel"},
    "kernels joined to some inputs": {"merge_dims": "kernel", "max_dim": 5},
    "tau in the middle": {"tau": 0.3},
    "a schedule of tau": {"tau": schedules.piecewise((30,), (0.0, 1.0))},
    "a line of tau": {"tau": schedules.linear(0.0, 0.5, 40)},
    "matrices under Adam": {"matrices": "adam", "vectors": "full"},
    "the left side": {"sides": "left", "vectors": "adam"},
    "the right side": {"sides": "right", "vectors": "adam"},
    "the smaller side": {"sides": "smaller", "vectors": "adam"},
    "the right side in blocks": {"sides": "right", "vectors": "adam", "max_dim": 2},
    "the right side, small enough": {
        "sides": "right",
        "vectors": "adam",
        "oversize": "identity",
        "max_dim": 3,
    },
    "one number per row": {"moment": "row", "vectors": "adam"},
    "one number per row of a block": {"moment": "row", "vectors": "adam", "max_dim": 3},
    "one number per block": {"moment": "block", "max_dim": 3},
    "one number per row, basis aware": {
        "moment": "row",
        "vectors": "adam",
        "correction": "basis_aware",
    },
    "one number per row, sorted": {"moment": "row", "vectors": "adam", "solver": "power"},
    "a small exponent": {"exponent": 0.2},
    "a large exponent": {"exponent": 1.0, "eps": 1e-4},
}


def keywords_and_words(options):
    return {(key, value if isinstance(value, str) else None) for key, value in options.items()}


@pytest.mark.parametrize(
    "options",
    thinned({name: (row,) for name, row in ESHAMPOO_OPTIONS.items()}, keywords_and_words),
)
def test_every_option_of_eshampoo_follows_the_oracle(options):
    shapes = [(6,), (), (5, 4), (3, 2, 3), (12,), (4, 3, 2, 2)]
    base = {"tau": 0.0, "frequency": 13, "rms": None, "vectors": "full"}
    compare("EShampoo", shapes, 30, tolerance=1e-9, **{**base, **options})


@pytest.mark.parametrize("solver", choices("solver"))
def test_large_factors_follow_the_oracle_with_every_solver(solver):
    options = {"tau": 0.15, "frequency": 4, "solver": solver}
    pair = compare("EShampoo", [(30, 21), (21, 30)], 16, tolerance=1e-9, **options, max_dim=64)
    assert pair.optimizer.basis_computations > 8


SHARED_OPTIONS = [
    "no decay",
    "a large eps",
    "the adagrad sum",
    "nesterov",
    "maximize",
    "qr",
    "power",
    "a small exponent",
    "a large exponent",
    "KL factors",
]
ONE_SIDED = ["the left side", "the right side", "the smaller side"]
MEANS = ["one number per row", "one number per block"]


@pytest.mark.parametrize(
    ("method", "name"),
    thinned(
        {
            f"{method}-{name}": (method, name)
            for method in ("Shampoo", "KLShampoo", "CASPR", "SOAP", "FullMatrixAdam")
            for name in [
                *SHARED_OPTIONS,
                *ONE_SIDED,
                *MEANS,
                "partial",
                "tau in the middle",
            ]
            if keywords_of(method).keys() >= ESHAMPOO_OPTIONS[name].keys()
        },
        lambda method, name: {method, name},
    ),
)
def test_the_common_options_follow_the_oracle_in_every_method(method, name):
    base = {"tau": 0.0, "frequency": 13, "vectors": "full"}
    shapes = [(6,), (), (5, 4), (12,), (3, 2, 3)]
    if method == "FullMatrixAdam":
        shapes = [(6,), (), (3, 4), (2, 3, 2)]
    elif method == "SOAP":
        base["vectors"] = "adam"
        shapes = BALANCED
    if method != "FullMatrixAdam":
        base["merge_dims"] = False
    compare(method, shapes, 30, tolerance=1e-9, **{**base, **ESHAMPOO_OPTIONS[name]})


@pytest.mark.parametrize("method", METHODS)
def test_updates_with_the_size_of_their_signal_follow_the_oracle(method):
    shapes = {"SOAP": BALANCED, "FullMatrixAdam": [(6,), (), (3, 4)]}.get(method, [(6,), (5, 4)])
    options = {"graft": None} if method == "Shampoo" else {}
    options |= {"rms": "auto", "tau": 0.0, "frequency": 13}
    compare(method, shapes, 30, tolerance=1e-9, missing={(20, 0), (21, 1)}, **options)


def test_float32_stays_near_the_oracle():
    tensors, grads = problem([(8, 6), (5, 7)], 60, condition=3.0)
    pair = Pair("EShampoo", tensors, torch.float32, tau=0.1, frequency=5, lr=1e-2, merge_dims=False)
    for step in grads:
        pair.step([G.float() for G in step])
    assert 0 < pair.distance() < 5e-5


# Reductions ---------------------------------------------------------------------------------------

ADAMW_CASES = {
    "defaults": {},
    "decay": {"weight_decay": 0.3},
    "maximize": {"maximize": True, "weight_decay": 0.1},
    "betas": {"betas": (0.5, 0.8), "eps": 1e-3},
}


def gap_to_adamw(optimizer_class, shapes, steps, dtype, options, **more):
    tensors, grads = problem(shapes, steps)
    options = {"betas": (0.9, 0.999), **options}
    ours, theirs = parameters(tensors, dtype), parameters(tensors, dtype)
    run(optimizer_class(ours, **options, **more), ours, grads)
    run(torch.optim.AdamW(theirs, **options), theirs, grads)
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("options", ADAMW_CASES.values(), ids=ADAMW_CASES)
def test_eshampoo_before_the_first_basis_is_adamw(options, dtype):
    gap = gap_to_adamw(EShampoo, SHAPES, 30, dtype, {"lr": 1e-2, **options}, frequency=31)
    assert gap < (1e-14 if dtype == torch.float64 else 5e-6)


def test_eshampoo_leaves_adamw_with_the_first_basis():
    options = {"lr": 1e-2}
    one, two = (
        gap_to_adamw(EShampoo, [(5, 4)], t, torch.float64, options, frequency=30, tau=0.0)
        for t in (29, 30)
    )
    assert one < 1e-14
    assert two > 1e-5


@pytest.mark.parametrize("options", ADAMW_CASES.values(), ids=ADAMW_CASES)
@pytest.mark.parametrize("method", ["EShampoo", "Shampoo", "KLShampoo"])
def test_with_vectors_and_matrices_under_adam_every_method_is_adamw_for_ever(method, options):
    kinds = {"vectors": "adam", "matrices": "adam", "frequency": 1, "tau": 0.0}
    gap = gap_to_adamw(METHODS[method], SHAPES, 60, torch.float64, {"lr": 1e-2, **options}, **kinds)
    assert gap < 1e-13


def orthogonal_design(shape, generator):
    """Rank-one gradients whose outer products add up to a Kronecker product A."""
    directions = []
    for d in shape:
        Q = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64)).Q
        directions.append(Q * (0.5 + torch.rand(d, generator=generator, dtype=torch.float64)))
    grads = []
    for index in torch.cartesian_prod(*[torch.arange(d) for d in shape]).view(-1, len(shape)):
        G = torch.ones((), dtype=torch.float64)
        for Q, i in zip(directions, index.tolist(), strict=True):
            G = torch.tensordot(G, Q[:, i], dims=0)
        grads.append(G)
    return grads


def dense_power(A, p):
    λ, Q = torch.linalg.eigh(A)
    return Q @ torch.diag(λ**p) @ Q.T


@pytest.mark.parametrize("beta2", [1.0, 0.9])
@pytest.mark.parametrize("shape", [(5,), (3, 4), (4, 2), (2, 3, 2)])
def test_on_a_kronecker_structured_matrix_trace_scaled_shampoo2_is_full_matrix_adam(
    shape, beta2, generator
):
    grads = orthogonal_design(shape, generator)
    T = len(grads)
    if beta2 < 1:  # undo the weights of the average
        grads = [G * beta2 ** (-(T - 1 - t) / 2) for t, G in enumerate(grads)]
    W = torch.randn(shape, generator=generator, dtype=torch.float64)
    (kronecker,), (full,) = parameters([W]), parameters([W])
    common = {"lr": 1.0, "betas": (0.0, beta2), "weight_decay": 0.0, "eps": 0.0, "frequency": T}
    shampoo = Shampoo(
        [kronecker], variant="shampoo2", trace_scaling=True, graft=None, merge_dims=False,
        vectors="full", **common,
    )  # fmt: skip
    adam = FullMatrixAdam([full], tau=0.0, correction="optimal", **PAPER, **common)
    for t, G in enumerate(grads, start=1):
        before = kronecker.detach().clone(), full.detach().clone()
        feed([kronecker], [G])
        feed([full], [G])
        shampoo.step()
        # Before A has full rank, full-matrix Adam divides by zero without ε.
        adam.param_groups[0]["eps"] = 0.0 if t == T else 1.0
        adam.step()
    g = torch.stack([G.flatten() for G in grads])
    weights = beta2 ** torch.arange(T - 1, -1, -1, dtype=torch.float64)
    weights = weights * (1 - beta2) / (1 - beta2**T) if beta2 < 1 else weights
    A = g.T @ torch.diag(weights) @ g
    expected = (dense_power(A, -0.5) @ g[-1]).view(shape)
    assert_close(before[0] - kronecker.detach(), expected, 1e-9)
    assert_close(before[1] - full.detach(), expected, 1e-9)


@pytest.mark.parametrize(
    "options", [{}, {"tau": 0.0}, {"correction": "basis_aware"}, {"beta3": 0.5, "solver": "qr"}]
)
def test_eshampoo_of_order_one_is_full_matrix_adam(options):
    tensors, grads = problem([(7,), (5,), (4, 2)], 30)
    ours, theirs = parameters(tensors), parameters(tensors)
    options = {"betas": (0.9, 0.95), "frequency": 9, **options}
    run(EShampoo(ours, vectors="full", merge_dims=True, **options), ours, grads)
    run(FullMatrixAdam(theirs, **options), theirs, grads)
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a.detach(), b.detach(), 1e-14)


def steps_against_dense(optimizer_class, d, frequency, beta1, eps, **options):
    """Triples (change of w, A, m) at every step with a fresh basis, A and m bias-corrected."""
    tensors, grads = problem([(d,)], 3 * max(frequency, d))
    (w,) = parameters(tensors)
    optimizer = optimizer_class(
        [w], 1.0, (beta1, 0.9), eps, 0.0, frequency=frequency, tau=0.0, **options
    )
    A, m = torch.zeros(d, d, dtype=torch.float64), torch.zeros(d, dtype=torch.float64)
    for t, (g,) in enumerate(grads, start=1):
        before = w.detach().clone()
        feed([w], [g])
        optimizer.step()
        A, m = 0.9 * A + 0.1 * torch.outer(g, g), beta1 * m + (1 - beta1) * g
        if t % frequency == 0 and t >= d:
            yield before - w.detach(), A / (1 - 0.9**t), m / (1 - beta1**t)


@pytest.mark.parametrize("variant", ["shampoo", "shampoo2"])
@pytest.mark.parametrize("trace_scaling", [False, True])
def test_shampoo_of_order_one_is_the_dense_inverse_root_whatever_its_variant(
    variant, trace_scaling
):
    options = {"variant": variant, "trace_scaling": trace_scaling, "graft": None, "vectors": "full"}
    found = list(steps_against_dense(Shampoo, 6, 7, 0.8, 0.0, **options))
    assert len(found) == 3
    for change, A, m in found:
        assert_close(change, dense_power(A, -0.5) @ m, 1e-10)


def test_kl_shampoo_of_order_one_is_the_dense_inverse_root():
    for change, A, m in steps_against_dense(KLShampoo, 6, 7, 0.8, 0.0, vectors="full"):
        damping = DAMPING * A.trace() / 6 * torch.eye(6, dtype=torch.float64)
        assert_close(change, dense_power(A + damping, -0.5) @ m, 1e-10)


def test_full_matrix_adam_with_a_fresh_optimal_basis_is_the_dense_inverse_root():
    options = {**PAPER, "correction": "optimal"}
    found = list(steps_against_dense(FullMatrixAdam, 6, 1, 0.8, 1e-8, **options))
    assert len(found) == 13
    for change, A, m in found:
        damped = dense_power(A, 0.5) + 1e-8 * torch.eye(6, dtype=torch.float64)
        assert_close(change, torch.linalg.solve(damped, m), 1e-10)


def test_soap_only_observes_its_first_gradient():
    tensors, grads = problem([(3, 3), (4,)], 2)
    params = parameters(tensors)
    optimizer = METHODS["SOAP"](params, weight_decay=0.5)
    run(optimizer, params, grads[:1])
    for W, p in zip(tensors, params, strict=True):
        assert torch.equal(W, p.detach())
        assert optimizer.state[p]["step"].sum() == 0
    run(optimizer, params, grads[1:])
    for W, p in zip(tensors, params, strict=True):
        assert not torch.equal(W, p.detach())
        assert optimizer.state[p]["step"].sum() == 1


def test_caspr_is_the_published_update_of_a_matrix():
    """(L^{-1/2}G + 2 L^{-1/4}GR^{-1/4} + GR^{-1/2})/4 with the sums of AdaGrad."""
    tensors, grads = problem([(4, 4)], 6)
    params = parameters(tensors)
    options = {"betas": (0.0, 1.0), "eps": 1e-12, "frequency": 1, "merge_dims": False}
    optimizer = METHODS["CASPR"](params, lr=1.0, weight_decay=0.0, **options)
    L = R = torch.zeros(4, 4, dtype=torch.float64)

    def power(A, exponent):
        values, Q = torch.linalg.eigh(A)
        return Q @ torch.diag(values**exponent) @ Q.T

    for (G,) in grads:
        before = params[0].detach().clone()
        L, R = L + G @ G.T, R + G.T @ G
        run(optimizer, params, [[G]])
        both = 2 * power(L, -1 / 4) @ G @ power(R, -1 / 4)
        expected = (power(L, -1 / 2) @ G + both + G @ power(R, -1 / 2)) / 4
        assert_close(before - params[0].detach(), expected, 1e-8)
