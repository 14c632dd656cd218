"""Nothing grows, wears out or drifts, and equal runs are equal; see benchmarks/long_run.py."""

import gc

import pytest
import torch
from keyword_table import METHODS, choices
from training import assert_same, parameters, problem, run

from benchmarks import long_run

SHAPES = [(4, 4), (4, 4), (6,), (3, 3, 3), (), (7, 5)]


@pytest.fixture
def _only_what_is_new():
    """The collector goes through what comes from now on; the rest is what pytest has imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.slow
@pytest.mark.usefixtures("_only_what_is_new")
def test_a_long_run_stays_as_it_is(monkeypatch):
    """600 steps with F = 1 and τ = 0.01; 20,000 with `python -m benchmarks.long_run`."""
    monkeypatch.setattr("eshampoo.state.bucket.HISTORY", 200)
    steps = 600
    single = list(long_run.run(steps, torch.float32))
    double = list(long_run.run(steps, torch.float64))
    # A gradient in float32, a sum over a batch, is off by some ulps itself.
    disturbed = list(long_run.run(steps, torch.float32, 8 * torch.finfo(torch.float32).eps))
    first, last = single[1], single[-1]
    assert last.tensors == first.tensors
    assert last.state_bytes == first.state_bytes
    assert last.peak_bytes < first.peak_bytes + 30e6
    assert last.history == 200
    for sample in single:
        assert sample.orthogonality < 2e-5
        assert sample.symmetry < 1e-6
    for sample in double:
        assert sample.orthogonality < 1e-13
    assert last.loss < first.loss / 2
    rounding = long_run.distances(single, double)
    noise = long_run.distances(single, disturbed)
    # Both come from the first steps, where the basis of a null space is arbitrary, and shrink.
    assert max(rounding[-5:]) < 10 * max(noise)
    assert max(rounding[-5:]) < max(rounding)


def results(method, record, options):
    tensors, grads = problem(SHAPES, 40, condition=3.0)
    params = parameters(tensors, torch.float32)
    optimizer = METHODS[method](params, record=record, **options)
    run(optimizer, params, grads)
    state = [optimizer.state[p] for p in params]
    reports = [report._replace(history=()) for report in optimizer.basis_report()]
    return [p.detach() for p in params], state, reports, optimizer


@pytest.mark.slow
@pytest.mark.parametrize("solver", choices("solver"))
@pytest.mark.parametrize("method", METHODS)
def test_equal_runs_are_equal_in_every_bit_recorded_or_not(method, solver):
    options = {"frequency": 3, "tau": 0.05, "solver": solver}
    *one, _ = results(method, False, options)
    *recorded, optimizer = results(method, True, options)
    assert_same(one, recorded)
    assert any(report.history for report in optimizer.basis_report())
