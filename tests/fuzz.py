"""Anything at all against the oracles: random shapes, dtypes, memory formats, options, groups,
missing gradients, and values that change on the way.

    python tests/fuzz.py --cases 10000 [--seed S]

runs that many cases in rounds of 250, each with its seed printed; a mismatch is shrunk by
hypothesis, printed as a `Case(...)` to be pasted into `CORPUS`, and ends the run with code 1. A few
hundred cases, and the corpus, are part of the tests (test_fuzz.py).

A case is compared tightly where the problem is well posed: bases are not computed before every
factor has full rank, because the basis of a null space is arbitrary. Parameters in float64 must
agree to 1e-9 after every step, those in lower precision to what their rounding amounts to. Close
eigenvalues magnify rounding; a case further off than that is still a match if the oracle itself,
with gradients and factors disturbed in their last bits, moves as far. A lean state rounds more, so
there the oracle is always disturbed, by the rounding of the momentum.
"""

import argparse
import math
import sys
import time
import warnings
from dataclasses import dataclass, field

import oracles
import torch
from beside_oracles import check_offsets, full_rank_after
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from keyword_table import ALL, EVERYONE, keywords_of, live_changes
from torch import nn
from training import BALANCED

import eshampoo

ROUND = 250
TIGHT = 1e-9  # float64
EPSILON = {dtype: torch.finfo(dtype).eps for dtype in (torch.float64, torch.float32)}
ROUNDED = {torch.float64: torch.float32, torch.float32: torch.bfloat16}  # M̃ of a lean state
DISTURBANCES = 3
MAGNIFIED = 30.0  # how much further than the disturbed oracle a case may be

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class Parameter:
    """One parameter: its shape, dtype, how it and its gradients lie in memory, and its group."""

    shape: tuple[int, ...]
    dtype: str = "float64"
    layout: str = "contiguous"
    grad_layout: str = "contiguous"
    group: int = 0


@dataclass(frozen=True)
class Case:
    """An optimizer with its groups, its parameters, and what happens to them."""

    method: str
    groups: tuple[dict, ...]
    parameters: tuple[Parameter, ...]
    extra: int = 0  # F is so much larger than needed for full rank
    missing: frozenset[tuple[int, int]] = frozenset()  # (step, parameter) without a gradient
    changes: dict = field(default_factory=dict)  # written into group 0 after the first check
    seed: int = 0


# What there is ------------------------------------------------------------------------------------

SHAPE = st.lists(st.integers(1, 4), max_size=5).map(tuple).filter(lambda s: math.prod(s) <= 24)
SQUARE = [*BALANCED, (1,), (2, 2), (2, 2, 1, 2, 2)]
# A number F is chosen for each case, and there is one process.
DRAWN = {
    method: {
        name: st.sampled_from(keyword.values)
        for name, keyword in keywords_of(method).items()
        if name not in ("frequency", "process_group")
    }
    | ({"frequency": st.sampled_from(["a number", "auto"])} if method in ALL else {})
    | ({"state": st.sampled_from(["full", "full", "full", "lean"])} if method in ALL else {})
    for method in EVERYONE
}
# These keywords do nothing to finite gradients, or to exact numbers: the oracles do not have them.
WITHOUT_EFFECT = ("nonfinite", "precision", "record", "state")
# What may be written into a running group, one or two at a time: every live keyword of a method.
CHANGES = {
    method: [
        *live_changes(keywords_of(method).values()).values(),
        *([{"tau": 0.15}, {"tau": 0.0, "frequency": 1}] if method in ALL else []),
    ]
    for method in EVERYONE
}


@st.composite
def cases(draw) -> Case:
    """Any case that is well posed."""
    method = draw(st.sampled_from(["EShampoo", "EShampoo", *EVERYONE]))
    options = st.fixed_dictionaries(DRAWN[method])
    groups = tuple(draw(st.lists(options, min_size=1, max_size=2)))
    shape = st.sampled_from(SQUARE) if method == "SOAP" else SHAPE
    layouts = st.sampled_from(["contiguous", "contiguous", "transposed", "channels_last", "sliced"])
    parameter = st.builds(
        Parameter,
        shape=shape,
        dtype=st.sampled_from(["float64", "float64", *DTYPES]),
        layout=layouts,
        grad_layout=layouts,
        group=st.integers(0, len(groups) - 1),
    )
    changes: dict = {}
    for change in draw(st.lists(st.sampled_from(CHANGES[method]), max_size=2)):
        changes = {**changes, **change}
    parameters = tuple(draw(st.lists(parameter, min_size=1, max_size=4)))
    return Case(
        method=method,
        groups=tuple(
            posed(method, divisible(group, [p.shape for p in parameters if p.group == g]))
            for g, group in enumerate(groups)
        ),
        parameters=parameters,
        extra=draw(st.integers(0, 2)),
        missing=frozenset(draw(st.sets(st.tuples(st.integers(1, 20), st.integers(0, 3))))),
        changes=changes,
        seed=draw(st.integers(0, 2**20)),
    )


def divisible(options: dict, shapes: list[tuple[int, ...]]) -> dict:
    """The options, in one piece if the matrices in parameters of these shapes cannot be cut."""
    heights = [shape[options["batch_dims"]] for shape in shapes if shape[options["batch_dims"] :]]
    whole = any(height % options["pieces"] for height in heights)
    return {**options, "pieces": 1} if whole else options


def posed(method: str, options: dict) -> dict:
    """The options, without those that make a problem ill-posed."""
    if method == "SOAP":  # its first basis comes from one gradient: only whole square blocks
        options = {**options, "vectors": "adam", "merge_dims": False, "max_dim": 24, "pieces": 1}
    if options.get("sides", "both") != "both":  # a vector has one side
        options = {**options, "vectors": "adam"}
    if "moment" in options and options.get("correction") == "optimal":  # it needs every entry of D
        options = {**options, "moment": "entry"}
    if options.get("moment") == "row":  # a block of one mode has no rows
        options = {**options, "vectors": "adam", "merge_dims": False}
    if options.get("graft") is not None:  # both set the size of an update
        options = {**options, "rms": None}
    return options


# One case -----------------------------------------------------------------------------------------


def laid_out(X: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values in another order in memory."""
    if layout == "transposed" and X.dim() >= 2:
        return X.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "channels_last" and X.dim() == 4:
        return X.contiguous(memory_format=torch.channels_last)
    if layout == "sliced" and X.dim() >= 1:
        wide = X.new_zeros(*X.shape[:-1], 2 * X.shape[-1])
        wide[..., ::2] = X
        return wide[..., ::2]
    return X.contiguous()


@dataclass(frozen=True)
class Late:
    """A τ, from step F on; before, no basis is computed."""

    F: int
    tau: object

    def __call__(self, t: int) -> float:
        return 1.0 if t < self.F else self.tau(t) if callable(self.tau) else self.tau


class Trial:
    """The library on the parameters of a case, and the oracles, one for each group."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.offsets: dict[
            tuple[int, int], float
        ] = {}  # of the checks, as the library spreads them
        generator = torch.Generator().manual_seed(case.seed)

        def draw(shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.dtypes = [DTYPES[p.dtype] for p in case.parameters]
        self.initial = [
            draw(p.shape).to(t) for p, t in zip(case.parameters, self.dtypes, strict=True)
        ]
        spread = [3.0 ** draw(p.shape).clamp(-1, 1) for p in case.parameters]
        first = self.oracles(F=1)
        needed = max(full_rank_after(oracle) for oracle in first.values())
        if any(dtype != torch.float64 for dtype in self.dtypes):
            # In the basis of a single gradient that gradient is diagonal, and the rest is rounding:
            # below ε in float64, not in float32.
            needed = max(needed, 2)
        self.frequency = needed + case.extra
        self.steps = min(2 * self.frequency + 3, 60)
        self.grads = [
            [
                None if (t, i) in case.missing else (draw(p.shape) * spread[i]).to(self.dtypes[i])
                for i, p in enumerate(case.parameters)
            ]
            for t in range(1, self.steps + 1)
        ]

    def options(self, group: int, F: int) -> dict:
        own = self.case.groups[group]
        if self.case.method == "Muon":  # has no basis
            return own
        if own.get("frequency") != "auto":
            return {**own, "frequency": F}
        if self.case.method == "SOAP":  # has a basis from the start
            return own
        return {**own, "tau": Late(F, own["tau"])}

    def members(self, group: int) -> list[int]:
        return [i for i, p in enumerate(self.case.parameters) if p.group == group]

    def oracles(self, F: int) -> dict[int, oracles.Oracle]:
        """An oracle for every group that has parameters."""
        build = getattr(oracles, self.case.method)
        members = {g: self.members(g) for g in range(len(self.case.groups))}
        found = {
            g: build(
                [self.initial[i].double() for i in own],
                **{k: v for k, v in self.options(g, F).items() if k not in WITHOUT_EFFECT},
            )
            for g, own in members.items()
            if own
        }
        for g, oracle in found.items():
            for i, blocks in zip(members[g], oracle.blocks, strict=True):
                for number, block in enumerate(blocks):
                    block.offset = self.offsets.get((i, number), 0.0)
        return found

    def change_at(self, t: int) -> bool:
        # Gradients may be missing: bases are only computed at full rank if F divides t before.
        return t == self.frequency + 1 and bool(self.case.changes)

    def changes(self) -> dict:
        now = self.case.groups[0]
        left = set()
        if any(t <= self.frequency for t, _ in self.case.missing):
            left |= {"frequency", "tau"}  # a check might come at which a basis is ill-posed
        if now.get("correction") == "optimal" or now.get("moment", "entry") != "entry":
            left |= {"correction"}  # the state was laid out by it, or has no entries for it
        if now.get("graft") not in ("adam", "rmsprop", "adagrad"):
            left |= {"graft"}  # the others keep no second moment
        offered = keywords_of(self.case.method)
        own = {k: v for k, v in self.case.changes.items() if k in offered and k not in left}
        return posed(self.case.method, own) if "eps" in own else own

    def follow(self, disturbance: float = 0.0, rounding: float = 0.0, seed: int = 0):
        """The parameters as the oracles have them after every step.

        With a disturbance of the gradients, and a rounding of the factors.
        """
        generator = torch.Generator().manual_seed(seed)
        running = self.oracles(self.frequency)
        trace = []
        for t, step in enumerate(self.grads, start=1):
            if self.change_at(t) and 0 in running:
                for name, value in self.changes().items():
                    setattr(running[0], name, value)
            current: list[torch.Tensor] = [None] * len(step)
            for g, oracle in running.items():
                own = [None if step[i] is None else step[i].double() for i in self.members(g)]
                if disturbance:
                    noise = [
                        None if G is None else torch.randn(G.shape, generator=generator).double()
                        for G in own
                    ]
                    own = [
                        None if G is None else G * (1 + disturbance * n)
                        for G, n in zip(own, noise, strict=True)
                    ]
                if oracle.statistics == "observe":
                    oracle.observe(observed(own))
                oracle.step(own)
                if rounding:
                    round_factors_(oracle, rounding, generator)
                for i, W in zip(self.members(g), oracle.params, strict=True):
                    current[i] = W.clone()
            trace.append(current)
        return trace

    def run(self):
        """The parameters as the library has them after every step."""
        params = [
            nn.Parameter(laid_out(W.clone(), p.layout))
            for W, p in zip(self.initial, self.case.parameters, strict=True)
        ]
        groups = [
            {"params": [params[i] for i in self.members(g)], **self.options(g, self.frequency)}
            for g in range(len(self.case.groups))
            if self.members(g)
        ]
        optimizer = getattr(eshampoo, self.case.method)(groups)
        self.offsets = check_offsets(optimizer, params)
        strides = [p.stride() for p in params]
        trace = []
        for t, step in enumerate(self.grads, start=1):
            if self.change_at(t) and self.members(0):
                optimizer.param_groups[0].update(self.changes())
            calls = [(step, optimizer.step)]
            if any(group.get("statistics") == "observe" for group in groups):
                calls.insert(0, (observed(step), optimizer.observe))
            for grads, see in calls:
                for W, G, p in zip(params, grads, self.case.parameters, strict=True):
                    W.grad = None if G is None else laid_out(G, p.grad_layout)
                see()
            trace.append([p.detach().double().clone() for p in params])
        assert strides == [p.stride() for p in params], "memory formats changed"
        return trace

    def is_lean(self, i: int) -> bool:
        return self.case.groups[self.case.parameters[i].group].get("state") == "lean"

    def disturbed(self, i: int, seed: int):
        """The oracles with what rounding in the state of a parameter comes to."""
        dtype = torch.promote_types(self.dtypes[i], torch.float32)
        disturbance = torch.finfo(ROUNDED[dtype]).eps if self.is_lean(i) else 4 * EPSILON[dtype]
        # One rounding of the factors: what it comes to is magnified when it is compared.
        return self.follow(disturbance, EPSILON[dtype] / MAGNIFIED, seed)

    def tolerances(self, oracle):
        """Per step and parameter: how far rounding alone may bring them apart."""
        largest = [1.0] * len(self.dtypes)
        for t, current in enumerate(oracle, start=1):
            row = []
            for i, (W, dtype) in enumerate(zip(current, self.dtypes, strict=True)):
                largest[i] = max(largest[i], W.abs().max().item())
                if dtype == torch.float64:
                    row.append(TIGHT)
                else:  # each step rounds the parameter, and its direction to float32
                    row.append(t * largest[i] * torch.finfo(dtype).eps + 3e-6 * t)
            yield row


def round_factors_(oracle: oracles.Oracle, rounding: float, generator: torch.Generator) -> None:
    """Disturb the factors whose basis changed, by what VᵀΛ̂V rounds: a share of its largest entry.

    QR divides by small eigenvalues, so there this counts for more than the gradients' last bits.
    The diagonal of the full matrix of correction="optimal" can be small too.
    """
    for block in (block for blocks in oracle.blocks for block in blocks):
        changed = [
            L
            for L, history in zip(block.L, block.history, strict=True)
            if history and history[-1][0] == block.age and history[-1][2]
        ]
        for A in [*changed, *([block.A] if isinstance(block.A, torch.Tensor) else [])]:
            noise = torch.randn(A.shape, generator=generator, dtype=A.dtype)
            A += rounding * A.abs().max() * (noise + noise.T) / 2


def observed(grads):
    """What is observed before a step: its gradients turned round, in other places than they are."""
    return [None if G is None else 0.5 * G.flip(tuple(range(G.dim()))) for G in grads]


def gaps(a, b):
    return [(x - y).abs().max().item() for x, y in zip(a, b, strict=True)]


def check(case: Case) -> bool:
    """Raise if library and oracle differ; True if a disturbed oracle had to be asked."""
    trial = Trial(case)
    ours, oracle = trial.run(), trial.follow()
    allowed = list(trial.tolerances(oracle))
    apart = [gaps(a, b) for a, b in zip(ours, oracle, strict=True)]
    off = {
        i
        for row, limit in zip(apart, allowed, strict=True)
        for i, (gap, most) in enumerate(zip(row, limit, strict=True))
        if not gap <= most
    }
    if not off:
        return False
    # How far rounding in the state's precision moves the oracle itself.
    for i in sorted(off):
        others = [trial.disturbed(i, k) for k in range(DISTURBANCES)]
        for t, (row, limit) in enumerate(zip(apart, allowed, strict=True)):
            moved = max(gaps(other[s], oracle[s])[i] for other in others for s in range(t + 1))
            if not row[i] <= limit[i] + MAGNIFIED * moved:
                raise AssertionError(
                    f"parameter {i} is {row[i]:.3g} from the oracle after step {t + 1}; rounding "
                    f"allows {limit[i]:.3g}, and a disturbed oracle moves {moved:.3g}\n{case}"
                )
    return not all(map(trial.is_lean, off))


# Cases that once failed, also those where the oracle or this file was wrong; test_fuzz.py has them
# as examples.
CORPUS = [
    # One element alone is Adam also in FullMatrixAdam, with its β3.
    Case(
        "FullMatrixAdam",
        ({"beta3": 0.5, "correction": "optimal", "vectors": "full", "lr": 1e-2},),
        (Parameter(()),),
    ),
    # A rotation that leaves the last mode out returns a permuted stack, and what was written into
    # its chunks was lost: the raw gradient became the update.
    Case(
        "EShampoo",
        ({"oversize": "identity", "max_dim": 2, "merge_dims": False, "tau": 0.0, "lr": 1e-2},),
        (Parameter((1, 2)), Parameter((2, 2, 3))),
    ),
    # F = 1 in float32: ill-posed, now F = 2.
    Case(
        "EShampoo",
        ({"max_dim": 2, "merge_dims": False, "tau": 0.0, "lr": 1e-2},),
        (Parameter(()), Parameter((2, 2), dtype="float32")),
    ),
    # vectors="adam" holds for FullMatrixAdam too.
    Case("FullMatrixAdam", ({"vectors": "adam", "tau": 0.0, "lr": 1e-2},), (Parameter((2,)),)),
    # D* is an average with β2, also for the bound.
    Case(
        "EShampoo",
        ({"betas": (0.0, 0.9), "correction": "optimal", "beta3": 0.5, "tau": 0.0, "rms": 0.4},),
        (Parameter((2, 2)),),
    ),
    # Factors of one size in a group with a full state and in one with a lean state, at one check.
    Case(
        "CASPR",
        ({"tau": 0.0, "lr": 1e-2}, {"tau": 0.0, "lr": 1e-2, "state": "lean"}),
        (Parameter((2, 2)), Parameter((2, 2), group=1)),
    ),
    # QR of a Λ̂ whose first columns belong to small eigenvalues: 1e-7 of it is 1e-3 of V.
    Case(
        "EShampoo",
        (
            {
                "betas": (0.9, 0.95),
                "lr": 1e-2,
                "weight_decay": 0.0,
                "tau": 0.0,
                "rms": None,
                "budget": None,
                "solver": "qr",
                "qr_iterations": 2,
                "max_dim": 12,
                "merge_dims": True,
                "frequency": "auto",
            },
        ),
        (Parameter((3, 4), dtype="float32"),),
        changes={"lr": 0.05},
    ),
]


def random_cases(count: int) -> settings:
    """Hypothesis draws `count` new cases, and shrinks one that fails."""
    return settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )


def fuzz(number: int, first_seed: int) -> int:
    """Run the cases in rounds; how many did not match."""
    done = magnified = 0
    begin = time.perf_counter()
    while done < number:
        count = min(ROUND, number - done)
        ran = 0

        @seed(first_seed)
        @random_cases(count)
        @given(case=cases())
        def attempt(case):
            nonlocal ran, magnified
            ran += 1
            magnified += check(case)

        try:
            attempt()
        except AssertionError as error:
            print(f"seed {first_seed}: MISMATCH\n{error}", flush=True)
            return 1
        done += ran
        seconds = time.perf_counter() - begin
        print(
            f"seed {first_seed}: {done} cases match ({magnified} of them ill-conditioned), "
            f"{seconds:.0f} s",
            flush=True,
        )
        first_seed += 1
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 1_000_000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "nothing here has a basis")
    print(f"fuzzing {arguments.cases} cases from seed {arguments.seed}", flush=True)
    return fuzz(arguments.cases, arguments.seed)


if __name__ == "__main__":
    sys.exit(main())
