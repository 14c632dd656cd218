"""The methods, and what there is to try with each of their keywords."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch

from eshampoo import Muon, schedules
from eshampoo.classes import CLASSES

# Muon has no basis, and a test file of its own.
METHODS = {cls.__name__: cls for cls in CLASSES if cls is not Muon}

# Values that a user may write into a param group between two steps.
COMMON = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}

# The rules of the paper, where the defaults are our own.
PAPER = {"budget": None, "rms": None}

ALL = tuple(METHODS)
EVERYONE = (*ALL, "Muon")
BLOCKED = tuple(method for method in METHODS if method != "FullMatrixAdam")
# For tests that take long, so that `make check` has one method and `make test` all of them.
FIRST_IS_FAST = ["EShampoo", *(pytest.param(m, marks=pytest.mark.slow) for m in [*METHODS][1:])]
CORRECTED = ("EShampoo", "FullMatrixAdam")
GRAFTED = ("Shampoo",)
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
        (
            (-1e-3, "at least 0"),
            (NAN, "at least 0"),
            (torch.ones(2), "1-element"),
            (float("inf"), "finite"),
            (True, "a finite number"),
        ),
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
    "factors": choice("gram", "gram", "kl", bad="fisher", fixed="kl", methods=("EShampoo", "SOAP")),
    "batch_dims": Keyword((0, 0, 1), ((-1, "at least 0"),), fixed=1, methods=EVERYONE),
    "pieces": Keyword((1, 1, 2), ((0, "at least 1"),), fixed=2, methods=EVERYONE),
    # Without observations it changes nothing but that there is no basis.
    "statistics": choice(
        "step", "step", "observe", bad="sampled", fixed="observe", methods=OBSERVING
    ),
    "rms": Keyword(
        (None, "auto", "auto", 0.4),
        ((0.0, "more than 0"), (-0.4, "more than 0"), (NAN, "more than 0"), ("large", "'auto'")),
        live={"a fixed size": {"rms": 0.1}, "the size by the signal": {"rms": "auto"}},
        methods=("EShampoo", "SOAP", "KLShampoo", "FullMatrixAdam", "CASPR"),  # Shampoo has a graft
    ),
    "nesterov": switch(live={"nesterov": {"nesterov": True}}, methods=EVERYONE),
    "maximize": switch(live={"maximize": {"maximize": True}}, methods=EVERYONE),
    "process_group": Keyword((None,), methods=EVERYONE),
    "nonfinite": choice("skip", "raise", "propagate", bad="ignore", methods=EVERYONE),
    "precision": choice("highest", "high", "inherit", bad="low", methods=EVERYONE),
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
    # Shampoo's own.
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


def thinned(rows, features):
    """Rows for `parametrize`, by their names; one whose features all came before is slow."""
    seen, params = set(), []
    for name, row in rows.items():
        own = set(features(*row))
        marks = [pytest.mark.slow] if own <= seen else []
        params.append(pytest.param(*row, id=name, marks=marks))
        seen |= own
    return params
