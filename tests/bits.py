"""Record what every method does, bit for bit, and compare another commit with the recording.

    python tests/bits.py record FILE      at the commit that is trusted
    python tests/bits.py compare FILE     at the commit that must not differ

For changes that rearrange the code and are meant to leave every number as it was. A recording holds
for one machine and one version of torch only, so it is never committed.
"""

import sys
import warnings
from itertools import product

import torch
from torch import nn

import eshampoo

METHODS = {
    "EShampoo": [{}, {"tau": 0.0}, {"beta3": 0.9}, {"nesterov": True}, {"maximize": True}]
    + [{"rms": None}, {"rms": None, "budget": None}]
    + [{"correction": c} for c in ("basis_aware", "optimal")]
    + [{"solver": s} for s in ("eigh", "qr", "partial")]
    + [{"solver": "power", "tau": 0.0}, {"vectors": "full"}, {"matrices": "adam"}]
    + [{"betas": (0.9, 1.0)}, {"nonfinite": "propagate"}, {"record": True, "frequency": 1}]
    + [{"state": "lean"}, {"state": "lean", "solver": "qr"}, {"sides": "left"}]
    + [{"sides": "smaller"}, {"moment": "row", "merge_dims": False}, {"moment": "block"}]
    + [{"exponent": 1.0}, {"statistics": "observe"}, {"merge_dims": "kernel"}]
    + [{"rms": 0.4}, {"factors": "kl"}, {"batch_dims": 1}]
    + [{"frequency": "auto", "budget": None, "betas": (0.9, beta2)} for beta2 in (0.95, 0.999)],
    "Shampoo": [{"graft": g} for g in (None, "adam", "rmsprop", "adagrad", "sgd")]
    + [{"variant": "shampoo2", "trace_scaling": t, "graft": None} for t in (False, True)]
    + [{"graft_scope": "block"}, {"eigenvalues": "fresh", "tau": 0.2}, {"nesterov": True}]
    + [{"state": "lean"}, {"exponent": 1.0}, {"statistics": "observe"}]
    + [{"solver": s, "tau": 0.1} for s in ("qr", "partial", "power")],
    "SOAP": [
        {},
        {"solver": "eigh"},
        {"nesterov": True},
        {"correction": "basis_aware"},
        {"rms": 0.3},
        {"state": "lean"},
    ],
    "KLShampoo": [
        {},
        {"tau": 0.1},
        {"solver": "qr", "tau": 0.1},
        {"nesterov": True},
        {"state": "lean"},
        {"statistics": "observe"},
    ],
    "CASPR": [{}, {"rms": "auto"}, {"tau": 0.1}],
    "Muon": [{}, {"nesterov": False}, {"momentum": 0.9, "ns_steps": 3}],
    "FullMatrixAdam": [{}, {"tau": 0.0, "correction": "optimal"}],
}
LAYOUTS = [
    {"merge_dims": True, "max_dim": 64},
    {"merge_dims": False, "max_dim": 64},
    {"merge_dims": False, "max_dim": 5},
    {"merge_dims": False, "max_dim": 8, "oversize": "identity"},
]
SHAPES = [
    (),
    (1,),
    (6,),
    (300,),
    (4, 3),
    (12, 7),
    (12, 7),
    (1, 5),
    (5, 1, 3),
    (4, 3, 2),
    (4, 3, 2, 2),
]
STEPS = 14


def trajectory(name, options, dtype, threads):
    """Parameters and state after every step, with gaps, a NaN and a change of the rate."""
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(1)
    shapes = [s for s in SHAPES if name != "FullMatrixAdam" or torch.Size(s).numel() <= 64]

    def draw(shape):
        return torch.randn(shape, generator=generator, dtype=dtype)

    params = [nn.Parameter(draw(shape)) for shape in shapes]
    own = {} if name == "Muon" else {"frequency": 3}
    optimizer = getattr(eshampoo, name)(params, **{"lr": 1e-2, **own, **options})
    seen = []
    for t in range(1, (45 if options.get("frequency") == "auto" else STEPS) + 1):
        for n, p in enumerate(params):
            p.grad = draw(p.shape) * 10.0 ** (n % 3 - 1)
            if (t + n) % 11 == 0:
                p.grad = None
            elif (t, n) == (5, 5) and options.get("nonfinite") != "propagate":
                p.grad[0, 0] = torch.nan
        if options.get("statistics") == "observe" and t > 2:
            optimizer.observe()
        if t == 8:
            optimizer.param_groups[0].update(lr=3e-3, weight_decay=0.1)
        optimizer.step()
        seen.append([p.detach().clone() for p in params])
    state = optimizer.state_dict()["state"]
    return seen, state, [tuple(report) for report in optimizer.basis_report()]


def large(name):
    """Matrices large enough for several parts, Gram matrices in strips and cut stacks."""
    torch.set_num_threads(2)
    generator = torch.Generator().manual_seed(2)
    shapes = [(400, 300)] * 5 + [(64, 64)] * 40 + [(700,)] * 9
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    own = {} if name == "Muon" else {"frequency": 3, "max_dim": 512}
    optimizer = getattr(eshampoo, name)(params, lr=1e-2, **own)
    for _ in range(7):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
    return [p.detach().clone() for p in params], optimizer.state_dict()["state"], []


def trajectories():
    """Everything that is recorded, by name."""
    small = {"FullMatrixAdam": [{"max_dim": 64}], "Muon": [{}]}
    for name, rows in METHODS.items():
        for options, layout, dtype, threads in product(
            rows, small.get(name, LAYOUTS), (torch.float32, torch.float64), (1, 2)
        ):
            if threads == 1 or not options:  # threads matter for all options alike
                key = f"{name} {options} {layout} {dtype} {threads}"
                yield key, trajectory(name, {**layout, **options}, dtype, threads)
    for name in ("EShampoo", "Shampoo", "SOAP", "KLShampoo", "CASPR", "Muon"):
        yield f"large {name}", large(name)


def differences(a, b, where=""):
    """Where two nested structures of tensors are not the same bits."""
    if isinstance(a, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape
        if not same or not torch.equal(a.nan_to_num(7.25), b.nan_to_num(7.25)):
            yield where
    elif isinstance(a, dict):
        if a.keys() != b.keys():
            yield f"{where} keys {sorted(a, key=str)} {sorted(b, key=str)}"
        for key in a.keys() & b.keys():
            yield from differences(a[key], b[key], f"{where}[{key!r}]")
    elif isinstance(a, list | tuple):
        if len(a) != len(b):
            yield f"{where} length {len(a)} {len(b)}"
        for n, (x, y) in enumerate(zip(a, b, strict=False)):
            yield from differences(x, y, f"{where}[{n}]")
    elif a != b and not (a != a and b != b):
        yield f"{where}: {a} {b}"


def main():
    warnings.simplefilter("ignore")
    verb, file = sys.argv[1:]
    if verb == "record":
        torch.save(dict(trajectories()), file)
        return 0
    recorded, wrong, count = torch.load(file, weights_only=False), 0, 0
    for key, now in trajectories():
        found = list(differences(recorded[key], now))
        wrong, count = wrong + bool(found), count + 1
        if found:
            print(f"{key}: {len(found)} differences, first {found[0]}")
    print(f"{count} trajectories of {len(recorded)}, {wrong} differ")
    return wrong > 0 or count != len(recorded)


if __name__ == "__main__":
    sys.exit(main())
