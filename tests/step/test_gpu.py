"""Ready for a GPU, as far as can be shown without one: what a plain step does to a device."""

import pytest
import torch
from keyword_table import METHODS
from pretended import Replay, pretended_gpu, traced
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from training import feed, parameters, problem, run

from eshampoo import Muon

EVERYONE = {**METHODS, "Muon": Muon}

# A matrix, a vector, one that is cut into ragged blocks, an order of three, and one so large that
# the factors are computed in block rows.
SHAPES = [(12, 20), (7,), (30, 12), (4, 3, 5), (400, 300)]
NEVER = 10**9


def on_a_gpu(method, **options):
    """An optimizer in the middle of a run, as far as its host knows, with gradients."""
    shapes = SHAPES[:2] if method == "FullMatrixAdam" else SHAPES
    if method != "Muon":
        options = {"frequency": NEVER, **options}
    if method not in ("Muon", "FullMatrixAdam"):
        options = {"max_dim": 512, **options}
    params = [nn.Parameter(torch.empty(shape, device="cuda")) for shape in shapes]
    for p in params:
        p.grad = torch.empty_like(p)
    optimizer = EVERYONE[method](params, **options)
    for bucket in optimizer._buckets:
        bucket.clocks["step"] = [5] * len(bucket.blocks)
        for entry in range(len(bucket.blocks) * len(bucket.modes)):
            bucket.counters.checks[entry] = 1
    return optimizer


@pytest.mark.slow
@pytest.mark.parametrize("method", EVERYONE)
def test_a_plain_step_reads_nothing_copies_nothing_between_devices_and_makes_no_float64(method):
    """Nor does a number in it depend on t, or on a learning rate that is a tensor."""
    with pretended_gpu():
        optimizer = on_a_gpu(method, lr=torch.empty((), device="cuda"))
        optimizer.step()  # makes views that stay
        one, other = traced(optimizer.step), traced(optimizer.step)
        optimizer.param_groups[0]["lr"] = 0.375
        with_a_number = traced(optimizer.step)
    for operation in (*one, *with_a_number):
        assert operation.devices <= {"cuda"}, operation
        assert torch.float64 not in operation.dtypes, operation
        assert not operation.name.startswith(("aten._local_scalar", "aten.lift")), operation
    assert any(operation.name.startswith("aten.bmm") for operation in one)
    assert one == other
    assert "-0.375" in str(with_a_number)
    assert "-0.375" not in str(one)


@pytest.mark.slow
def test_a_read_a_copy_and_a_float64_would_be_seen():
    with pretended_gpu():
        x = torch.empty(3, device="cuda")
        (copy,) = [op for op in traced(x.cpu) if "copy" in op.name]
        assert copy.devices == {"cuda", "cpu"}
        assert any(torch.float64 in op.dtypes for op in traced(x.double))
        assert any(op.devices == {"cpu"} for op in traced(lambda: torch.tensor([1.0])))
        for read in (x.tolist, x.sum().item, lambda: bool(x.sum() > 0)):
            with pytest.raises(DataDependentOutputException):
                traced(read)
        with pytest.raises(DataDependentOutputException):  # a check reads the criteria
            on_a_gpu("EShampoo", frequency=1).step()


@pytest.mark.parametrize("method", EVERYONE)
def test_a_plain_step_that_was_recorded_once_and_is_replayed_is_a_step(method):
    """As a CUDA graph would: the same operations on the same memory, whatever the host knows."""
    tensors, grads = problem(SHAPES[:2] if method == "FullMatrixAdam" else SHAPES[:4], 8)
    options = {} if method == "Muon" else {"frequency": 2}
    ours, theirs = (parameters(tensors, torch.float32) for _ in range(2))
    rates = [torch.tensor(1e-2) for _ in range(2)]
    pairs = list(zip((ours, theirs), rates, strict=True))
    recorded, stepped = (EVERYONE[method](ps, lr=lr, **options) for ps, lr in pairs)
    for params, optimizer in ((ours, recorded), (theirs, stepped)):
        run(optimizer, params, grads[:4])
        optimizer.param_groups[0].update({"frequency": NEVER} if options else {})
    feed(ours, grads[4])
    run(stepped, theirs, [grads[4]])
    with Replay() as replay:
        recorded.step()
    for step in grads[5:]:
        for lr in rates:
            lr.mul_(0.5)
        for p, G in zip(ours, step, strict=True):
            p.grad.copy_(G)
        replay.again()
        run(stepped, theirs, [step])
        for p, q in zip(ours, theirs, strict=True):
            assert torch.equal(p, q)
            for name, value in stepped.state[q].items():
                assert torch.equal(recorded.state[p][name], value), name
