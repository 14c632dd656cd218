"""Results: compact logs in files whose bytes depend on nothing but the logs."""

import gzip

import numpy as np
import pytest
from tiny_runs import tiny, trained

from eshampoo.lab.errors import UserError
from eshampoo.lab.figures.results import add_results, compact, results_file, stored_logs
from eshampoo.lab.run.runlog import log_of, read_records


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """Two runs of 60 steps."""
    out = tmp_path_factory.mktemp("runs")
    return [trained(tiny(name, steps=60), out / name) for name in ("eshampoo", "adamw")]


def added(directory, *logs):
    """The file after adding these logs one by one."""
    for log in logs:
        (path,) = add_results(directory, [(log.run, read_records(log.path))])
    return path


def test_a_compact_log_keeps_the_curve_and_the_end(logs):
    log = logs[0]
    records = compact(read_records(log.path), points=20)
    short = log_of(records, log.path, "")
    assert len(short.step) == 20
    assert short.end == log.end
    assert short.loss[0] == pytest.approx(log.loss[:3].mean(), abs=1e-4)
    assert short.seconds[-1] == pytest.approx(log.seconds[-1], abs=0.01)
    for name, values in log.cpu_times.items():
        assert short.cpu_times[name].sum() == pytest.approx(values.sum(), abs=0.01)
    kept = np.isin(log.basis_step, short.basis_step)
    assert 0 < kept.sum() == len(short.basis_step) < len(kept)
    assert kept[-1]
    assert np.array_equal(short.basis_computations, log.basis_computations[kept])
    assert np.array_equal(short.basis_work, log.basis_work[kept])
    assert compact(records, points=20) == records


@pytest.mark.slow
def test_equal_logs_give_equal_bytes_in_whatever_order_they_were_added(logs, tmp_path):
    first = added(tmp_path / "a", *logs)
    again = added(tmp_path / "b", *reversed(logs), logs[0])
    assert first.read_bytes() == again.read_bytes()
    # the header of gzip: no name of a file (flags 0), no date (four zeros)
    assert first.read_bytes()[3:8] == bytes(5)


def test_added_runs_are_found_and_others_are_not(logs, tmp_path):
    assert stored_logs(tmp_path / "nowhere", [logs[0].run]) == {}
    added(tmp_path, logs[0])
    found = stored_logs(tmp_path, [log.run for log in logs])
    assert list(found) == [logs[0].run.place]
    assert found[logs[0].run.place].run == logs[0].run
    assert found[logs[0].run.place].end == logs[0].end


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-30],
        lambda content: gzip.compress(gzip.decompress(content).replace(b'"loss"', b'"lost"')),
    ],
)
def test_damaged_results_are_named_with_the_remedy(damage, logs, tmp_path):
    run = logs[0].run
    added(tmp_path, logs[0])
    path = results_file(tmp_path, run)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=r"digits-vit-tiny\.jsonl\.gz.*take it from the repository"):
        stored_logs(tmp_path, [run])
