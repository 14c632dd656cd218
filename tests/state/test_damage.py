"""Files that are damaged or foreign, and runs that are killed."""

import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from keyword_table import METHODS
from training import assert_same, parameters, run, snapshot, through_a_file, trained

from eshampoo import digest
from eshampoo.lab.errors import UserError
from eshampoo.lab.run.checkpoint import read_checkpoint, save_checkpoint

ROOT = Path(__file__).parents[2]
SHAPES = [(4, 4), (5,), (6, 3)]
OPTIONS = {"frequency": 2, "max_dim": 32}
NAN = float("nan")


def file_of(folder):
    """A checkpoint of the lab, what is in it, and the optimizer."""
    optimizer, *_ = trained("EShampoo", SHAPES, 6, **OPTIONS)
    save_checkpoint(folder, 6, {"optimizer": optimizer.state_dict()})
    (path,) = folder.glob("checkpoint-*.pt")
    return path, optimizer


def test_a_truncated_file_is_refused(tmp_path):
    path, _ = file_of(tmp_path)
    content = path.read_bytes()
    read_checkpoint(path)
    chance = random.Random(0)
    for size in [0, 1, len(content) - 1, *chance.sample(range(len(content)), 60)]:
        path.write_bytes(content[:size])
        with pytest.raises(UserError, match="damaged or foreign"):
            read_checkpoint(path)


def test_a_flipped_bit_is_refused(tmp_path):
    path, _ = file_of(tmp_path)
    content = path.read_bytes()
    for bit in random.Random(0).sample(range(8 * len(content)), 400):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="damaged or foreign"):
            read_checkpoint(path)


def test_a_sealed_file_is_one_that_torch_loads(tmp_path):
    path, optimizer = file_of(tmp_path)
    assert_same(optimizer.state_dict(), torch.load(path, weights_only=True)["optimizer"])


class Evil:
    def __reduce__(self):
        return os.system, ("touch executed",)


FOREIGN = {
    "text": b"not a checkpoint",
    "zeros": bytes(4096),
    "a pickle": pickle.dumps({"step": 1}),
    "a pickle with code": pickle.dumps(Evil()),
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_file_is_refused(content, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "checkpoint-00000001.pt"
    path.write_bytes(content)
    with pytest.raises(UserError, match="damaged or foreign"):
        read_checkpoint(path)
    assert not (tmp_path / "executed").exists()


def test_loading_executes_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_checkpoint(tmp_path, 1, {"code": Evil()})
    (path,) = tmp_path.glob("checkpoint-*.pt")
    with pytest.raises(UserError, match="damaged or foreign"):
        read_checkpoint(path)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("method", METHODS)
def test_a_state_of_this_library_needs_no_code(method):
    optimizer, *_ = trained(method, [(4, 4), (3,)], 4, frequency=2)
    assert_same(optimizer.state_dict(), through_a_file(optimizer.state_dict()))


# Dictionaries that are no state -------------------------------------------------------------------


def refused(optimizer, state_dict, word):
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=word):
        optimizer.load_state_dict(state_dict)
    assert_same(before, snapshot(optimizer))


NO_STATE = {
    "nothing": {},
    "a model": {"weight": torch.ones(4, 4), "bias": torch.ones(4)},
    "a list as state": {"state": [1, 2], "param_groups": []},
    "numbers as groups": {"state": {}, "param_groups": [1, 2]},
    "groups without parameters": {"state": {}, "param_groups": [{"lr": 1.0}]},
    "numbers as state": {"state": {0: 3.0}, "param_groups": [{"params": [0]}]},
}


@pytest.mark.parametrize("state_dict", NO_STATE.values(), ids=NO_STATE)
def test_what_is_no_state_is_refused(state_dict):
    optimizer, *_ = trained("EShampoo", [(4, 4), (3,)], 4, frequency=2)
    refused(optimizer, state_dict, "not the state of an optimizer")


@pytest.mark.parametrize("value", [NAN, float("inf")])
@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "factor_0", "basis_1", "step"])
def test_a_state_with_nan_or_inf_is_refused(name, value):
    optimizer, *_ = trained("EShampoo", [(4, 4), (3,)], 4, frequency=2, merge_dims=False)
    state_dict = optimizer.state_dict()
    state = {k: dict(v) for k, v in state_dict["state"].items()}
    state[0][name] = state[0][name].clone()
    state[0][name].view(-1)[0] = value
    refused(optimizer, {**state_dict, "state": state}, f"{name}.* shape .* has NaN or Inf")


def test_entries_of_another_kind_are_refused():
    optimizer, *_ = trained("EShampoo", [(4, 4), (3,)], 4, frequency=2, merge_dims=False)
    state_dict = optimizer.state_dict()
    for name, value, word in [
        ("exp_avg", "text", "is a str"),
        ("factor_0", torch.ones(1, 4, 4, dtype=torch.int64), "dtype torch.int64"),
        ("basis_checks", torch.ones(1, 2), "dtype torch.float32"),
        ("exp_avg", torch.ones(1, 4, 4, device="meta"), "on the meta device"),
        ("exp_avg", torch.ones(1, 4, 4).to_sparse(), "layout torch.sparse_coo"),
    ]:
        state = {k: dict(v) for k, v in state_dict["state"].items()}
        state[0][name] = value
        refused(optimizer, {**state_dict, "state": state}, word)


def scaled(share):
    return lambda X: X * share


def changed(index, value):
    """One number of an entry, replaced."""

    def change(X):
        X = X.clone()
        X.view(-1)[index] = value
        return X

    return change


# What no run can have written, by entry: how it was changed, and what the error says.
IMPOSSIBLE = {
    "negative D": ("exp_avg_sq", changed(3, -1e-12), "has negative numbers"),
    "a negative moment of the graft": ("graft_avg_sq", scaled(-1), "has negative numbers"),
    "a factor with one huge entry": ("factor_0", changed(1, 3e38), "is not symmetric"),
    "an asymmetric factor": ("factor_1", changed(3, 0.5), "is not symmetric"),
    "a negative factor": ("factor_0", scaled(-1), "a diagonal that no sum of squares has"),
    "a factor whose trace overflows": (
        "factor_0",
        lambda X: torch.eye(X.shape[1], dtype=X.dtype)[None] * torch.finfo(X.dtype).max,
        "a diagonal that no sum of squares has",
    ),
    "a factor without diagonal": (
        "factor_0",
        lambda X: torch.ones_like(X) - torch.eye(X.shape[1], dtype=X.dtype),
        "a diagonal that no sum of squares has",
    ),
    "a basis of another size": ("basis_0", scaled(1000), "is not orthogonal"),
    "a basis that is a bit too long": ("basis_0", scaled(1.1), "is not orthogonal"),
    "a singular basis": ("basis_1", torch.ones_like, "is not orthogonal"),
    "a basis with two equal columns": (
        "basis_1",
        lambda X: X[:, :, [0, 0, *range(2, X.shape[2])]],
        "is not orthogonal",
    ),
    "a negative step": ("step", changed(0, -1000), "is no count"),
    "half a step": ("step", changed(0, 2.5), "is no count"),
    "more steps than can be counted": ("step", changed(0, 1e17), "is no count"),
    "a negative number of skipped gradients": ("skipped", changed(0, -1), "is no count"),
    "a negative counter": ("basis_checks", changed(1, -7), "is no count"),
    "a counter with a flipped bit": ("basis_waited", changed(0, 1 << 62), "is no count"),
    "a criterion above 1": ("criterion", changed(0, 1.5), r"lies outside of \[0, 1\]"),
    "a negative cost": ("basis_spent", changed(1, -1.0), "has negative numbers"),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("name", "change", "word"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_a_state_that_no_run_can_have_written_is_refused(name, change, word, dtype):
    options = {"frequency": 2, "graft": "adam", "rms": None}
    optimizer, *_ = trained("EShampoo", [(3,), (6, 6), (4, 5)], 6, dtype=dtype, **options)
    assert optimizer.basis_computations > 0
    state_dict = optimizer.state_dict()
    state = {k: dict(v) for k, v in state_dict["state"].items()}
    state[1][name] = change(state[1][name])
    refused(optimizer, {**state_dict, "state": state}, f"{name}.*6, 6.* {word}")


def test_a_root_that_is_not_symmetric_is_refused():
    optimizer, *_ = trained("Shampoo", [(4, 5)], 4, frequency=2)
    state_dict = optimizer.state_dict()
    root = state_dict["state"][0]["root_0"]
    root[0, 0, 1] += root.abs().max()
    refused(optimizer, state_dict, "root_0.* is not symmetric")


# The first number of a triangle is on the diagonal, its last one is not.
IMPOSSIBLE_LEAN = {
    "NaN": ("factor_0", changed(5, NAN), "has NaN or Inf"),
    "NaN in the momentum": ("exp_avg", changed(5, NAN), "has NaN or Inf"),
    "a negative factor": ("factor_1", scaled(-1), "a diagonal that no sum of squares has"),
    "a negative square": ("factor_0", changed(0, -1e3), "a diagonal that no sum of squares has"),
    "a factor with one huge entry": (
        "factor_0",
        changed(-1, 1e30),
        "a diagonal that no sum of squares has",
    ),
    "a basis that is a bit too long": ("basis_0", scaled(1.1), "is not orthogonal"),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("name", "change", "word"), IMPOSSIBLE_LEAN.values(), ids=IMPOSSIBLE_LEAN)
def test_a_lean_state_that_no_run_can_have_written_is_refused(name, change, word, dtype):
    """Also by an optimizer with a full state, which would unpack it."""
    shapes, options = [(3,), (6, 6), (4, 5)], {"frequency": 2, "dtype": dtype}
    lean, *_ = trained("EShampoo", shapes, 6, state="lean", **options)
    full, *_ = trained("EShampoo", shapes, 6, **options)
    assert lean.basis_computations > 0
    state_dict = lean.state_dict()
    full.load_state_dict(state_dict)
    state_dict["state"][1][name] = change(state_dict["state"][1][name])
    for optimizer in (lean, full):
        refused(optimizer, state_dict, f"{name}.*6, 6.* {word}")


@pytest.mark.slow
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16, None])
@pytest.mark.parametrize("form", ["full", "lean"])
@pytest.mark.parametrize("method", METHODS)
def test_what_the_library_writes_loads_also_after_it_was_rounded(method, form, narrow):
    shapes, options = [(40, 24), (5,), (6, 3), (3, 2, 4)], {"frequency": 1, "state": form}
    optimizer, params, grads = trained(method, shapes, 30, dtype=torch.float32, **options)
    state_dict = optimizer.state_dict()
    if narrow is not None:
        for entries in state_dict["state"].values():
            for name, value in entries.items():
                # Costs are counted in arithmetic, beyond the largest float16.
                if value.is_floating_point() and not name.startswith(("basis_work", "basis_spent")):
                    entries[name] = value.to(narrow)
    optimizer.load_state_dict(state_dict)
    run(optimizer, params, grads[:3])
    assert all(p.isfinite().all() for p in params)


def test_before_its_first_gradient_a_state_of_soap_is_at_minus_one():
    params = parameters([torch.ones(4, 4), torch.ones(3)])
    optimizer, again = (METHODS["SOAP"](params) for _ in range(2))
    again.load_state_dict(through_a_file(optimizer.state_dict()))
    assert again.state[params[0]]["step"].tolist() == [-1]


def test_an_adamw_state_with_negative_squares_or_half_a_step_is_refused():
    optimizer, params, grads = trained("EShampoo", [(4, 4), (3,)], 4)
    for name, value, word in [("exp_avg_sq", -1.0, "negative numbers"), ("step", 1.5, "no count")]:
        adamw = torch.optim.AdamW(params)
        run(adamw, params, grads[:2])
        adamw.state[params[1]][name].fill_(value)
        refused(optimizer, adamw.state_dict(), word)


# Digests ------------------------------------------------------------------------------------------


def test_a_digest_survives_a_file_and_sees_every_flipped_bit():
    optimizer, *_ = trained("EShampoo", SHAPES, 6, **OPTIONS)
    saved = optimizer.state_dict()
    expected = digest(saved)
    assert digest(through_a_file(saved)) == expected == digest(optimizer.state_dict())
    chance = random.Random(0)
    for _ in range(200):
        entry = chance.choice(list(saved["state"].values()))
        value = entry[chance.choice(list(entry))]
        bits = value.reshape(-1).view(torch.uint8)
        if value.numel() > 0:
            place, bit = chance.randrange(len(bits)), 1 << chance.randrange(8)
            bits[place] ^= bit
            assert digest(saved) != expected
            bits[place] ^= bit
    assert digest(saved) == expected


def test_a_digest_sees_names_shapes_kinds_and_numbers():
    X = torch.arange(6.0)
    states = [
        {"a": X},
        {"b": X},
        {"a": X.view(2, 3)},
        {"a": X.double()},
        {"a": X.view(torch.int32)},
        {"a": [X]},
        {"a": 1},
        {"a": 1.0},
        {"a": True},
        {"a": "1"},
        {"a": None},
        {1: X},
        {"a": 1, "b": 2},
        {"a": [1, 2]},
        {"a": [[1], 2]},
        {"a": ["12"]},
        {"a": ["1", "2"]},
    ]
    assert len({digest(state) for state in states}) == len(states)
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest({"a": X[::2]}) == digest({"a": X[::2].clone()})


def test_a_digest_of_something_unknown_is_refused():
    with pytest.raises(TypeError, match="a function"):
        digest({"tau": lambda t: 0.1})


def test_an_adamw_state_with_nan_is_refused_too():
    optimizer, params, grads = trained("EShampoo", [(4, 4), (3,)], 4)
    adamw = torch.optim.AdamW(params)
    run(adamw, params, grads[:1])
    adamw.state[params[1]]["exp_avg"][0] = NAN
    refused(optimizer, adamw.state_dict(), "NaN or Inf")


def test_with_propagate_a_state_with_nan_is_what_was_asked_for():
    (p,) = parameters([torch.ones(4, 4)])
    options = {"frequency": 100, "merge_dims": False, "nonfinite": "propagate"}
    optimizer, again = (METHODS["EShampoo"]([p], **options) for _ in range(2))
    run(optimizer, [p], [[torch.full((4, 4), NAN)]])
    again.load_state_dict(optimizer.state_dict())
    assert again.state[p]["exp_avg"].isnan().all()


# Killed runs --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_killed_runs_resume_to_the_same_end():
    """Two kills of one method here, a hundred of four with `make chaos`."""
    chaos = [ROOT / "tests" / "chaos.py", "--kills", "2", "--seed", "3", "--methods", "eshampoo"]
    done = subprocess.run(
        [sys.executable, *chaos],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 kills: every run came to the same end" in done.stdout
