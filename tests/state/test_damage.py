"""Files that are damaged or foreign, and runs that are killed."""

import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import METHODS, assert_same, parameters, run, snapshot, through_a_file, trained

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
    ]:
        state = {k: dict(v) for k, v in state_dict["state"].items()}
        state[0][name] = value
        refused(optimizer, {**state_dict, "state": state}, word)


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
    """Three kills of one method here, fifty of four with `make chaos`."""
    chaos = [ROOT / "tests" / "chaos.py", "--kills", "3", "--seed", "3", "--methods", "eshampoo"]
    done = subprocess.run(
        [sys.executable, *chaos],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 kills: every run came to the same end" in done.stdout
