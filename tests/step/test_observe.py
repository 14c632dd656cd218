"""`statistics="observe"`: factors and D from other gradients than those of the steps."""

import copy

import pytest
import torch
from beside_oracles import Pair
from keyword_table import COMMON, METHODS, PAPER, thinned
from training import (
    assert_close,
    assert_same,
    computations,
    feed,
    parameters,
    problem,
    run,
    snapshot,
    through_a_file,
)

from eshampoo import EShampoo, Shampoo

SHAPES = [(), (6,), (4, 3), (3, 7), (2, 3, 4)]
OBSERVE = {"statistics": "observe"}


def alternating(pair, grads, tolerance=1e-9, every=1, first=1):
    """Steps, every few of them preceded by an observation of other gradients."""
    half = len(grads) // 2
    for t, (of_step, of_labels) in enumerate(zip(grads[:half], grads[half:], strict=True), start=1):
        if t >= first and t % every == 0:
            pair.observe(of_labels)
        pair.step(of_step)
        pair.assert_equal(tolerance, f"after step {t}")


ROWS = {
    "every method": ("EShampoo", {}),
    "the size of the signal": ("EShampoo", {"rms": "auto", "budget": 0.25}),
    "KL factors": ("EShampoo", {"factors": "kl"}),
    "novelty": ("EShampoo", {"frequency": "auto", "tau": 0.1}),
    "beta3": ("EShampoo", {"beta3": 0.8, "correction": "basis_aware", "nesterov": True}),
    "the optimal correction": ("EShampoo", {"correction": "optimal"}),
    "one mean of D": ("EShampoo", {"moment": "block", "exponent": 1.0, "maximize": True}),
    "sums": ("EShampoo", {"betas": (0.9, 1.0)}),
    "Shampoo": ("Shampoo", {"tau": 0.0}),
    "Tensor Normal Training": (
        "Shampoo",
        {"variant": "shampoo2", "trace_scaling": True, "exponent": 1.0, "eps": 1e-3, "graft": None},
    ),
    "blocks": ("Shampoo", {"max_dim": 2, "graft_scope": "block", "eigenvalues": "fresh"}),
    "CASPR": ("CASPR", {"rms": "auto"}),
    "KL-Shampoo": ("KLShampoo", {}),
    "full matrices": ("FullMatrixAdam", {"merge_dims": True}),
}


@pytest.mark.parametrize(("method", "options"), thinned(ROWS, lambda m, o: [m, *o.items()]))
@pytest.mark.parametrize(("every", "first"), [(1, 1), pytest.param(3, 5, marks=pytest.mark.slow)])
def test_observations_and_steps_follow_the_oracle(method, options, every, first):
    # No basis before all factors have full rank: the basis of a null space is arbitrary.
    F = {"FullMatrixAdam": 24}.get(method, 7)
    options = {k: v for k, v in options.items() if k != "merge_dims"}
    tensors, grads = problem(SHAPES, 2 * (2 * F + 4) * every, condition=3.0)
    late = {"tau": lambda t: 1.0 if t < F else options["tau"]} if "tau" in options else {}
    own = {**PAPER, "frequency": F, **options, **late, **OBSERVE}
    pair = Pair(method, tensors, **{**COMMON, **own})
    alternating(pair, grads, every=every, first=first)
    assert max(computations(pair.optimizer)) > 0


@pytest.mark.parametrize("method", ["EShampoo", "Shampoo"])
def test_an_observation_changes_the_statistics_alone_and_a_step_everything_but_them(method):
    tensors, grads = problem([(4, 3)], 6)
    params = parameters(tensors)
    optimizer = METHODS[method](params, **OBSERVE, frequency=50)

    def changed_by(call, step):
        feed(params, step)
        before = {name: v.clone() for name, v in optimizer.state[params[0]].items()}
        weights = params[0].detach().clone()
        call()
        after = optimizer.state[params[0]]
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        return changed, not torch.equal(weights, params[0].detach())

    own = {"EShampoo": {"exp_avg_sq"}, "Shampoo": set()}[
        method
    ]  # D, which Shampoo has for its graft
    lent = {"EShampoo": set(), "Shampoo": {"exp_avg_sq"}}[method]
    statistics = {"observations", "factor_0", "factor_1"} | own
    for step in grads[:3]:
        assert changed_by(optimizer.observe, step) == (statistics, False)
    for step in grads[3:]:
        assert changed_by(optimizer.step, step) == ({"step", "exp_avg", "norm_sq"} | lent, True)


def test_without_observations_it_is_adamw():
    tensors, grads = problem(SHAPES, 20)
    ours, theirs = parameters(tensors), parameters(tensors)
    run(EShampoo(ours, **OBSERVE), ours, grads)
    run(torch.optim.AdamW(theirs, betas=(0.9, 0.95)), theirs, grads)
    assert_close(ours, theirs, 1e-12)


def test_checks_follow_the_count_of_observations():
    tensors, grads = problem([(4, 4)], 9)
    params = parameters(tensors)
    optimizer = EShampoo(params, **OBSERVE, frequency=3, tau=0.0, budget=None, record=True)
    for step in grads:
        feed(params, step)
        optimizer.observe()
        for _ in range(5):
            optimizer.step()
    assert [[t for t, _, _ in r.history] for r in optimizer.basis_report()] == [[3, 6, 9]] * 2


def test_observations_need_the_keyword_and_change_nothing_without_it():
    tensors, grads = problem([(4, 3)], 2)
    params = parameters(tensors)
    optimizer = Shampoo(params)
    run(optimizer, params, grads)
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match=r"statistics='step'.*Pass statistics='observe'"):
        optimizer.observe()
    assert_same(before, snapshot(optimizer))


def test_a_first_observation_that_is_not_finite_leaves_the_statistics_of_steps():
    tensors, grads = problem([(4, 3)], 6)
    ours, theirs = parameters(tensors), parameters(tensors)
    optimizer = EShampoo(ours, **OBSERVE, frequency=2)
    feed(ours, [torch.full((4, 3), torch.inf)])
    optimizer.observe()
    run(optimizer, ours, grads)
    run(torch.optim.AdamW(theirs, betas=(0.9, 0.95)), theirs, grads)
    assert_close(ours, theirs, 1e-12)


def test_with_labels_of_the_model_trace_scaled_shampoo_squared_is_the_fisher_of_a_linear_network():
    """p(y | x) = N(f(x), I), f = W_3 W_2 W_1: the update is F⁻¹g, layer by layer (appendix A)."""
    inputs, outputs, points = 4, 5, 6
    shapes = [(3, inputs), (3, 3), (outputs, 3)]
    (*params,) = parameters(problem(shapes, 0)[0])
    generator = torch.Generator().manual_seed(1)
    X = torch.randn(points, inputs, generator=generator, dtype=torch.float64)

    def f(x, *weights):
        for W in weights:
            x = W @ x
        return x

    # Sums (β2 = 1) over the points and over residuals f − y with E[εεᵀ] = I: no sampling error.
    tnt = {"variant": "shampoo2", "trace_scaling": True, "exponent": 1.0, "graft": None}
    exact = {"eps": 0.0, "weight_decay": 0.0, "betas": (0.0, 1.0), "lr": 1.0, "tau": 0.0}
    # All factors have full rank with the last observation, the only one with a check.
    count = points * outputs
    optimizer = Shampoo(params, **tnt, **exact, **OBSERVE, frequency=count)
    for x in X:
        for residual in outputs**0.5 * torch.eye(outputs, dtype=torch.float64):
            optimizer.zero_grad()
            (f(x, *params) @ residual).backward()  # the gradient of ½‖f − y‖², with y = f − ε
            optimizer.observe()
    before = [W.detach().clone() for W in params]
    grads = problem(shapes, 1, seed=2)[1]
    run(optimizer, params, grads)
    for i, (W, G) in enumerate(zip(before, grads[0], strict=True)):

        def of_layer(V, x, i=i):
            return f(x, *before[:i], V, *before[i + 1 :])

        J = [torch.autograd.functional.jacobian(lambda V, x=x: of_layer(V, x), W) for x in X]
        F = sum(j.flatten(1).T @ j.flatten(1) for j in J) / points
        expected = torch.linalg.solve(F, G.flatten()).view_as(W)
        assert_close((W - params[i].detach()) * count, expected, 1e-10 * expected.norm().item())


@pytest.mark.parametrize("method", ["EShampoo", "Shampoo"])
def test_a_run_resumes_in_every_bit(method):
    tensors, grads = problem(SHAPES, 24)
    params = parameters(tensors, torch.float32)
    optimizer = METHODS[method](params, **OBSERVE, frequency=3)

    def go_on(optimizer, params, grads):
        for t, step in enumerate(grads):
            feed(params, step)
            if t % 2 == 0:
                optimizer.observe()
            optimizer.step()

    go_on(optimizer, params, grads[:12])
    weights = copy.deepcopy(params)
    resumed = METHODS[method](weights, **OBSERVE, frequency=3)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    go_on(optimizer, params, grads[12:])
    go_on(resumed, weights, grads[12:])
    assert_same(snapshot(optimizer)[:2], snapshot(resumed)[:2])
