"""The submission to AlgoPerf does what the benchmark asks of it, as far as a stand-in can tell."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from stand_in import SUBMISSION, Digits, ForwardPassMode, cheap, points, submission, train
from torch import nn

from eshampoo import EShampoo

STAND_IN = Path(__file__).with_name("stand_in.py")

# As in the benchmark's spec.py.
COMMON = ["workload", "current_param_container", "current_params_types", "model_state"]
SIGNATURES = {
    "get_batch_size": ["workload_name"],
    "init_optimizer_state": [
        "workload", "model_params", "model_state", "hyperparameters", "rng",
    ],
    "update_params": [
        *COMMON, "hyperparameters", "batch", "loss_type", "optimizer_state", "eval_results",
        "global_step", "rng", "train_state",
    ],
    "prepare_for_eval": [
        *COMMON, "hyperparameters", "loss_type", "optimizer_state", "eval_results",
        "global_step", "rng",
    ],
    "data_selection": [
        "workload", "input_queue", "optimizer_state", "current_param_container", "model_state",
        "hyperparameters", "global_step", "rng",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_functions_have_the_signatures_of_the_specification(name):
    assert list(inspect.signature(getattr(submission(), name)).parameters) == SIGNATURES[name]


def test_the_search_space_has_at_most_five_points_of_the_same_names():
    found = points()
    assert 1 < len(found) <= 5
    paper = [point for point in found if (point.frequency, point.tau) == (50, 0.1)]
    (ours,) = [point for point in found if point not in paper]
    signature = inspect.signature(EShampoo).parameters
    for name in ("merge_dims", "vectors", "frequency", "tau", "budget", "rms", "nesterov"):
        assert getattr(ours, name) == signature[name].default


def test_the_information_of_the_submission_is_complete():
    told = yaml.safe_load((SUBMISSION / "submission_info.yml").read_text())
    assert (told["ruleset"], told["framework"]) == ("external", "PyTorch")
    assert {"submission_name", "submission_folder", "authors", "description"} <= told.keys()


def test_a_workload_without_a_batch_size_is_refused_as_the_runner_expects():
    """It then asks again, with the name of the workload that this one is a variant of."""
    assert submission().get_batch_size("fastmri") == 32
    with pytest.raises(ValueError, match="'fastmri_tanh'"):
        submission().get_batch_size("fastmri_tanh")


def test_the_learning_rate_rises_and_falls_to_zero():
    point = points()[1]
    rates = [submission().learning_rate(step, 200, point) for step in range(230)]
    assert rates.index(max(rates)) == 9  # the last step of the warm-up, 5 % of 200
    assert max(rates) == point.learning_rate
    assert rates[4] == pytest.approx(point.learning_rate / 2)
    assert rates[105] == pytest.approx(point.learning_rate / 2)
    assert set(rates[200:]) == {0.0}


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(points())))
def test_every_point_of_the_search_space_trains(number):
    point = cheap(points()[number])
    _, optimizer, workload, losses = train(point, 20, every=10)
    assert losses[1] < losses[0]
    assert optimizer.basis_computations > 0
    assert workload.seen[0] == (ForwardPassMode.TRAIN, True, point.dropout_rate, True)


@pytest.mark.slow
def test_the_points_as_they_are_take_a_step_each():
    for point in points():
        _, optimizer, *_ = train(point, 1)
        assert {group["frequency"] for group in optimizer.param_groups} == {point.frequency}


def test_a_parameter_with_a_dimension_of_a_million_goes_to_adam():
    model = nn.ModuleDict({"table": nn.Embedding(1_000_000, 1), "top": nn.Linear(3, 2)})
    state = submission().init_optimizer_state(Digits(), model, None, points()[0], 0)
    optimizer = state["optimizer"].optimizer
    assert {row.name for row in optimizer.basis_report() if row.mode >= 0} == {
        "top.weight",
        "top.bias",
    }
    sizes = [value.numel() for value in optimizer.state[model["table"].weight].values()]
    assert sum(sizes) < 2_000_010  # two moments, and nothing else of this size


@pytest.mark.slow
def test_a_run_continues_from_its_checkpoint(tmp_path):
    whole, *_ = train(cheap(points()[0]), 20)
    train(cheap(points()[0]), 10, tmp_path)
    halves, *_ = train(cheap(points()[0]), 20, tmp_path)
    for ours, theirs in zip(halves.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_a_shared_state_that_was_not_gathered_is_not_saved():
    savable = submission().Savable(EShampoo([nn.Parameter(torch.ones(2, 2))]), shared=True)
    with pytest.raises(RuntimeError, match="prepare_for_eval"):
        savable.state_dict()


def on_two(folder, point, *ends):
    """The weights after runs of two processes, each from the last checkpoint to its end."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    told = [str(folder), str(folder / "weights.pt"), str(point), *map(str, ends)]
    done = subprocess.run(
        [sys.executable, *words, str(STAND_IN), *told], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "weights.pt")


@pytest.mark.slow
def test_two_processes_with_a_checkpoint_in_between_train_as_one_does(tmp_path):
    """Rank 0 saves alone, ranks have different numbers of examples that count."""
    one, *_ = train(cheap(points()[-1]), 15)
    both = on_two(tmp_path, len(points()) - 1, 10, 15)
    for name, value in one.state_dict().items():
        torch.testing.assert_close(both[name], value, rtol=0, atol=1e-9)
