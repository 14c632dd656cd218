"""Many layers as one stack: the result of each alone, in any order."""

import pytest
import torch
from beside_oracles import compare
from keyword_table import FIRST_IS_FAST, METHODS
from training import assert_close, assert_same, feed, parameters, problem, run

from eshampoo import EShampoo
from eshampoo.step.step import batches, plan

SHAPES = [(4, 4), (3, 3, 3), (5,), (4, 4), (), (4, 4), (7, 5), (5,), (16,)]
OPTIONS = {
    "EShampoo": {"frequency": 3, "max_dim": 5},
    "Shampoo": {"frequency": 3, "max_dim": 5},
    "SOAP": {"frequency": 3},
    "KLShampoo": {"frequency": 3, "max_dim": 5},
    "CASPR": {"frequency": 3, "max_dim": 5},
    "FullMatrixAdam": {"frequency": 50},  # no basis: its factors have no full rank yet
}


@pytest.mark.parametrize("method", METHODS)
def test_batched_is_one_at_a_time(method):
    tensors, grads = problem(SHAPES, 10)
    together, alone = parameters(tensors), parameters(tensors)
    optimizer = METHODS[method](together, **OPTIONS[method])
    run(optimizer, together, grads)
    for i, p in enumerate(alone):
        single = METHODS[method]([p], **OPTIONS[method])
        run(single, [p], [[step[i]] for step in grads])
        assert_close(together[i].detach(), p.detach(), 1e-6)
        ours, theirs = optimizer.state[together[i]], single.state[p]
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert ours[key].shape == theirs[key].shape, key
        assert torch.equal(ours["step"], theirs["step"])


@pytest.mark.slow
@pytest.mark.parametrize("method", FIRST_IS_FAST)
def test_batched_is_one_at_a_time_to_the_last_digits_on_full_rank_factors(method):
    shapes = [(4, 4), (3, 3, 3), (5,), (4, 4), (4, 4)]
    tensors, grads = problem(shapes, 60)
    options = {"frequency": 28} if method == "FullMatrixAdam" else {"frequency": 3}
    options |= {} if method == "FullMatrixAdam" else {"merge_dims": False}
    together, alone = parameters(tensors), parameters(tensors)
    run(METHODS[method](together, **options), together, grads)
    for i, p in enumerate(alone):
        run(METHODS[method]([p], **options), [p], [[step[i]] for step in grads])
        assert_close(together[i].detach(), p.detach(), 1e-12)


@pytest.mark.parametrize("method", ["EShampoo", "Shampoo"])
def test_the_order_of_parameters_is_irrelevant(method):
    shapes = [(4, 4), (3, 3), (5,), (4, 4), (), (3, 3)]
    tensors, grads = problem(shapes, 40)
    options = {"frequency": 3, "merge_dims": False}
    reference = parameters(tensors)
    run(METHODS[method](reference, **options), reference, grads)
    for order in ([5, 4, 3, 2, 1, 0], [2, 0, 5, 1, 4, 3]):
        params = parameters(tensors)
        run(METHODS[method]([params[i] for i in order], **options), params, grads)
        for a, b in zip(reference, params, strict=True):
            assert_close(a.detach(), b.detach(), 1e-12)


@pytest.mark.parametrize("method", ["EShampoo", "Shampoo"])
@pytest.mark.parametrize("at", [0, 1, 5])
def test_a_group_can_join_at_any_time(method, at):
    tensors, grads = problem([(4, 4), (3, 3)], 10)
    options = {"frequency": 3}
    joined, alone = parameters(tensors), parameters(tensors)
    optimizer = METHODS[method](joined[:1], **options)
    for t, (G, H) in enumerate(grads):
        if t == at:
            optimizer.add_param_group({"params": joined[1:], "lr": 0.5})
        feed(joined, [G, H if t >= at else None])
        optimizer.step()
    run(METHODS[method](alone[:1], **options), alone[:1], [[G] for G, _ in grads])
    late = METHODS[method](alone[1:], **{**options, "lr": 0.5})
    run(late, alone[1:], [[H] for _, H in grads[at:]])
    for a, b in zip(joined, alone, strict=True):
        assert_close(a.detach(), b.detach(), 1e-10)
    assert optimizer.state[joined[1]]["step"].max() == late.state[alone[1]]["step"].max()


def test_short_vectors_share_a_stack_and_keep_their_shapes():
    tensors, grads = problem([(10,), (3, 1), (), (200,), (300,)], 6)
    params, theirs = parameters(tensors), parameters(tensors)
    optimizer = EShampoo(params, lr=1e-3, betas=(0.9, 0.999), weight_decay=0.1, matrices="adam")
    assert [bucket.shape for bucket in optimizer._buckets] == [(256,), (512,)]
    run(optimizer, params, grads)
    adamw = torch.optim.AdamW(theirs, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    run(adamw, theirs, grads)
    for p, q in zip(params, theirs, strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            assert optimizer.state[p][key].shape == p.shape
            assert_close(optimizer.state[p][key], adamw.state[q][key], 1e-12)


def test_a_bad_gradient_stops_its_own_vector_and_not_its_neighbours_in_the_stack():
    tensors, grads = problem([(10,), (20,), (30,)], 3)
    grads[1][1][4] = float("nan")
    params, alone = parameters(tensors), parameters(tensors)
    optimizer = EShampoo(params)
    run(optimizer, params, grads)
    assert [int(optimizer.state[p]["step"]) for p in params] == [3, 2, 3]
    for i in (0, 2):
        run(EShampoo([alone[i]]), [alone[i]], [[step[i]] for step in grads])
        assert_same(params[i].detach(), alone[i].detach())


# Parts and batches --------------------------------------------------------------------------------


def test_stacks_larger_than_a_part_are_worked_on_in_parts(monkeypatch):
    monkeypatch.setattr("eshampoo.state.blocks.THREAD_BYTES", 300)
    for method in ("EShampoo", "Shampoo"):
        compare(
            method, [(3, 4)] * 5 + [(7, 5)], 12, tau=0.0, frequency=4, missing={(2, 1)},
            merge_dims=False, max_dim=4,
        )  # fmt: skip


@pytest.mark.parametrize("method", ["EShampoo", "Shampoo"])
def test_what_is_admitted_together_moves_as_if_admitted_alone(method, monkeypatch):
    shapes = [(4, 4), (5,), (3, 3), (7, 5), (4, 4), (2,)]
    tensors, grads = problem(shapes, 9)
    finals = []
    for room in (1 << 20, 1):
        monkeypatch.setattr("eshampoo.state.blocks.THREAD_BYTES", room)
        params = parameters(tensors)
        optimizer = METHODS[method](params, **OPTIONS[method])
        feed(params, grads[0])
        tasks = plan("step", optimizer._buckets, optimizer._options())
        run(optimizer, params, grads)
        finals.append((len(batches(tasks)), params))
    (together, joined), (apart, single) = finals
    assert together < apart
    for p, q in zip(joined, single, strict=True):
        assert_close(p.detach(), q.detach(), 1e-9)
