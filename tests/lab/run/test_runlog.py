"""Compact logs keep what figures are drawn from."""

import numpy as np
import pytest
from tiny_runs import tiny, trained

from eshampoo.lab.run.runlog import FILE_NAME, compact, read_log


def test_a_compact_log_keeps_the_curve_and_the_end(tmp_path):
    log = trained(tiny("eshampoo", steps=60), tmp_path / "whole")
    compact(log.path, tmp_path / "short", points=20)
    short = read_log(tmp_path / "short" / FILE_NAME)
    assert len(short.step) == 20
    assert short.end == log.end
    assert short.loss[0] == pytest.approx(log.loss[:3].mean(), abs=1e-4)
    assert short.seconds[-1] == pytest.approx(log.seconds[-1], abs=0.01)
    kept = np.isin(log.basis_step, short.basis_step)
    assert 0 < kept.sum() == len(short.basis_step) < len(kept)
    assert kept[-1]
    assert np.array_equal(short.basis_computations, log.basis_computations[kept])
    assert np.array_equal(short.basis_work, log.basis_work[kept])
    assert short.path.stat().st_size < log.path.stat().st_size
