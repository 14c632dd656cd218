"""Models, gradients and options whose factors soon have full rank, so that bases are unique."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

import eshampoo
from eshampoo import schedules

STEPS = 30

# Several basis changes each, blocks with ragged ends, momentum and decay.
OPTIONS = {
    "EShampoo": {"frequency": 6, "tau": 0.0, "max_dim": 16},
    "adaptive": {"frequency": 6, "tau": 0.15, "max_dim": 24},
    "partial": {"frequency": 6, "tau": 0.1, "solver": "partial", "max_dim": 24},
    "auto": {
        "frequency": "auto",
        "betas": (0.9, 0.99),
        "tau": schedules.piecewise((6,), (1.0, 0.0)),
        "max_dim": 24,
    },
    "rationed": {
        "frequency": 2,
        "novelty": 0.5,
        "budget": 0.0,
        "tau": schedules.piecewise((6,), (1.0, 0.0)),
        "max_dim": 24,
    },
    "KL factors": {"frequency": 6, "tau": 0.0, "max_dim": 24, "factors": "kl"},
    "Shampoo": {"frequency": 6, "max_dim": 24},
    "block graft": {"frequency": 6, "max_dim": 24, "graft_scope": "block", "graft": "sgd"},
    "SOAP": {"frequency": 5, "lr": 1e-3},
    "KLShampoo": {"frequency": 6, "max_dim": 24},
    "CASPR": {"frequency": 6, "max_dim": 24},
    "one side": {"frequency": 6, "tau": 0.0, "max_dim": 24, "sides": "right", "exponent": 0.4},
    "rows": {"frequency": 6, "tau": 0.0, "max_dim": 24, "moment": "row", "merge_dims": False},
    "Muon": {},
    "observed": {"frequency": 6, "tau": 0.0, "max_dim": 24, "statistics": "observe"},
    "lean": {"frequency": 6, "tau": 0.0, "max_dim": 16, "state": "lean"},
}
CLASSES = {
    "adaptive": "EShampoo",
    "partial": "EShampoo",
    "auto": "EShampoo",
    "rationed": "EShampoo",
    "KL factors": "EShampoo",
    "block graft": "Shampoo",
    "one side": "EShampoo",
    "rows": "EShampoo",
    "observed": "EShampoo",
    "lean": "EShampoo",
}


def optimizer(method, params, **more):
    """An optimizer of the table."""
    made = getattr(eshampoo, CLASSES.get(method, method))
    return made(params, **{"lr": 1e-3, "weight_decay": 0.1, **OPTIONS[method], **more})


class Net(nn.Module):
    """An embedding cut into blocks, uneven layers, a norm and a convolution."""

    outputs = 30

    def __init__(self, tokens=40, width=12, hidden=23):
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.up = nn.Linear(width, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.down = nn.Linear(hidden, 20)
        self.conv = nn.Conv1d(4, 6, 3, padding=1)

    def forward(self, x):
        h = torch.tanh(self.up(self.embedding(x)))
        return self.conv(torch.tanh(self.down(self.norm(h))).view(-1, 4, 5)).flatten(1).clone()


class Square(nn.Module):
    """Square layers: SOAP takes its first basis from one gradient, which must have full rank."""

    outputs = 15

    def __init__(self, width=15):
        super().__init__()
        self.up = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.down = nn.Linear(width, width)
        self.conv = nn.Conv1d(5, 5, 3, padding=1)
        self.register_buffer("table", torch.randn(40, width))

    def forward(self, x):
        h = torch.tanh(self.down(self.norm(torch.tanh(self.up(self.table[x])))))
        return self.conv(h.reshape(-1, 5, 3)).flatten(1).clone()


class Parallel(nn.Module):
    """A feed-forward block for tensor parallelism, and a convolution beside it.

    The inner width is cut evenly by 2, the outer one is not.
    """

    outputs = 15
    hidden, channels = 22, 5

    def __init__(self):
        super().__init__()
        width = self.outputs
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, self.hidden)
        self.down = nn.Linear(self.hidden, width)
        self.conv = nn.Conv1d(self.channels, self.channels, 3, padding=1)
        self.register_buffer("table", torch.randn(40, width))

    def forward(self, x):
        h = torch.tanh(self.down(torch.tanh(self.up(self.norm(self.table[x])))))
        return self.conv(h.reshape(len(x), self.channels, -1)).flatten(1).clone()


class SquareParallel(Parallel):
    """For SOAP; see `Square`."""

    outputs = hidden = 16
    channels = 4


def make(kind=Net, dtype=torch.float64, seed=0):
    """A model with the same values wherever it is made."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return kind().to(dtype)


def batch(t, model, part=0, parts=1, dtype=torch.float64):
    """One of `parts` equal parts of the batch of step t, in which every token occurs."""
    generator = torch.Generator().manual_seed(t)
    x = torch.cat([torch.arange(40), torch.randint(40, (56,), generator=generator)])
    x = x[torch.randperm(96, generator=generator)]
    y = torch.randn(96, model.outputs, generator=generator, dtype=torch.float64).to(dtype)
    return x.chunk(parts)[part], y.chunk(parts)[part]


def train(model, optimizer, steps, part=0, parts=1, inner=None):
    """Take the steps t of a range on a part of every batch; observations are of other batches."""
    inner = model if inner is None else inner
    dtype = next(inner.parameters()).dtype

    def differentiate(t):
        x, y = batch(t, inner, part, parts, dtype)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()

    for t in steps:
        if optimizer.param_groups[0].get("statistics") == "observe":
            differentiate(1000 + t)
            optimizer.observe()
        differentiate(t)
        optimizer.step()


REFERENCES = {}


def reference(method, kind=Net, dtype=torch.float64, steps=STEPS):
    """The parameters of one process after `steps` steps; only on rank 0, which compares."""
    if dist.get_rank() > 0:
        return {}
    key = method, kind, dtype, steps
    if key not in REFERENCES:
        model = make(kind, dtype)
        one = optimizer(method, model.named_parameters())
        train(model, one, range(steps))
        reports = one.basis_report()
        F = 6 if method == "auto" else OPTIONS[method].get("frequency", steps)
        assert all(r.checks >= steps // F - 1 for r in reports)
        assert reports or method == "Muon"
        assert sum(r.computations for r in reports) >= len(reports)
        if method == "rationed":
            assert all(r.waited > 0 for r in reports)
        if method == "adaptive":
            assert any(r.computations < r.checks for r in reports)
        REFERENCES[key] = {n: p.detach() for n, p in model.named_parameters()}
    return REFERENCES[key]


def full(tensor):
    """All of a tensor, on every rank."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# -------------------------------------------------------------------- gradients without a model


def tensors(shapes, steps, seed=0, dtype=torch.float64):
    """Random parameters, and random gradients for every step."""
    generator = torch.Generator().manual_seed(seed)

    def draw(shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return [draw(s) for s in shapes], [[draw(s) for s in shapes] for _ in range(steps)]


def placed(values, placements, mesh):
    """Parameters with these values; placements None: a plain tensor."""
    return [
        nn.Parameter(
            v.clone() if where is None else distribute_tensor(v, mesh, where, src_data_rank=None)
        )
        for v, where in zip(values, placements, strict=True)
    ]


def feed(params, grads):
    """Set gradients, each placed like its parameter; None: none."""
    for p, grad in zip(params, grads, strict=True):
        if grad is None:
            p.grad = None
        elif isinstance(p, DTensor):
            p.grad = distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None)
        else:
            p.grad = grad.clone()
