"""Problems, the table of keywords, and the library run beside its oracles."""

import copy
import io
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import oracles
import pytest
import torch
from torch import nn

import eshampoo
from eshampoo import Muon, schedules
from eshampoo.classes import CLASSES

# Muon has no basis, and a test file of its own.
METHODS = {cls.__name__: cls for cls in CLASSES if cls is not Muon}

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


# Keywords -----------------------------------------------------------------------------------------

ALL = tuple(METHODS)
EVERYONE = (*ALL, "Muon")
BLOCKED = tuple(method for method in METHODS if method != "FullMatrixAdam")
# For tests that take long, so that `make check` has one method and `make test` all of them.
FIRST_IS_FAST = ["EShampoo", *(pytest.param(m, marks=pytest.mark.slow) for m in [*METHODS][1:])]
CORRECTED = ("EShampoo", "FullMatrixAdam")
GRAFTED = ("Shampoo", "CASPR")
OBSERVING = tuple(method for method in METHODS if method != "SOAP")
NAN = float("nan")
ABSENT = object()


class Keyword(NamedTuple):
    """What there is to try with one keyword of the optimizers."""

    values: tuple
    """Any of them will do; one that stands here twice is drawn twice as often."""
    bad: tuple = ()
    """Pairs of a value that is refused and words of the message."""
    wrong: tuple = ()
    """Things of another kind, which are refused too."""
    live: Mapping = MappingProxyType({})
    """Changes, by name, that take effect in a running optimizer."""
    fixed: object = ABSENT
    """A value that a running optimizer refuses, because its state was laid out by another one."""
    methods: tuple = ALL
    """To whom it means something."""


def choice(*values, bad, **more):
    """A keyword with a list of words to choose from."""
    words = ", ".join(map(repr, dict.fromkeys(values)))
    return Keyword(values, ((bad, words),), **more)


def switch(**more):
    return Keyword((False, True), **more)


KEYWORDS = {
    "lr": Keyword(
        (1e-2, 1e-3),
        ((-1e-3, "at least 0"), (NAN, "at least 0"), (torch.ones(2), "1-element")),
        wrong=("fast", None),
        live={"lr": {"lr": 0.05}},
        methods=EVERYONE,
    ),
    "betas": Keyword(
        ((0.9, 0.95), (0.0, 0.9), (0.9, 1.0), (0.95, 0.95)),
        (
            ((-0.1, 0.9), "[0, 1)"),
            ((1.0, 0.9), "[0, 1)"),
            ((0.9, 1.1), "[0, 1]"),
            ((0.9, -0.1), "[0, 1]"),
            ((0.9, NAN), "[0, 1]"),
        ),
        wrong=((0.9,), 0.9, (0.9, 0.99, 0.999), ("a", "b")),
        live={"betas": {"betas": (0.5, 0.7)}},
        methods=EVERYONE,
    ),
    "eps": Keyword(
        (1e-8, 1e-3),
        ((-1e-8, "at least 0"),),
        wrong=(None,),
        live={"eps": {"eps": 0.1}},
        methods=EVERYONE,
    ),
    "weight_decay": Keyword(
        (0.0, 0.2),
        ((-0.1, "at least 0"),),
        wrong=("no",),
        live={"weight_decay": {"weight_decay": 0.5}},
        methods=EVERYONE,
    ),
    "tau": Keyword(
        (
            0.0,
            0.0,
            0.05,
            0.3,
            1.0,
            schedules.constant(0.2),
            schedules.piecewise((9, 20), (0.0, 1.0, 0.1)),
            schedules.linear(0.0, 0.6, 20),
        ),
        ((-0.1, "at least 0"), (NAN, "at least 0")),
        wrong=(None, "0.1"),
        live={"tau": {"tau": 1.0}, "a schedule of tau": {"tau": schedules.constant(0.2)}},
    ),
    "frequency": Keyword(
        (1, 3, 50, "auto"),
        (
            (0, "at least 1"),
            (-3, "at least 1"),
            (2.5, "whole number"),
            (True, "whole number"),
            ("often", "'auto'"),
        ),
        wrong=(None,),
        live={
            "frequency": {"frequency": 4},
            "checks when there is something new": {"frequency": "auto"},
        },
    ),
    "novelty": Keyword(
        (0.1, 0.1, 0.03, 0.25, 1.0),
        ((0.0, "(0, 1]"), (-0.1, "(0, 1]"), (1.5, "(0, 1]"), (NAN, "(0, 1]")),
        wrong=(None, "new"),
        live={"novelty": {"frequency": "auto", "novelty": 0.3}},
    ),
    "budget": Keyword(
        (None, None, None, 0.0, 0.25, 2.0),
        ((-0.25, "at least 0"), (NAN, "at least 0"), (math.inf, "at least 0")),
        wrong=("all",),
        live={
            "a budget": {"budget": 0.0, "frequency": 1},
            "a larger budget": {"budget": 1.0, "frequency": 1},
        },
    ),
    "solver": choice(
        "eigh",
        "eigh",
        "qr",
        "power",
        "partial",
        bad="jacobi",
        live={
            "solver": {"solver": "qr", "tau": 0.05},
            "power": {"solver": "power"},
            "partial": {"solver": "partial", "tau": 0.3},
        },
    ),
    "qr_iterations": Keyword(tuple(range(1, 7)), ((0, "at least 1"),)),
    "beta3": Keyword(
        (None, 0.5, 1.0),
        ((1.5, "[0, 1]"), (-0.5, "[0, 1]")),
        wrong=("0.9",),
        live={"beta3": {"beta3": 0.5}},
        methods=CORRECTED,
    ),
    "correction": choice(
        "naive",
        "basis_aware",
        "optimal",
        bad="none",
        live={"correction": {"correction": "basis_aware"}},
        fixed="optimal",
        methods=CORRECTED,
    ),
    "vectors": choice("adam", "full", bad="shampoo", fixed="full"),
    "matrices": choice(
        "kronecker", "kronecker", "kronecker", "adam", bad="full", fixed="adam", methods=EVERYONE
    ),
    "max_dim": Keyword(tuple(range(2, 25)), ((0, "at least 1"),), fixed=2, methods=BLOCKED),
    "oversize": choice("split", "identity", bad="merge", fixed="identity", methods=BLOCKED),
    "merge_dims": Keyword(
        (False, True, "kernel"), (("all", "False, True, 'kernel'"),), fixed=True, methods=BLOCKED
    ),
    "sides": choice(
        "both",
        "both",
        "left",
        "right",
        "smaller",
        bad="upper",
        fixed="right",
        methods=BLOCKED,
    ),
    # What it keeps in fewer bits is far from the oracles: tests/state/test_lean.py has it.
    "state": Keyword(("full",), (("half", "'full', 'lean'"),), fixed="lean"),
    "moment": choice(
        "entry",
        "entry",
        "row",
        "block",
        bad="column",
        fixed="row",
        methods=("EShampoo", "SOAP", *GRAFTED),
    ),
    "exponent": Keyword(
        (0.5, 0.5, 0.5, 0.25, 1.0),
        ((0.0, "more than 0"), (-0.5, "more than 0"), (NAN, "more than 0")),
        wrong=(None, "half"),
        live={"exponent": {"exponent": 0.3}},
    ),
    # Without observations it changes nothing but that there is no basis.
    "statistics": choice(
        "step", "step", "observe", bad="sampled", fixed="observe", methods=OBSERVING
    ),
    "rms": Keyword(
        (None, None, 0.4),
        ((0.0, "more than 0"), (-0.4, "more than 0"), (NAN, "more than 0")),
        wrong=("large",),
        live={"rms": {"rms": 0.1}},
        methods=("EShampoo", "SOAP", "KLShampoo", "FullMatrixAdam"),  # Shampoo has a graft
    ),
    "nesterov": switch(live={"nesterov": {"nesterov": True}}, methods=EVERYONE),
    "maximize": switch(live={"maximize": {"maximize": True}}, methods=EVERYONE),
    "process_group": Keyword((None,), methods=EVERYONE),
    "nonfinite": choice("skip", "raise", "propagate", bad="ignore", methods=EVERYONE),
    "precision": choice("highest", "inherit", bad="high", methods=EVERYONE),
    "record": switch(),
    # Muon's own.
    "momentum": Keyword(
        (0.95, 0.5),
        ((1.0, "[0, 1)"), (-0.1, "[0, 1)")),
        live={"momentum": {"momentum": 0.3}},
        methods=("Muon",),
    ),
    "ns_steps": Keyword(
        (5, 3), ((0, "at least 1"),), live={"ns_steps": {"ns_steps": 2}}, methods=("Muon",)
    ),
    # Shampoo's own, and of those who graft.
    "variant": choice(
        "shampoo",
        "shampoo2",
        bad="shampoo3",
        live={"variant": {"variant": "shampoo2"}},
        methods=("Shampoo",),
    ),
    "trace_scaling": switch(live={"trace_scaling": {"trace_scaling": True}}, methods=("Shampoo",)),
    "graft": choice(
        None,
        "adam",
        "rmsprop",
        "adagrad",
        "sgd",
        bad="lamb",
        live={"graft": {"graft": "rmsprop"}},
        fixed=None,
        methods=GRAFTED,
    ),
    "graft_scope": choice(
        "block",
        "parameter",
        bad="layer",
        live={"graft_scope": {"graft_scope": "block"}},
        methods=GRAFTED,
    ),
    "eigenvalues": choice(
        "stale",
        "fresh",
        bad="old",
        live={"eigenvalues": {"eigenvalues": "fresh", "tau": 1.0}},
        methods=("Shampoo",),
    ),
}


def choices(name):
    """What a keyword can be, each once."""
    return list(dict.fromkeys(KEYWORDS[name].values))


def keywords_of(method):
    """The keywords that mean something to a method."""
    return {name: keyword for name, keyword in KEYWORDS.items() if method in keyword.methods}


def live_changes(keywords):
    """Every change of these keywords that takes effect in a running optimizer, by name."""
    return {name: change for k in keywords for name, change in k.live.items()}


# The rules of the paper, where the defaults are our own.
PAPER = {"budget": None, "rms": None}

# Problems -----------------------------------------------------------------------------------------


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


def check_offsets(optimizer, params):
    """By how much of the gap the checks of each block come earlier, with frequency="auto"."""
    numbers = {p: number for number, p in enumerate(params)}
    return {
        (numbers[block.parameter], block.number): block.check_offset
        for bucket in optimizer._buckets
        for block in bucket.blocks
    }


class Pair:
    """The library and its oracle with the same parameters and options."""

    def __init__(self, method, tensors, dtype=torch.float64, **options):
        self.params = parameters(tensors, dtype)
        self.optimizer = getattr(eshampoo, method)(self.params, **options)
        self.oracle = getattr(oracles, method)(self.params, **options)
        for (number, block), offset in check_offsets(self.optimizer, self.params).items():
            self.oracle.blocks[number][block].offset = offset

    def change(self, **values):
        """Write new values into the param group."""
        self.optimizer.param_groups[0].update(values)
        for name, value in values.items():
            setattr(self.oracle, name, value)

    def step(self, grads):
        feed(self.params, grads)
        self.optimizer.step()
        self.oracle.step(grads)

    def observe(self, grads):
        feed(self.params, grads)
        self.optimizer.observe()
        self.oracle.observe(grads)

    def distance(self):
        return furthest(self.params, self.oracle.params)

    def assert_equal(self, tolerance, when=""):
        for W, V in zip(self.params, self.oracle.params, strict=True):
            torch.testing.assert_close(
                W.detach().double(),
                V,
                rtol=0,
                atol=tolerance,
                msg=lambda m, s=tuple(W.shape): f"shape {s} {when}: {m}",
            )


def thinned(rows, features):
    """Rows for `parametrize`, by their names; one whose features all came before is slow."""
    seen, params = set(), []
    for name, row in rows.items():
        own = set(features(*row))
        marks = [pytest.mark.slow] if own <= seen else []
        params.append(pytest.param(*row, id=name, marks=marks))
        seen |= own
    return params


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


def trajectory(oracle, grads):
    """All parameters after every step, as one list of vectors."""
    points = []
    for step in grads:
        oracle.step(step)
        points.append(torch.cat([W.flatten() for W in oracle.params]))
    return torch.stack(points)


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


def checked(method, tau, steps=24, frequency=3, **options):
    """An optimizer after some steps on five factors of full rank, every third one with a check."""
    tensors, grads = problem([(4, 4), (3, 3, 3)], steps, condition=3.0)
    params = parameters(tensors)
    common = {"budget": None, "lr": 1e-2, "betas": (0.9, 0.9)}
    optimizer = METHODS[method](params, frequency=frequency, tau=tau, **{**common, **options})
    run(optimizer, params, grads)
    return optimizer


# Matrices -----------------------------------------------------------------------------------------


def orthogonal(count, d, seed=0):
    """Random orthogonal matrices."""
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(count, d, d, generator=generator, dtype=torch.float64)).Q


def departure(Q):
    """The largest entry of QᵀQ − I."""
    return (Q.mT @ Q - torch.eye(Q.shape[-1])).abs().max().item()


def factor_and_basis(seed, d):
    """A factor and a basis that is nearly its own: the situation in which the criterion matters."""
    rng = np.random.default_rng(seed)
    G = rng.standard_normal((d, d + 2)) * np.exp(rng.standard_normal((d, 1)))
    near = np.linalg.eigh(G @ G.T)[1] + 0.1 * rng.standard_normal((d, d))
    return G @ G.T, np.linalg.qr(near)[0]


def approximation_error(L, Q):
    """‖L − L̂‖_F / ‖L‖_F with L̂ = Q diag(Qᵀ L Q) Qᵀ: the criterion's left-hand side."""
    return np.linalg.norm(L - (Q * np.diag(Q.T @ L @ Q)) @ Q.T) / np.linalg.norm(L)


def off_diagonal_share(Λ):
    """‖Λ̂ − diag Λ̂‖_F / ‖Λ̂‖_F: its right-hand side."""
    return np.linalg.norm(Λ - np.diag(np.diag(Λ))) / np.linalg.norm(Λ)
