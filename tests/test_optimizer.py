"""Ordinary optimizer life: what users of torch.optim do, done here."""

import copy
import io
import pickle

import pytest
import torch
from keyword_table import METHODS
from torch import nn
from training import assert_close, assert_same, feed, parameters, problem, run, snapshot, trained

from eshampoo import EShampoo, schedules

SHAPES = [(4, 4), (3, 3, 3), (5,), ()]
STATES = ["EShampoo", "Shampoo"]  # one for each kind of state


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


def data(n=32):
    generator = torch.Generator().manual_seed(1)
    X = torch.randn(n, 4, generator=generator)
    return X, torch.stack([X[:, 0] * X[:, 1], X[:, 2].sin()], 1)


def loss_of(net, X, Y):
    return (net(X) - Y).square().mean()


@pytest.mark.parametrize("method", STATES)
def test_a_closure_is_called_once_with_gradients_enabled_and_its_loss_returned(method):
    net, (X, Y), calls = model(), data(), []
    optimizer = METHODS[method](net.parameters(), frequency=2)

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = loss_of(net, X, Y)
        loss.backward()
        calls.append(loss.item())
        return loss

    with torch.no_grad():
        losses = [optimizer.step(closure).item() for _ in range(4)]
    assert losses == calls
    assert losses[3] < losses[0]
    assert optimizer.step() is None


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_clears_gradients(set_to_none):
    net, (X, Y) = model(), data()
    optimizer = EShampoo(net.parameters())
    loss_of(net, X, Y).backward()
    optimizer.zero_grad(set_to_none=set_to_none)
    for p in net.parameters():
        assert p.grad is None if set_to_none else not p.grad.any()


def rates(scheduler, steps):
    """A run on AdamW and one on EShampoo before its first basis, under the same scheduler."""
    tensors, grads = problem(SHAPES, steps)
    final = []
    for optimizer_class, options in (
        (torch.optim.AdamW, {}),
        (EShampoo, {"betas": (0.9, 0.999), "frequency": 1000}),
    ):
        params = parameters(tensors)
        optimizer = optimizer_class(params, lr=1e-2, **options)
        schedule = scheduler(optimizer)
        for step in grads:
            run(optimizer, params, [step])
            schedule.step()
        group = optimizer.param_groups[0]
        final.append((params, group["lr"], group["betas"]))
    return final


SCHEDULERS = {
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=30),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=5),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        ],
        [5],
    ),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
def test_schedulers_drive_it_as_they_drive_adamw(scheduler):
    (theirs, lr, betas), (ours, our_lr, our_betas) = rates(scheduler, 20)
    assert (lr, betas) == (our_lr, our_betas)
    for a, b in zip(theirs, ours, strict=True):
        assert_close(a.detach(), b.detach(), 1e-13)
    if scheduler is SCHEDULERS["OneCycleLR"]:
        assert betas[0] != 0.9  # momentum was cycled


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("method", STATES)
def test_a_tensor_as_lr_is_the_number_and_follows_what_is_written_into_it(method, shape):
    tensors, grads = problem(SHAPES, 12)
    one, two = parameters(tensors), parameters(tensors)
    lr = torch.full(shape, 0.01, dtype=torch.float64)
    options = {"frequency": 3, "weight_decay": 0.1}
    tensor, number = METHODS[method](one, lr, **options), METHODS[method](two, 0.01, **options)
    run(tensor, one, grads[:6])
    run(number, two, grads[:6])
    lr.fill_(0.05)
    number.param_groups[0]["lr"] = 0.05
    run(tensor, one, grads[6:])
    run(number, two, grads[6:])
    for a, b in zip(one, two, strict=True):
        assert_close(a.detach(), b.detach(), 1e-13)


def test_clipped_gradients_are_what_the_step_sees():
    net, twin, (X, Y) = model(), model(), data()
    ours = EShampoo(net.parameters(), frequency=50)
    theirs = torch.optim.AdamW(twin.parameters(), betas=(0.9, 0.95))
    for _ in range(5):
        for m, optimizer in ((net, ours), (twin, theirs)):
            optimizer.zero_grad()
            (100 * loss_of(m, X, Y)).backward()
            nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            optimizer.step()
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        assert_close(a.detach(), b.detach(), 1e-6)


def test_a_grad_scaler_scales_and_skips():
    net, plain, (X, Y) = model(), model(), data()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)
    options = {"frequency": 2, "tau": 0.0}
    ours, theirs = EShampoo(net.parameters(), **options), EShampoo(plain.parameters(), **options)
    for t in range(6):
        ours.zero_grad()
        scaler.scale(loss_of(net, X, Y)).backward()
        if t == 3:
            net[0].weight.grad[0, 0] = float("inf")
        scaler.unscale_(ours)
        scaler.step(ours)
        scaler.update()
        if t != 3:
            theirs.zero_grad()
            loss_of(plain, X, Y).backward()
            theirs.step()
    assert scaler.get_scale() == 128.0
    assert ours.state[net[0].weight]["step"].item() == 5
    for a, b in zip(net.parameters(), plain.parameters(), strict=True):
        assert_close(a.detach(), b.detach(), 1e-6)


@pytest.mark.parametrize("method", STATES)
def test_several_dtypes_live_in_one_optimizer_as_in_optimizers_of_their_own(method):
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
    tensors, grads = problem([(4, 4)] * 4 + [(5,)] * 4, 9)
    together = [W for W, d in zip(tensors, dtypes * 2, strict=True) for W in parameters([W], d)]
    alone = copy.deepcopy(together)
    run(METHODS[method](together, frequency=3), together, grads)
    for i, p in enumerate(alone):
        run(METHODS[method]([p], frequency=3), [p], [[step[i]] for step in grads])
    for a, b, d in zip(together, alone, dtypes * 2, strict=True):
        assert a.dtype == d
        assert_close(a.detach(), b.detach(), 1e-2 if d.itemsize == 2 else 1e-5)


def transposed(W):
    return W.transpose(0, -1).contiguous().transpose(0, -1)


def channels_last(W):
    return W.contiguous(memory_format=torch.channels_last) if W.dim() == 4 else transposed(W)


def strided(W):
    return torch.stack([W, torch.zeros_like(W)], -1)[..., 0]


@pytest.mark.parametrize("max_dim", [3, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("layout", [transposed, channels_last, strided])
@pytest.mark.parametrize("of", ["parameters", "gradients", "both"])
@pytest.mark.parametrize("method", STATES)
def test_the_memory_layout_of_parameters_and_gradients_does_not_matter(method, of, layout, max_dim):
    tensors, grads = problem([(5, 4), (4, 3, 2, 2), (4, 4)], 8)
    options = {"frequency": 2, "max_dim": max_dim, "merge_dims": False, "oversize": "split"}
    plain = parameters(tensors)
    run(METHODS[method](plain, **options), plain, grads)
    params = parameters(tensors)
    if of != "gradients":
        params = [nn.Parameter(layout(W.detach())) for W in params]
        assert not all(p.is_contiguous() for p in params)
    strides = [p.stride() for p in params]
    optimizer = METHODS[method](params, **options)
    for step in grads:
        for p, G in zip(params, step, strict=True):
            p.grad = G.clone() if of == "parameters" else layout(G)
        optimizer.step()
    for p, q, stride in zip(params, plain, strides, strict=True):
        assert p.stride() == stride
        assert_close(p.detach(), q.detach(), 1e-13)


@pytest.mark.parametrize("method", METHODS)
def test_scalars_ones_and_empty_tensors_are_parameters_too(method):
    tensors, grads = problem([(), (1,), (1, 1), (0,), (3, 0), (1, 1, 1, 2)], 5)
    params = parameters(tensors)
    optimizer = METHODS[method](params, frequency=2)
    run(optimizer, params, grads)
    for W, p in zip(tensors, params, strict=True):
        assert p.shape == W.shape
        assert p.numel() == 0 or not torch.equal(W, p.detach())
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


# Copies -------------------------------------------------------------------------------------------


def by_pickle(x):
    buffer = io.BytesIO()
    pickle.dump(x, buffer)
    buffer.seek(0)
    return pickle.load(buffer)


@pytest.mark.parametrize("how", [copy.deepcopy, by_pickle])
@pytest.mark.parametrize("method", STATES)
def test_a_copy_in_mid_run_continues_bit_for_bit_and_apart(method, how):
    options = {"frequency": 3, "tau": schedules.linear(0.0, 0.2, 10)}
    optimizer, params, grads = trained(method, SHAPES, 7, **options)
    twin = how(optimizer)
    copies = [p for group in twin.param_groups for p in group["params"]]
    assert not {*map(id, copies)} & {*map(id, params)}
    run(optimizer, params, grads)
    before = [p.detach().clone() for p in copies]
    assert all(not torch.equal(p.detach(), q) for p, q in zip(params, before, strict=True))
    run(twin, copies, grads)
    assert_same([p.detach() for p in params], [p.detach() for p in copies])
    for p, q in zip(params, copies, strict=True):
        assert_same(optimizer.state[p], twin.state[q])
    assert optimizer.basis_report() == twin.basis_report()


@pytest.mark.parametrize("how", [copy.deepcopy, by_pickle])
def test_a_model_and_its_optimizer_copied_together_stay_linked(how):
    net, (X, Y) = model(), data()
    optimizer = EShampoo(net.named_parameters(), frequency=2, tau=0.0)

    def train(m, o, steps):
        for _ in range(steps):
            o.zero_grad()
            loss_of(m, X, Y).backward()
            o.step()
        return loss_of(m, X, Y).item()

    train(net, optimizer, 5)
    net_copy, optimizer_copy = how((net, optimizer))
    assert train(net, optimizer, 5) == train(net_copy, optimizer_copy, 5)
    names = [r.name for r in optimizer_copy.basis_report()]
    assert names == [r.name for r in optimizer.basis_report()]
    assert "0.weight" in names


# Parameters ---------------------------------------------------------------------------------------


def test_tied_parameters_get_the_sum_of_their_gradients_once():
    net, (X, _) = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)), data()
    net[1].weight = net[0].weight
    optimizer = EShampoo(net.parameters(), frequency=2, tau=0.0)
    assert len(optimizer.param_groups[0]["params"]) == 1
    for _ in range(4):
        optimizer.zero_grad()
        net(X).square().mean().backward()
        optimizer.step()
    assert optimizer.state[net[0].weight]["step"].item() == 4
    assert net[1].weight is net[0].weight


def test_a_duplicate_parameter_warns_as_in_torch_and_moves_once():
    tensors, grads = problem([(4, 4)], 6)
    single, double = parameters(tensors), parameters(tensors)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = EShampoo([double[0], double[0]], frequency=2)
    run(EShampoo(single, frequency=2), single, grads)
    for (G,) in grads:
        feed(double, [G])
        optimizer.step()
    assert torch.equal(single[0].detach(), double[0].detach())
    assert optimizer.state[double[0]]["step"].sum().item() == 6


@pytest.mark.parametrize("method", STATES)
def test_a_step_without_any_gradient_changes_nothing(method):
    optimizer, params, _ = trained(method, SHAPES, 5, frequency=3)
    before = [p.detach().clone() for p in params], copy.deepcopy(optimizer.state_dict())
    run(optimizer, params, [[None] * len(params)] * 3)
    assert_same(before, ([p.detach() for p in params], optimizer.state_dict()))


def test_step_hooks_run():
    optimizer, params, grads = trained("EShampoo", [(3, 3)], 2)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    run(optimizer, params, grads[:1])
    assert seen == ["before", "after"]


def test_gradients_and_graph_are_left_alone():
    net, (X, Y) = model(), data()
    optimizer = EShampoo(net.parameters(), frequency=1, maximize=True)
    loss_of(net, X, Y).backward()
    before = [p.grad.clone() for p in net.parameters()]
    optimizer.step()
    for p, G in zip(net.parameters(), before, strict=True):
        assert torch.equal(p.grad, G)
        assert p.requires_grad
        assert p.is_leaf


# What is refused ----------------------------------------------------------------------------------


def test_a_sparse_gradient_is_refused_by_name_before_anything_changes():
    embedding, linear = nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2)
    named = [("emb", embedding.weight), ("weight", linear.weight)]
    optimizer = EShampoo(named, frequency=1)
    linear(embedding(torch.tensor([1, 2]))).sum().backward()
    assert embedding.weight.grad.is_sparse
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match="sparse") as error:
        optimizer.step()
    assert "'emb'" in str(error.value)
    assert "sparse=False" in str(error.value)
    assert_same(before, snapshot(optimizer))
    embedding.weight.grad = None
    optimizer.step()
    assert optimizer.state[linear.weight]["step"].item() == 1


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64])
def test_parameters_must_be_real_floating_point_tensors(dtype):
    p = torch.ones(3, dtype=dtype)
    with pytest.raises(TypeError, match="floating-point") as error:
        EShampoo([p])
    assert str(dtype) in str(error.value)
    optimizer, *_ = trained("EShampoo", [(3, 3)], 2)
    before = snapshot(optimizer)
    with pytest.raises(TypeError, match="floating-point"):
        optimizer.add_param_group({"params": [p]})
    assert_same(before, snapshot(optimizer))


@pytest.mark.parametrize("params", [[], torch.ones(2), [1.0], [{"params": {torch.ones(2)}}]])
def test_what_torch_refuses_is_refused(params):
    with pytest.raises((ValueError, TypeError)):
        EShampoo(params)


def test_a_parameter_in_two_groups_is_refused():
    (p,) = parameters([torch.ones(2)])
    optimizer = EShampoo([p])
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [p]})
    assert len(optimizer.param_groups) == 1


def test_a_refused_group_leaves_an_optimizer_that_works_and_can_be_saved():
    optimizer, params, grads = trained("EShampoo", [(3, 3)], 2)
    (q,) = parameters([torch.ones(2, 2)])
    with pytest.raises(ValueError):
        optimizer.add_param_group({"params": [q], "frequency": 0})
    optimizer.add_param_group({"params": [q], "frequency": 1})
    run(optimizer, [*params, q], [[*step, torch.eye(2)] for step in grads])
    assert optimizer.state[q]["step"].item() == 2
    assert len(optimizer.state_dict()["param_groups"]) == 2
