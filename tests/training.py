"""Small problems, runs of an optimizer on them, and what must be equal afterwards."""

import copy
import io

import torch
from keyword_table import METHODS
from torch import nn

# Orders 0 to 4 with dimensions of 1; every factor has full rank after 24 gradients at the latest.
SHAPES = [(), (1,), (6,), (4, 3), (3, 7), (1, 5), (5, 1, 3), (2, 3, 4), (3, 2, 2, 2)]
# Every factor has full rank after one gradient, which is when SOAP builds its first basis.
BALANCED = [(), (5,), (4, 4), (3, 3, 3), (2, 2, 2, 2), (1, 3, 3), (3, 1, 3)]
FULL_RANK = 24

LAYOUTS = {
    "merged": {"merge_dims": True, "max_dim": 64},
    "partly merged": {"merge_dims": True, "max_dim": 6},
    "not merged": {"merge_dims": False, "max_dim": 64},
    "ragged blocks": {"merge_dims": False, "max_dim": 2},
    "merged ragged blocks": {"merge_dims": True, "max_dim": 4},
    "oversize identity": {"merge_dims": False, "max_dim": 3, "oversize": "identity"},
}


def problem(shapes, steps, seed=0, condition=1.0):
    """Random parameters and `steps` random gradients of well-spread scales for each."""
    generator = torch.Generator().manual_seed(seed)

    def draw(shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    params = [draw(shape) for shape in shapes]
    scales = [condition ** draw(shape).clamp(-1, 1) for shape in shapes]
    return params, [
        [draw(s) * c for s, c in zip(shapes, scales, strict=True)] for _ in range(steps)
    ]


def assert_close(a, b, tolerance=1e-12):
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def furthest(ours, theirs):
    """The largest difference between two lists of tensors; NaN if there is one."""
    gaps = [(a - b).detach().abs().max() for a, b in zip(ours, theirs, strict=True) if a.numel()]
    return torch.stack(gaps).max().item()


def parameters(tensors, dtype=None):
    """Fresh parameters with these values."""
    return [nn.Parameter(W.detach().clone().to(dtype or W.dtype)) for W in tensors]


def feed(params, grads):
    """Set the gradients; None is none."""
    for W, G in zip(params, grads, strict=True):
        W.grad = None if G is None else G.detach().clone().to(W.dtype)


def run(optimizer, params, grads):
    """Take one step per list of gradients."""
    for step in grads:
        feed(params, step)
        optimizer.step()


def trained(method, shapes, steps, seed=0, dtype=None, **options):
    """An optimizer that has taken some steps, its parameters, and as many gradients again."""
    tensors, grads = problem(shapes, 2 * steps, seed)
    params = parameters(tensors, dtype)
    optimizer = METHODS[method](params, **options)
    run(optimizer, params, grads[:steps])
    return optimizer, params, grads[steps:]


def through_a_file(state_dict):
    """What torch.load finds of it, without running any code."""
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def snapshot(optimizer):
    """Everything that a refused call must leave alone: parameters, state and groups, copied."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return (
        [p.detach().clone() for p in params],
        [{k: v.clone() for k, v in optimizer.state.get(p, {}).items()} for p in params],
        [
            {k: copy.deepcopy(v) for k, v in group.items() if k != "params"}
            for group in optimizer.param_groups
        ],
        [len(group["params"]) for group in optimizer.param_groups],
    )


def assert_same(a, b, where="", bitwise=True):
    """Equality of nested lists, dictionaries and tensors, NaN equal to NaN."""
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, where
        if bitwise:
            assert a.shape == b.shape, where
            assert ((a == b) | ((a != a) & (b != b))).all(), where
        else:
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}[{key!r}]", bitwise)
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{i}]", bitwise)
    else:
        assert a == b or (a != a and b != b), where


def computations(optimizer):
    """Basis computations of every factor, in the order of the report."""
    return [report.computations for report in optimizer.basis_report()]


def checked(method, tau, steps=24, frequency=3, **options):
    """An optimizer after some steps on five factors of full rank, every third one with a check."""
    tensors, grads = problem([(4, 4), (3, 3, 3)], steps, condition=3.0)
    params = parameters(tensors)
    common = {"budget": None, "lr": 1e-2, "betas": (0.9, 0.9)}
    optimizer = METHODS[method](params, frequency=frequency, tau=tau, **{**common, **options})
    run(optimizer, params, grads)
    return optimizer
