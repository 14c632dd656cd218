"""Gradients with NaN or Inf, for one method of each kind of state."""

import math
import warnings

import pytest
import torch
from keyword_table import METHODS, keywords_of
from training import assert_same, feed, parameters, problem, run, snapshot

NAN, INF = float("nan"), float("inf")
WARNING = "had NaN or Inf"
skips = pytest.mark.filterwarnings(f"ignore:.*{WARNING}")
STATES = ["EShampoo", "Shampoo"]
SHAPES = [(4, 4), (4, 4), (6,), (3, 3, 3), ()]
OPTIONS = {"frequency": 3, "tau": 0.0, "vectors": "full"}


def spoilt(G, value):
    """The gradient with one bad entry."""
    G = G.clone()
    G.view(-1)[-1] = value
    return G


def state_of(optimizer, p):
    """All entries but the count of skipped gradients."""
    return {key: v.clone() for key, v in optimizer.state[p].items() if key != "skipped"}


def bits(tensor):
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().contiguous().view(whole).clone()


def all_bits(optimizer, p):
    return bits(p), {name: bits(value) for name, value in state_of(optimizer, p).items()}


@skips
@pytest.mark.parametrize("frequency", [1, 3])
@pytest.mark.parametrize(
    "more", [{}, {"betas": (0.9, 1.0), "weight_decay": 0.0}, {"state": "lean"}]
)
@pytest.mark.parametrize("method", STATES)
def test_a_skipped_block_keeps_every_bit_at_every_step_while_the_others_move(
    method, more, frequency
):
    """From the first step on, at checks too, and so do −0.0, −Inf and NaN in weights and state."""
    tensors, grads = problem(SHAPES, 13)
    params = parameters(tensors, torch.float32)
    optimizer = METHODS[method](params, **{**OPTIONS, **more, "frequency": frequency})
    for t, step in enumerate(grads):
        if t == 6:
            for p in params[:2]:
                M = optimizer.state[p]["exp_avg"]
                M.view(-1)[:2] = torch.tensor([-0.0, 0.0], dtype=M.dtype)
                p.data.view(-1)[:3] = torch.tensor([-0.0, -INF, NAN])
        bad = t % len(params)
        before, others = all_bits(optimizer, params[bad]), [bits(p) for p in params]
        value = (NAN, INF, -INF)[t % 3]
        feed(params, [spoilt(G, value) if i == bad else G for i, G in enumerate(step)])
        optimizer.step()
        assert_same(before, all_bits(optimizer, params[bad]), f"step {t + 1}")
        for i, (old, p) in enumerate(zip(others, params, strict=True)):
            assert torch.equal(old, bits(p)) == (i == bad), (t, i)
    assert sum(int(optimizer.state[p]["skipped"].sum()) for p in params) == len(grads)


@skips
@pytest.mark.parametrize("frequency", [1, 3])
@pytest.mark.parametrize("method", STATES)
def test_a_skipped_gradient_is_a_missing_gradient_also_at_a_check(method, frequency):
    tensors, grads = problem(SHAPES, 14)
    # The first, one before a check, one at a check, two in a row.
    bad = {(1, 0), (2, 1), (3, 1), (5, 3), (6, 0), (6, 2), (7, 2), (9, 4), (12, 1)}
    skipping, missing = parameters(tensors), parameters(tensors)
    options = {**OPTIONS, "frequency": frequency}
    ours, theirs = METHODS[method](skipping, **options), METHODS[method](missing, **options)
    for t, step in enumerate(grads, start=1):
        hit = [(t, i) in bad for i in range(len(step))]
        feed(skipping, [spoilt(G, NAN) if h else G for G, h in zip(step, hit, strict=True)])
        feed(missing, [None if h else G for G, h in zip(step, hit, strict=True)])
        ours.step()
        theirs.step()
        for i, (a, b) in enumerate(zip(skipping, missing, strict=True)):
            assert torch.equal(a.detach(), b.detach()), (t, i)
            assert_same(state_of(ours, a), state_of(theirs, b), f"step {t}, parameter {i}")
    factors = [r for r in ours.basis_report() if r.mode >= 0]
    assert [r._replace(skipped=0) for r in factors] == theirs.basis_report()


@skips
@pytest.mark.parametrize("method", STATES)
def test_the_blocks_of_a_split_parameter_are_skipped_separately(method):
    tensors, grads = problem([(6, 6)], 8)
    params = parameters(tensors)
    options = {"max_dim": 3, "frequency": 2}
    if method == "Shampoo":
        options["graft_scope"] = "block"
    optimizer = METHODS[method](params, **options)
    run(optimizer, params, grads[:5])
    (p,) = params
    before, state = p.detach().clone(), state_of(optimizer, p)
    G = grads[5][0].clone()
    G[0, 4] = NAN  # in the second of four blocks
    run(optimizer, params, [[G]])
    assert optimizer.state[p]["skipped"].tolist() == [0, 1, 0, 0]
    moved = p.detach() != before
    assert not moved[:3, 3:].any()
    assert moved[:3, :3].all()
    assert moved[3:].all()
    for key, value in state_of(optimizer, p).items():
        assert_same(state[key][1], value[1], key)


def test_one_warning_names_the_parameters_after_a_complete_step():
    tensors, grads = problem([(4, 4), (4, 4), (6,), (3,)], 12)
    params, twin = parameters(tensors), parameters(tensors)
    named = [(f"layer{i}", p) for i, p in enumerate(params)]
    optimizer, other = (
        METHODS["EShampoo"](named, frequency=3),
        METHODS["EShampoo"](twin, frequency=3),
    )
    bad = {(2, 1), (2, 2), (7, 0)}  # layer2 has no factor
    for t, step in enumerate(grads, start=1):
        feed(params, [spoilt(G, NAN) if (t, i) in bad else G for i, G in enumerate(step)])
        feed(twin, [None if (t, i) in bad else G for i, G in enumerate(step)])
        other.step()
        if t == 3:  # the next check
            with pytest.warns(UserWarning, match=WARNING) as seen:
                optimizer.step()
            assert len(seen) == 1
            named_there = [i for i in range(4) if f"'layer{i}'" in str(seen[0].message)]
            assert named_there == [1, 2]
        else:  # warnings are errors here
            optimizer.step()
        # Also the step that warned was a whole step.
        assert_same([p.detach() for p in params], [p.detach() for p in twin])


@skips
def test_the_report_counts_what_was_skipped_also_without_a_factor():
    tensors, grads = problem([(4, 4), (6,), (3,)], 5)
    params = parameters(tensors)
    named = [(f"layer{i}", p) for i, p in enumerate(params)]
    optimizer = METHODS["EShampoo"](named, frequency=2)
    rows = [(r.name, r.mode, r.size, r.skipped) for r in optimizer.basis_report()]
    assert rows == [("layer0", 0, 4, 0), ("layer0", 1, 4, 0)]
    for step in grads:
        run(optimizer, params, [[spoilt(step[0], INF), spoilt(step[1], NAN), step[2]]])
    rows = [(r.name, r.shape, r.mode, r.size, r.skipped) for r in optimizer.basis_report()]
    assert rows == [
        ("layer0", (4, 4), 0, 4, 5), ("layer0", (4, 4), 1, 4, 5), ("layer1", (6,), -1, 0, 5)
    ]  # fmt: skip
    # A state brings its counts along, and what happened before it was saved is not warned of again.
    again = METHODS["EShampoo"](named, frequency=2)
    again.load_state_dict(optimizer.state_dict())
    assert again.basis_report() == optimizer.basis_report()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(again, params, grads)


@skips
def test_gradscaler_and_skipping_go_together():
    """The scaler leaves whole steps out, the optimizer single blocks: neither hides the other."""
    tensors, grads = problem([(4, 4), (4, 4), (6,)], 12)
    params, twin = parameters(tensors, torch.float32), parameters(tensors, torch.float32)
    optimizer, other = (METHODS["EShampoo"](ps, **OPTIONS) for ps in (params, twin))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=10**6)
    scaler.scale(torch.zeros(()))  # makes its tensors
    for t, step in enumerate(grads):
        scale = scaler.get_scale()
        if t == 4:  # found by the scaler: nobody moves, and the scale is halved
            before = snapshot(optimizer)
            feed(params, [spoilt(step[0] * scale, INF), *(G * scale for G in step[1:])])
            scaler.step(optimizer)
            assert_same(before, snapshot(optimizer))
        else:
            feed(params, [G * scale for G in step])
            feed(twin, [G.float() * scale / scale for G in step])
            if t == 7:  # spoilt after unscaling, as clipping does: only one block stands still
                scaler.unscale_(optimizer)
                params[1].grad.view(-1)[0] = NAN
                twin[1].grad = None
            scaler.step(optimizer)
            other.step()
        scaler.update()
        for i, (p, q) in enumerate(zip(params, twin, strict=True)):
            assert torch.equal(p.detach(), q.detach()), (t, i)
    assert scaler.get_scale() == 4.0
    assert int(optimizer.state[params[1]]["skipped"].sum()) == 1


@skips
def test_each_group_has_its_own_rule_and_propagate_lets_the_gradient_through():
    tensors, grads = problem([(4, 4), (4, 4), (4, 4)], 5)
    params = parameters(tensors)
    rules = ("skip", "raise", "propagate")
    groups = [{"params": [p], "nonfinite": rule} for p, rule in zip(params, rules, strict=True)]
    optimizer = METHODS["EShampoo"](groups, **OPTIONS)
    run(optimizer, params, grads[:2])
    before = snapshot(optimizer)
    feed(params, [spoilt(G, NAN) for G in grads[2]])
    with pytest.raises(FloatingPointError, match="NaN or Inf"):
        optimizer.step()
    assert_same(before, snapshot(optimizer))
    feed(params, [spoilt(grads[2][0], NAN), grads[2][1], spoilt(grads[2][2], NAN)])
    optimizer.step()
    assert torch.equal(params[0].detach(), before[0][0])
    assert params[1].isfinite().all()
    assert not torch.equal(params[1].detach(), before[0][1])
    assert params[2].isnan().any()
    optimizer.param_groups[1]["nonfinite"] = "skip"  # the value is live
    feed(params, [None, spoilt(grads[3][1], NAN), None])
    now = params[1].detach().clone()
    optimizer.step()
    assert torch.equal(params[1].detach(), now)


@pytest.mark.parametrize("method", STATES)
def test_raise_names_the_parameters_and_changes_nothing(method):
    tensors, grads = problem(SHAPES, 4)
    params = parameters(tensors)
    named = [(f"layer{i}", p) for i, p in enumerate(params)]
    options = {"frequency": 2, "max_dim": 2}
    optimizer = METHODS[method](named, nonfinite="raise", **options)
    run(optimizer, params, grads[:3])
    before = snapshot(optimizer)
    feed(params, [spoilt(G, NAN) if i in (1, 3) else G for i, G in enumerate(grads[3])])
    with pytest.raises(FloatingPointError, match="NaN or Inf") as error:
        optimizer.step()
    assert [i for i in range(5) if f"'layer{i}'" in str(error.value)] == [1, 3]
    assert "nonfinite='skip'" in str(error.value)
    assert_same(before, snapshot(optimizer))
    # The refused step left no trace in the clocks either.
    twin = parameters(tensors)
    run(METHODS[method](twin, **options), twin, grads)
    run(optimizer, params, grads[3:])
    for a, b in zip(params, twin, strict=True):
        assert torch.equal(a.detach(), b.detach())


@skips
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", STATES)
def test_a_gradient_whose_squares_overflow_is_skipped_or_raised_too_and_nothing_below(
    method, dtype
):
    tensors, grads = problem([(4, 4), (6,), (3, 3)], 4)
    limit = math.sqrt(torch.finfo(dtype).max)
    for size, refused in [(1e10 * limit, True), (1.01 * limit, True), (0.99 * limit, False)]:
        large = [g / torch.linalg.vector_norm(g) * size for g in grads[3]]
        for rule in ("skip", "raise"):
            params = parameters(tensors, dtype)
            optimizer = METHODS[method](params, **{**OPTIONS, "nonfinite": rule})
            run(optimizer, params, grads[:3])
            before = snapshot(optimizer)
            feed(params, [*large[:2], None])
            if rule == "raise" and refused:
                with pytest.raises(FloatingPointError, match="squares overflow"):
                    optimizer.step()
                assert_same(before, snapshot(optimizer))
            else:
                optimizer.step()
                for old, p in zip(before[0][:2], params, strict=False):
                    assert torch.equal(old, p.detach()) == refused
                    assert all(v.isfinite().all() for v in optimizer.state[p].values())


GRADIENTS = {
    "random": lambda t, shape, draw: draw(shape),
    "zero": lambda t, shape, draw: torch.zeros(shape),
    "zero, then random": lambda t, shape, draw: draw(shape) * (t > 3),
    "rank 1": lambda t, shape, draw: torch.ones(shape) * (t + 1),
    "a dead row": lambda t, shape, draw: torch.cat([draw(shape)[:-1], torch.zeros(1, shape[1])]),
    "tiny": lambda t, shape, draw: draw(shape) * 1e-18,
}


@pytest.mark.parametrize("kind", GRADIENTS)
@pytest.mark.parametrize("method", METHODS)
def test_no_epsilon_makes_no_nan(method, kind):
    own = keywords_of(method)
    unscaled = {name: None for name in ("rms", "graft") if name in own}
    variants = [{}, {"frequency": 1}, {"exponent": 1.0}]
    variants += [{"graft": "adam"}] if "graft" in own else []
    for variant in variants:
        torch.manual_seed(0)
        params = parameters([torch.randn(4, 5), torch.randn(4, 5)])
        options = {"frequency": 3, "tau": 0.0, **unscaled, **variant}
        optimizer = METHODS[method](params, **options, eps=0.0)
        for t in range(8):
            run(optimizer, params, [[GRADIENTS[kind](t, (4, 5), torch.randn), None]])
            assert params[0].isfinite().all(), (variant, t)
            assert all(v.isfinite().all() for v in optimizer.state[params[0]].values()), t
