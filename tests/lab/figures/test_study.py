"""A study: rates are added at an edge, fresh seeds decide, and the page says what they show."""

import math
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_runs import trained

from eshampoo.lab.cli import main
from eshampoo.lab.figures import study as study_module
from eshampoo.lab.figures.figure import Curve, Figure, Panel
from eshampoo.lab.figures.ours import EVIDENCE
from eshampoo.lab.figures.page import Problem, findings, lower_than, whole_table
from eshampoo.lab.figures.reproduce import MOST_RATES, carried_over, extended, plan, repeated
from eshampoo.lab.figures.targets import Way, way_to_adamw
from eshampoo.lab.report.compare import Group

TRIED = {"tiny": (1e-3, 3e-3, 1e-2)}
LABELS = {"AdamW": "adamw", "Muon": "muon", "EShampoo": "eshampoo"}
CURVES = tuple(Curve(label, name, rates=TRIED) for label, name in LABELS.items())
SKETCH = Figure(
    "sketch", "", "", (Panel("", "digits-vit", CURVES, "rate"),), seeds=1, extend=True, fresh=2
)


def ended(losses, steps=100, price=1.0, processor="one", lr=1e-3):
    """Logs of one group that end with these losses, falling evenly from twice as much.

    A step takes the time of ``price`` gradients.
    """
    return Group(
        "",
        tuple(
            SimpleNamespace(
                run=SimpleNamespace(steps=steps, rate=lr),
                step=np.arange(1.0, steps + 1),
                loss=loss * np.linspace(2, 1, steps),
                gradients=price * np.arange(1.0, steps + 1),
                processor=processor,
                end={"final_loss": loss if math.isfinite(loss) else None},
            )
            for loss in losses
        ),
    )


def test_the_way_to_a_target_is_a_share_of_the_whole_run_of_adamw():
    """Losses fall from 2 to 1; averaged over five steps, 1.5 is reached at step 53."""
    adamw, ours = ended([1.4, 1.6]), ended([0.8, 1.2], price=3.0)
    assert way_to_adamw(ours, adamw, "one") == Way(0.53, pytest.approx(1.59))
    # the mean over the seeds of AdamW's own loss ends at the target, so it is there at the end
    assert way_to_adamw(adamw, adamw, "one") == Way(1.0, 1.0)
    assert way_to_adamw(ended([1.6, 1.6]), adamw, "one") == Way(math.inf, math.inf)
    assert way_to_adamw(ended([1.0, math.inf]), adamw, "one") == Way(math.inf, math.inf)


def test_cpu_seconds_are_compared_on_one_kind_of_processor():
    adamw, other = ended([1.5, 1.5]), ended([1.0, 1.0], processor="other")
    assert math.isnan(way_to_adamw(other, adamw, "one").seconds)
    search = {"AdamW": [adamw], "SOAP": [ended([1.2, 1.2])], "EShampoo": [other]}
    problem = Problem("x", search, {})
    assert problem.processor == "one"
    assert not problem.is_timed
    # 1.2 falls to 1.5 at step 76, and its average over five steps two later
    assert whole_table([problem])[-1] == "|  | seconds | 1.00 | – | **0.78** |"


def searched_problem(**fresh):
    """A problem whose search has one group for each of four methods."""
    groups = {
        "AdamW": ended([3.0, 3.1]),
        "Muon": ended([0.5, 0.51]),
        "EShampoo": ended([1.0, 1.1, 1.2]),
        "EShampoo, KL factors": ended([0.9, 1.1, 1.2]),
    }
    return Problem("x", {label: [group] for label, group in groups.items()}, fresh)


def test_the_page_says_who_ends_lower():
    search = searched_problem()
    problem = Problem("x", search.search, search.rows)  # as if these were fresh seeds
    names = lower_than(problem.rows["EShampoo"], problem)
    assert names == ["Muon (t(2.0) = 10.3, p = 0.0089)"]
    told = findings([problem])
    assert findings([search]) == told[:-1]  # the seeds of a search do not decide that
    assert told[0] == "EShampoo has the lowest final loss, or is level with it, on 0 of 1."
    assert "on 1 of 1 (x)." in told[-3]  # at AdamW's rate it ends lower
    assert told[-1] == "EShampoo loses to Muon (t(2.0) = 10.3, p = 0.0089) on x."


def test_fresh_seeds_count_where_every_method_has_them():
    few = {"AdamW": ended([1.0, 1.0]), "Muon": ended([1.0]), "EShampoo": ended([1.0, 1.0])}
    assert searched_problem(**few).rows["AdamW"].values("final_loss") == [3.0, 3.1]
    whole = {label: ended([1.0, 1.0]) for label in searched_problem().search}
    assert searched_problem(**whole).rows == whole
    assert searched_problem().lowest() == ["Muon"]  # two seeds of a search are no test
    near = {**whole, "AdamW": ended([3.0, 3.1]), "Muon": ended([0.9, 1.0, 1.2])}
    near |= {"EShampoo": ended([1.0, 1.1, 1.2]), "EShampoo, KL factors": ended([2.0, 2.1])}
    assert searched_problem(**near).lowest() == ["Muon", "EShampoo"]


def outcome(points, loss):
    """A log for every run of the points, whose final loss is a function of the learning rate."""
    runs = [run for point in points for run in point.runs]
    return {run.place: SimpleNamespace(run=run, end={"final_loss": loss(run.rate)}) for run in runs}


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


def test_every_beta2_is_a_search_of_its_own_and_the_best_of_all_is_repeated():
    curve = Curve("AdamW", "adamw", rates=TRIED, memories=(None, 0.95))
    figure = replace(SKETCH, panels=(Panel("", "digits-vit", (curve,), "rate"),))
    points = plan(figure, "tiny", 1, 4)
    betas = [point.runs[0].options["betas"] for point in points]
    assert betas == [(0.9, 0.999)] * 3 + [(0.9, 0.95)] * 3

    def loss(run):  # the best is 3e-3 with the workload's own β2, and at an edge with 0.95
        away = abs(math.log(run.rate / 3e-3))
        return away if run.options["betas"][1] == 0.999 else 5 - run.rate

    logs = {
        run.place: SimpleNamespace(run=run, end={"final_loss": loss(run)})
        for point in points
        for run in point.runs
    }
    (more,) = extended(points, logs)
    assert (more.runs[0].rate, more.runs[0].options["betas"]) == (3e-2, (0.9, 0.95))
    (again,) = repeated(points, logs, 2, 1)
    assert [run.seed for run in again.runs] == [1, 2]
    assert (again.runs[0].rate, again.runs[0].options["betas"]) == (3e-3, (0.9, 0.999))


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


def test_no_method_of_the_evidence_is_searched_less_than_eshampoo():
    """The others have the same rates as one another, with two values of β2, one of them 0.95."""
    tried = {}
    for point in plan(EVIDENCE, "small", None, None):
        run = point.runs[0]
        if run.optimizer != "lbfgs":
            found = tried.setdefault(run.workload, {}).setdefault(point.curve.label, set())
            found.add((run.rate, run.options["betas"], len(point.runs)))
    assert len(tried) == 8
    for workload, by_method in tried.items():
        ours = [by_method.pop(label) for label in ("EShampoo", "EShampoo, KL factors")]
        assert ours[0] == ours[1]
        assert len(by_method) == 5
        for found in by_method.values():
            assert found == by_method["AdamW"]
            assert len(found) == (3 if workload == "text-llama" else 6)
            assert (0.9, 0.95) in {betas for _, betas, _ in found}
            assert len(ours[0]) == 3


@pytest.mark.slow
def test_a_study_writes_its_page_from_logs_alone(tmp_path, monkeypatch, capsys):
    """The runs are made in this process; the command finds all of them finished."""
    figure = replace(SKETCH, extend=False)
    whole = replace(figure, panels=(*figure.panels, Panel("", "pinn-poisson", CURVES, "rate")))
    monkeypatch.setattr(study_module, "STUDIES", {"sketch": whole})
    points = plan(figure, "tiny", 1, 6)
    logs = {r.place: trained(r, tmp_path / "runs" / r.place) for p in points for r in p.runs}
    for point in repeated(points, logs, 2, 1):
        for run in point.runs:
            trained(run, tmp_path / "runs" / run.place)
    words = ["study", "sketch", "--scale", "tiny", "--steps", "6", "--seeds", "1"]
    words += ["--only", "digits-vit", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path)]
    assert main([*words, "--results", str(tmp_path / "none")]) == 0
    text = (tmp_path / "sketch.md").read_text()
    assert all(f"| {label} | 0.0" in text for label in LABELS)
    assert "; fresh seeds; on" in text
    assert "missing" not in text
    assert "\n    eshampoo study sketch --only digits-vit\n" in text
    assert "\n- Problems of this study: pinn-poisson.\n" in text
    assert "AdamW's best rate is" in text
    # what is stored is enough for a page, which names the rest
    for path in (tmp_path / "runs").rglob("muon*,seed=2"):
        shutil.rmtree(path)
    assert main([*words, "--results", str(tmp_path / "none"), "--stored"]) == 0
    text = (tmp_path / "sketch.md").read_text()
    assert "**1 runs are missing** on this page: digits-vit (muon 1)." in text
    assert "**Fresh seeds are missing on digits-vit.**" in text
    assert "eshampoo study sketch --only digits-vit --stored" in text
    assert (tmp_path / "sketch.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "sketch-rates.png").exists()
    capsys.readouterr()
    assert main(["study", "sketch", "--only", "digits"]) == 2
    assert (
        "'digits' is not in this figure; choose from: digits-vit, pinn-poisson"
        in capsys.readouterr().err
    )
