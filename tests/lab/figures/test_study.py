"""A study: rates are added at an edge, fresh seeds decide, and the page says what they show."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_runs import trained

from eshampoo.lab.cli import main
from eshampoo.lab.figures import study as study_module
from eshampoo.lab.figures.figure import Curve, Figure, Panel
from eshampoo.lab.figures.ours import EVIDENCE
from eshampoo.lab.figures.page import Problem, lower_than
from eshampoo.lab.figures.reproduce import MOST_RATES, carried_over, extended, plan, repeated
from eshampoo.lab.figures.targets import shares
from eshampoo.lab.report.compare import Group

TRIED = {"tiny": (1e-3, 3e-3, 1e-2)}
LABELS = {"AdamW": "adamw", "SOAP": "soap", "EShampoo": "eshampoo"}
CURVES = tuple(Curve(label, name, rates=TRIED) for label, name in LABELS.items())
SKETCH = Figure(
    "sketch", "", "", (Panel("", "digits-vit", CURVES, "rate"),), seeds=1, extend=True, fresh=2
)


def ended(losses, steps=100, seconds=50.0):
    """Logs of one group that end with these losses, falling evenly from twice as much."""
    return Group(
        "",
        tuple(
            SimpleNamespace(
                run=SimpleNamespace(steps=steps, options={"lr": 1e-3}),
                step=np.arange(1.0, steps + 1),
                loss=loss * np.linspace(2, 1, steps),
                cpu_times={"cpu": np.full(steps, seconds / steps)},
                end={"final_loss": loss if math.isfinite(loss) else None, "cpu_seconds": seconds},
            )
            for loss in losses
        ),
    )


def test_the_way_to_a_target_is_a_share_of_the_whole_run_of_adamw():
    """Losses fall from 2 to 1; averaged over five steps, 1.5 is reached at step 53."""
    adamw, ours = ended([1.5, 1.5], seconds=100.0), ended([1.0, 1.0], seconds=300.0)
    steps, seconds = shares(ours, adamw)
    assert (steps.mean, steps.error, seconds.mean) == (0.53, 0, pytest.approx(1.59))
    never, _ = shares(ended([1.0, 1.6]), adamw)
    assert (never.mean, str(never)) == (math.inf, "–")


def test_the_page_says_who_ends_lower():
    ours, near = ended([1.0, 1.1, 1.2]), ended([0.9, 1.1, 1.2])
    fresh = {"EShampoo": ours, "SOAP": near, "Muon": ended([0.5, 0.51]), "AdamW": ended([3.0, 3.1])}
    assert lower_than(ours, Problem("x", {}, fresh)) == ["Muon (t(2.0) = 10.3, p = 0.0089)"]


def outcome(points, loss):
    """A log for every run of the points, whose final loss is a function of the learning rate."""
    runs = [run for point in points for run in point.runs]
    return {
        run.place: SimpleNamespace(run=run, end={"final_loss": loss(run.options["lr"])})
        for run in runs
    }


def test_a_rate_is_added_while_the_best_is_at_an_edge():
    points = plan(SKETCH, "tiny", 1, 4)[:3]  # those of AdamW
    for best, expected in ((3e-3, []), (1e-2, [3e-2]), (1e-5, [3e-4])):
        logs = outcome(points, lambda lr, best=best: abs(math.log(lr / best)))
        more = extended(points, logs)
        assert [run.options["lr"] for point in more for run in point.runs] == expected
    tried = list(points)
    while more := extended(tried, outcome(tried, lambda lr: lr)):
        tried += more
    assert len(tried) == MOST_RATES + 1
    assert min(point.runs[0].options["lr"] for point in tried) == pytest.approx(1e-5)
    assert extended(points[:2], outcome(points, lambda lr: lr)) == []


def test_eshampoo_is_tried_at_the_best_rate_of_adamw():
    """AdamW was best at 3e-3, or at a rate that was added for it alone."""
    points = plan(SKETCH, "tiny", 1, 4)
    logs = outcome(points, lambda lr: abs(math.log(lr / 3e-3)))
    assert carried_over(points, logs) == []
    added = extended(points[:3], outcome(points, lambda lr: -lr))
    tried = [*points, *added]
    (more,) = carried_over(tried, outcome(tried, lambda lr: -lr))
    assert more.curve.label == "EShampoo"
    assert [run.options["lr"] for run in more.runs] == [3e-2]
    assert more.runs[0].optimizer == "eshampoo"


def test_every_method_of_the_evidence_is_searched_with_the_same_effort():
    points = plan(EVIDENCE, "small", None, None)
    rates = {}
    for point in points:
        if point.curve.optimizer != "lbfgs":
            key = point.runs[0].workload, point.runs[0].optimizer
            rates.setdefault(key, []).append((point.runs[0].options["lr"], len(point.runs)))
    by_workload = {}
    for (workload, _), tried in rates.items():
        by_workload.setdefault(workload, []).append(tried)
    assert len(by_workload) == 6
    for tried in by_workload.values():
        assert len(tried) == 6
        assert all(other == tried[0] for other in tried)


@pytest.mark.slow
def test_a_study_writes_its_page_from_logs_alone(tmp_path, monkeypatch, capsys):
    """The runs are made in this process; the command finds all of them finished."""
    figure = replace(SKETCH, extend=False)
    whole = replace(figure, panels=(*figure.panels, Panel("", "pinn-poisson", CURVES, "rate")))
    monkeypatch.setattr(study_module, "STUDIES", {"sketch": whole})
    points = plan(figure, "tiny", 1, 6)
    logs = {r.place: trained(r, tmp_path / "runs" / r.place) for p in points for r in p.runs}
    for point in repeated(points, logs, 2):
        for run in point.runs:
            trained(run, tmp_path / "runs" / run.place)
    words = ["study", "sketch", "--scale", "tiny", "--steps", "6", "--seeds", "1"]
    words += ["--only", "digits-vit", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path)]
    assert main([*words, "--results", str(tmp_path / "none")]) == 0
    text = (tmp_path / "sketch.md").read_text()
    assert all(f"| {label} | 0.0" in text for label in LABELS)
    assert "2 fresh seeds" in text
    assert "\n    eshampoo study sketch --only digits-vit\n" in text
    assert "\n- Problems of this study: pinn-poisson.\n" in text
    assert "AdamW's best rate is" in text
    assert (tmp_path / "sketch.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "sketch-rates.png").exists()
    capsys.readouterr()
    assert main(["study", "sketch", "--only", "digits"]) == 2
    assert (
        "'digits' is not in this figure; choose from: digits-vit, pinn-poisson"
        in capsys.readouterr().err
    )
