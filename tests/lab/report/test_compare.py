"""The verdict says who won, and says so only when the seeds agree."""

import math
from pathlib import Path

import numpy as np
import pytest

from eshampoo.lab.report.compare import (
    Group,
    comparison_table,
    first_reached,
    group_logs,
    smooth,
    time_text,
    verdict,
)
from eshampoo.lab.run.runlog import Log
from eshampoo.lab.run.runs import Run


def made_log(optimizer, seed, final, steps=100, cpu=True, **options):
    """A log whose loss falls in a straight line from 2 to ``final``."""
    x = np.arange(1.0, steps + 1)
    empty = np.zeros(0)
    return Log(
        path=Path("log"),
        header={"metric": "accuracy", "trivial": 0.1},
        run=Run("digits-vit", "small", optimizer, options, seed, steps),
        step=x,
        loss=2 + (final - 2) * x / steps,
        times={"data": 0 * x, "forward_backward": 0 * x + 0.1, "optimizer": 0 * x},
        cpu_times={"cpu": 0 * x + 0.2, "cpu_optimizer": 0 * x},
        computations=0 * x,
        evaluations=((steps, 0.9),),
        factors=(),
        basis_step=empty,
        basis_work=empty,
        basis_checks=empty,
        basis_computations=empty,
        basis_criterion=empty,
        end={
            "final_loss": None if math.isinf(final) else final,
            "seconds": 0.1 * steps,
            "optimizer_share": 0.1,
            "computations": 0,
            **({"cpu_seconds": 0.2 * steps} if cpu else {}),
        },
    )


def judged(**finals):
    logs = [made_log(name, seed, f) for name, fs in finals.items() for seed, f in enumerate(fs)]
    return verdict(group_logs(logs))


def test_the_winner_is_named_when_every_seed_is_lower():
    text = judged(adamw=[0.9, 1.0, 1.1], eshampoo=[0.4, 0.5, 0.6])
    assert text.startswith("By final training loss EShampoo won: 0.5 ± 0.1, next is AdamW with 1")
    assert "that is more than chance (t(4.0) = 6.1, p = 0.0036)" in text
    assert "It reached AdamW's final loss after 69 steps and 6.9 s; AdamW itself took 93" in text
    assert text.endswith("75% of the steps and 75% of the time.")


def test_a_difference_that_may_be_chance_has_no_clear_winner():
    text = judged(adamw=[0.5, 0.9], eshampoo=[0.6, 0.4])
    assert text.startswith("No clear winner: EShampoo has the lowest mean training loss, 0.5 ± 0.1")
    assert "that may be chance (t(1.5) = 0.9, p = 0.49)" in text


def test_adamw_can_win():
    text = judged(adamw=[0.4, 0.41], eshampoo=[0.6, 0.61])
    assert text.startswith("By final training loss AdamW won")
    assert "reached" not in text


def test_special_cases_are_told():
    assert "single seed" in judged(adamw=[0.4], eshampoo=[0.6])
    assert "loss of 0.4; nothing to compare with" in judged(adamw=[0.4])
    assert judged(adamw=[math.inf], soap=[math.inf]).startswith("Nobody won")
    assert judged(adamw=[0.4], soap=[math.inf]).startswith("By final training loss AdamW won")
    assert verdict([]) == "No run has finished yet."


def test_groups_are_labelled_by_what_differs():
    logs = [made_log("eshampoo", s, 0.5, tau=t, lr=1e-3) for s in (0, 1) for t in (0.1, 0.2)]
    groups = group_logs([*logs, made_log("adamw", 0, 1.0)])
    assert [group.label for group in groups] == ["EShampoo tau=0.1", "EShampoo tau=0.2", "AdamW"]
    assert [len(group.logs) for group in groups] == [2, 2, 1]


def test_reaching_a_loss_uses_the_averaged_curve():
    log = made_log("adamw", 0, 1.0)
    assert smooth(log)[-1] == pytest.approx(log.loss[-5:].mean())
    steps, seconds = first_reached(log, 1.5)
    assert smooth(log)[int(steps) - 1] <= 1.5 < smooth(log)[int(steps) - 2]
    assert seconds == pytest.approx(0.1 * steps)
    assert first_reached(log, 0.5) == (math.inf, math.inf)
    assert Group("a", (log,)).mean("final_loss") == 1.0


def test_the_table_shows_cpu_seconds_where_every_run_has_them():
    logs = [made_log("adamw", 0, 0.9), made_log("soap", 0, 0.8)]
    columns, rows = comparison_table(group_logs(logs))
    assert [row[columns.index("CPU time")] for row in rows] == ["20.0 s", "20.0 s"]
    older = made_log("eshampoo", 0, 0.7, cpu=False)
    columns, rows = comparison_table(group_logs([*logs, older]))
    assert "CPU time" not in columns
    assert {len(row) for row in rows} == {len(columns)}
    assert comparison_table([])[1] == []


def test_it_says_where_the_time_went():
    groups = group_logs([made_log("adamw", 0, 0.9), made_log("soap", 0, 0.8)])
    share = groups[0].mean("optimizer_share")
    text = time_text(groups)
    assert f"AdamW {share:.0%} in the optimizer, {1 - share:.0%} in gradients and data" in text
    assert text.index("SOAP") < text.index("AdamW")
