"""examples/eshampoo_one_file.py ends where the library ends, and fits on a few screens."""

import importlib.util
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import nn

from eshampoo import EShampoo

PATH = Path(__file__).parents[1] / "examples" / "eshampoo_one_file.py"


@pytest.fixture
def one_file():
    spec = importlib.util.spec_from_file_location("eshampoo_one_file", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Transformer(nn.Module):
    """One layer; the 160 tokens of the embedding have no basis, its 16 features have one."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(160, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 20)

    def forward(self, tokens):
        return self.head(self.layer(self.embedding(tokens))).transpose(1, 2)


def mlp():
    return nn.Sequential(
        *(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
    )


def convolutions():
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 12, 3, stride=2), nn.Tanh()),
        *(nn.Flatten(), nn.Linear(48, 5)),
    )


def image_batch():
    return torch.randn(32, 3, 8, 8), torch.randint(5, (32,))


CASES = {
    "mlp": (mlp, lambda: (torch.randn(64, 20), torch.randint(4, (64,)))),
    "convolutions": (convolutions, image_batch),
    "transformer": (Transformer, lambda: (t := torch.randint(160, (16, 12)), t % 20)),
}


def difference(net, batch, ours, others, steps):
    """The largest difference of two copies of a net that are trained on the same batches."""
    nets = net, deepcopy(net)
    optimizers = ours(nets[0].parameters()), others(nets[1].parameters())
    for _ in range(steps):
        inputs, targets = batch()
        for model, optimizer in zip(nets, optimizers, strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    pairs = zip(nets[0].parameters(), nets[1].parameters(), strict=True)
    return max((p - q).abs().max().item() for p, q in pairs), optimizers


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_one_file_ends_where_the_library_ends(case, one_file):
    torch.manual_seed(0)
    build, batch = CASES[case]
    off, (library, _) = difference(
        *(build().double(), lambda: [x.double() if x.is_floating_point() else x for x in batch()]),
        # At three times this rate, the transformer's training makes 1e-10 of a last bit.
        *(lambda p: EShampoo(p, lr=1e-3), lambda p: one_file.EShampoo(p, lr=1e-3), 200),
    )
    assert off < 1e-10
    # The run means something: bases changed, and the budget made some of them wait.
    report = library.basis_report()
    assert max(row.computations for row in report) > 30
    assert max(row.waited for row in report) > 0


def test_blocks_and_frozen_parameters_agree_too(one_file, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(one_file, "MAX_DIM", 12)
    net = mlp().double()
    net[2].weight.requires_grad_(False)
    off, _ = difference(
        *(net, lambda: (torch.randn(64, 20).double(), torch.randint(4, (64,)))),
        lambda p: EShampoo(p, lr=3e-3, max_dim=12),
        lambda p: one_file.EShampoo(p, lr=3e-3),
        steps=60,
    )
    assert off < 1e-10


def test_the_state_of_the_one_file_survives_a_file(one_file, tmp_path):
    torch.manual_seed(0)
    net = mlp()
    optimizer = one_file.EShampoo(net.parameters())
    inputs, targets = torch.randn(16, 20), torch.randint(4, (16,))

    def step(model, optimizer):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    for _ in range(5):
        step(net, optimizer)
    torch.save([net.state_dict(), optimizer.state_dict()], tmp_path / "file.pt")
    again = mlp()
    resumed = one_file.EShampoo(again.parameters())
    weights, state = torch.load(tmp_path / "file.pt")
    again.load_state_dict(weights)
    resumed.load_state_dict(state)
    for _ in range(5):
        step(net, optimizer), step(again, resumed)
    for p, q in zip(net.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)


def test_the_one_file_stays_short_and_imports_torch_alone():
    lines = PATH.read_text().splitlines()
    assert len(lines) <= 250
    imported = {
        line.split()[1].split(".")[0] for line in lines if line.startswith(("import ", "from "))
    }
    assert imported == {"math", "collections", "itertools", "typing", "torch"}
