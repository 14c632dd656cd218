"""Muon: its oracle, torch's own, and what it shares with the methods that have a basis."""

import copy

import pytest
import torch
from beside_oracles import compare
from torch import nn
from training import assert_same, parameters, problem, run, snapshot, through_a_file

from eshampoo import Muon, parameter_groups

SHAPES = [(), (6,), (5, 4), (4, 5), (4, 5), (3, 1, 4, 2), (1, 5), (40, 3)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False},
        {"matrices": "adam"},
        {"maximize": True},
        {"weight_decay": 0.0},
        {"momentum": 0.5, "ns_steps": 3},
    ],
)
def test_muon_follows_its_oracle(options):
    missing = {(3, 2), (4, 2), (7, 1)}
    compare("Muon", SHAPES, 30, tolerance=1e-9, missing=missing, **options)


def test_a_live_momentum_follows_the_oracle():
    changes = {9: {"momentum": 0.5, "nesterov": False}, 12: {"lr": 3e-2, "ns_steps": 2}}
    compare("Muon", SHAPES, 20, tolerance=1e-9, changes=changes)


@pytest.mark.skipif(torch.__version__ < "2.9", reason="torch.optim.Muon came with torch 2.9")
@pytest.mark.parametrize("nesterov", [True, False])
def test_matrices_follow_torch_and_vectors_follow_adamw(nesterov, monkeypatch):
    # torch iterates in bfloat16 whatever it is given: float32 in its place.
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())
    tensors, grads = problem([(30, 20), (20, 30), (16, 16), (7,)], 40)
    ours, theirs = parameters(tensors, torch.float32), parameters(tensors, torch.float32)
    run(Muon(ours, nesterov=nesterov), ours, grads)
    torchs = torch.optim.Muon(theirs[:3], nesterov=nesterov, adjust_lr_fn="match_rms_adamw")
    run(torchs, theirs[:3], [step[:3] for step in grads])
    adamw = torch.optim.AdamW(theirs[3:], weight_decay=0.1)
    run(adamw, theirs[3:], [step[3:] for step in grads])
    for a, b, W in zip(ours, theirs, tensors, strict=True):
        assert (a - W).abs().max() > 1e-2
        assert (a - b).abs().max() < 1e-4


def test_it_keeps_the_momentum_alone_and_resumes_in_every_bit():
    tensors, grads = problem(SHAPES, 20)
    params = parameters(tensors, torch.float32)
    optimizer = Muon(params)
    run(optimizer, params, grads[:10])
    assert set(optimizer.state[params[2]]) == {"step", "skipped", "exp_avg"}
    weights = copy.deepcopy(params)
    resumed = Muon(weights)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    run(optimizer, params, grads[10:])
    run(resumed, weights, grads[10:])
    assert_same(snapshot(optimizer)[:2], snapshot(resumed)[:2])


def test_embeddings_and_head_are_under_adamw_by_their_group():
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 50))
    adam = {kind: {"matrices": "adam"} for kind in ("embeddings", "head")}
    optimizer = Muon(parameter_groups(model, adam))
    moments = {n: "exp_avg_sq" in optimizer.state[p] for n, p in model.named_parameters()}
    assert [name for name, has in moments.items() if not has] == ["1.weight"]


def test_a_gradient_that_is_not_finite_is_left_out_and_counted():
    (p,) = parameters([torch.ones(3, 4)])
    optimizer = Muon([("W", p)])
    p.grad = torch.full((3, 4), torch.nan)
    optimizer.step()
    assert torch.equal(p, torch.ones(3, 4))
    assert [(r.name, r.skipped) for r in optimizer.basis_report()] == [("W", 1)]


@pytest.mark.parametrize("nonfinite", ["skip", "raise", "propagate"])
@pytest.mark.parametrize("size", [0.0, 1e-22, 1e-30])
def test_gradients_that_vanish_make_no_nan(size, nonfinite):
    """The norm of the momentum underflows long before its entries do: after 900 steps at 0.95."""
    (p,) = parameters([torch.ones(8, 6)])
    optimizer = Muon([p], lr=1e-3, weight_decay=0.0, nonfinite=nonfinite)
    p.grad = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)) * (size or 1e-15)
    optimizer.step()
    p.grad.mul_(0.0 if size == 0 else 1.0)
    for _ in range(300):
        optimizer.step()
    assert p.isfinite().all()
    assert (p - 1).abs().max() < 1
