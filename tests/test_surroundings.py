"""Where an optimizer may find itself: inference mode, threads, other processes, the meta device."""

import pytest
import torch
import torch.multiprocessing as mp
from keyword_table import METHODS
from torch import nn
from training import assert_same, feed, parameters, problem, run

from eshampoo import EShampoo

SHAPES = [(4, 4), (5, 3), (3,)]


@pytest.mark.parametrize("where", ["construction", "a step", "loading"])
@pytest.mark.parametrize("method", ["EShampoo", "Shampoo"])
def test_inference_mode_leaves_nothing_behind(method, where):
    tensors, grads = problem(SHAPES, 6)
    params, twin = parameters(tensors), parameters(tensors)
    with torch.inference_mode(where == "construction"):
        optimizer = METHODS[method](params, frequency=1)
    for t, step in enumerate(grads):
        feed(params, step)
        with torch.inference_mode(where == "a step" and t in (0, 3)):
            optimizer.step()
        with torch.inference_mode(where == "loading"):
            optimizer.load_state_dict(optimizer.state_dict())
    run(METHODS[method](twin, frequency=1), twin, grads)
    assert_same([p.detach() for p in params], [p.detach() for p in twin])


@pytest.mark.slow
@pytest.mark.parametrize(("method", "form"), [("EShampoo", "lean"), ("Shampoo", "full")])
def test_layers_of_usual_sizes_train_on_several_threads(two_threads, method, form):
    """Libraries of linear algebra go other ways with large matrices, many of them, and threads.

    Sums in another order turn close eigenvectors, so both ways are compared with float64.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = [(200, 208), (200, 208), (208, 200)]

    def low_rank(shape):
        left, right = (torch.randn(n, 60, generator=generator) for n in shape)
        return left @ right.T / 60

    grads = [[low_rank(shape) for shape in shapes] for _ in range(4)]

    def trained(threads, dtype):
        torch.set_num_threads(threads)
        params = parameters([torch.ones(shape) for shape in shapes], dtype)
        options = {"frequency": 1, "tau": 0.0, "eps": 1e-4, "state": form}
        run(METHODS[method](params, lr=1e-3, **options), params, grads)
        return [p.detach().double() for p in params]

    two, one, exact = (
        trained(2, torch.float32), trained(1, torch.float32), trained(1, torch.float64)
    )  # fmt: skip
    for p, q, truth in zip(two, one, exact, strict=True):
        assert (p - truth).norm() <= 2 * (q - truth).norm() + 1e-3 * (truth - 1).norm()


def test_parameters_made_in_inference_mode_are_refused():
    with torch.inference_mode():
        net = nn.Linear(3, 2)
    with pytest.raises(TypeError, match=r"'weight'.*inference_mode"):
        EShampoo(net.named_parameters())


def test_on_the_meta_device_the_size_of_the_state_is_known():
    sizes = []
    for device in ("meta", "cpu"):
        net = nn.Linear(40, 30, device=device)
        entries = EShampoo(net.parameters()).state_dict()["state"].values()
        sizes.append([v.nbytes for entry in entries for v in entry.values()])
    assert sizes[0] == sizes[1]


def train(net, optimizer, steps):
    X = torch.linspace(-1, 1, 24).view(4, 6)
    for _ in range(steps):
        optimizer.zero_grad()
        net(X).square().mean().backward()
        optimizer.step()


def elsewhere(net, optimizer, pipe):
    torch.set_num_threads(1)
    train(net, optimizer, 3)
    pipe.send([p.detach().tolist() for p in net.parameters()])


@pytest.mark.slow
def test_model_and_optimizer_go_to_a_spawned_process_and_train_there():
    def made():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        optimizer = EShampoo(net.parameters(), frequency=2)
        train(net, optimizer, 4)
        optimizer.zero_grad()
        return net, optimizer

    here, there = made(), made()
    spawn = mp.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=elsewhere, args=(*there, theirs))
    process.start()
    assert ours.poll(120)
    found = ours.recv()
    process.join()
    train(*here, 3)
    assert [p.detach().tolist() for p in here[0].parameters()] == found


def test_lr_is_looked_at_before_the_parameters():
    with pytest.raises(ValueError, match="lr"):
        EShampoo(None, lr=-1e-3)
