"""Problems and tables of cases, and the library run beside its oracles."""

import copy
import math

import oracles
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import eshampoo

METHODS = {
    "EShampoo": eshampoo.EShampoo,
    "Shampoo": eshampoo.Shampoo,
    "SOAP": eshampoo.SOAP,
    "KLShampoo": eshampoo.KLShampoo,
    "FullMatrixAdam": eshampoo.FullMatrixAdam,
}

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

# Values that a user may write into a param group between two steps.
COMMON = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}


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


class Pair:
    """The library and its oracle with the same parameters and options."""

    def __init__(self, method, tensors, dtype=torch.float64, **options):
        self.params = parameters(tensors, dtype)
        self.optimizer = METHODS[method](self.params, **options)
        self.oracle = getattr(oracles, method)(self.params, **options)

    def change(self, **values):
        """Write new values into the param group."""
        self.optimizer.param_groups[0].update(values)
        for name, value in values.items():
            setattr(self.oracle, name, value)

    def step(self, grads):
        feed(self.params, grads)
        self.optimizer.step()
        self.oracle.step(grads)

    def distance(self):
        return max(
            (W.detach() - V).abs().max().item() if V.numel() else 0.0
            for W, V in zip(self.params, self.oracle.params, strict=True)
        )

    def assert_equal(self, tolerance, when=""):
        for W, V in zip(self.params, self.oracle.params, strict=True):
            torch.testing.assert_close(
                W.detach().double(),
                V,
                rtol=0,
                atol=tolerance,
                msg=lambda m, s=tuple(W.shape): f"shape {s} {when}: {m}",
            )


def compare(method, shapes, steps, tolerance=1e-10, missing=(), changes=None, seed=0, **options):
    """Run library and oracle side by side and compare the parameters after every step.

    `missing` holds pairs (step, index of the parameter without a gradient); `changes` says which
    values are written into the param group before a step.
    """
    tensors, grads = problem(shapes, steps, seed, condition=3.0)
    pair = Pair(method, tensors, **{**COMMON, **options})
    moved = [W.clone() for W in tensors]
    for t, step in enumerate(grads, start=1):
        if changes and t in changes:
            pair.change(**changes[t])
        pair.step([None if (t, i) in missing else G for i, G in enumerate(step)])
        pair.assert_equal(tolerance, f"after step {t}")
    for before, W in zip(moved, pair.params, strict=True):
        assert W.numel() == 0 or not torch.equal(before, W.detach())
    return pair


def full_rank_after(oracle):
    """How many random gradients give every factor of every block full rank."""
    return max(
        (
            math.ceil(L.shape[0] ** 2 / block.M.numel())
            for blocks in oracle.blocks
            for block in blocks
            for L in block.L
            if L is not None
        ),
        default=1,
    )


def computations(optimizer):
    """Basis computations of every factor, in the order of the report."""
    return [report.computations for report in optimizer.basis_report()]


class CountOps(TorchDispatchMode):
    """How often each operation that computes something is dispatched."""

    VIEWS = (
        "view", "slice", "select", "reshape", "expand", "transpose", "permute", "unsqueeze",
        "squeeze", "unbind", "detach", "alias", "diagonal", "as_strided", "_unsafe_view", "split",
        "flatten", "movedim", "t", "narrow", "unflatten",
    )  # fmt: skip

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        if name not in self.VIEWS:
            self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))

    def products(self):
        return sum(self.counts.get(name, 0) for name in ("bmm", "mm", "baddbmm", "addmm", "matmul"))
