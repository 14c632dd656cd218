"""Figures: every one is planned, runs what is missing, and is drawn from logs alone."""

import sys
from pathlib import Path

import pytest
from rich.console import Console
from tiny_runs import trained

from eshampoo.lab.cli import main, parser
from eshampoo.lab.figures import jobs
from eshampoo.lab.figures import reproduce as reproduce_module
from eshampoo.lab.figures.figure import Curve, Figure, Panel
from eshampoo.lab.figures.reproduce import (
    FIGURES,
    collect_all,
    plan,
    repeated,
    scaled_frequency,
    write_figure,
)
from eshampoo.lab.run.runlog import FILE_NAME, read_log
from eshampoo.lab.run.runs import SCALES

ROOT = Path(__file__).parents[3]
PUBLISHED = sorted(
    path.stem.removesuffix("-small") for path in (ROOT / "docs" / "reproduction").glob("*-small.md")
)

MERGED = {"merge_dims": False}
SMALL_FIGURE = Figure(
    name="sketch",
    title="A sketch",
    note="nothing",
    panels=(
        Panel(
            "Rates",
            "digits-vit",
            (Curve("AdamW", "adamw", rates={"tiny": (3e-3, 1e30)}),),
            "rate",
        ),
        Panel(
            "Time",
            "digits-vit",
            (Curve("AdamW", "adamw"), Curve("EShampoo", "eshampoo", MERGED, 700)),
            "time",
        ),
        Panel(
            "Patterns", "digits-vit", (Curve("EShampoo", "eshampoo", MERGED, 700),), "step", "layer"
        ),
    ),
    seeds=1,
)


@pytest.mark.parametrize("figure", FIGURES.values(), ids=lambda f: f.name)
def test_every_run_of_every_figure_has_options_that_its_optimizer_takes(figure):
    for scale in SCALES:
        points = plan(figure, scale, None, None)
        assert {point.panel for point in points} == set(range(len(figure.panels)))
    # at the paper's scale; shorter runs may scale two frequencies to the same one
    for panel in range(len(figure.panels)):
        runs = [point.runs[0].name for point in points if point.panel == panel]
        assert len(set(runs)) == len(runs)


def test_the_frequency_keeps_its_share_of_the_run():
    assert scaled_frequency(100, 7050, 7050) == 100
    assert scaled_frequency(100, 1050, 7050) == 15
    assert scaled_frequency(1, 1050, 7050) == 1


def sketched(place, results, *more):
    """Make the sketch with all of its places below ``place`` but the results."""
    words = ["reproduce", "sketch", "--scale", "tiny", "--steps", "40", "--results", str(results)]
    words += ["--runs", str(place / "runs"), "--out", str(place / "out"), *more]
    assert main(words) == 0
    picture, table = place / "out" / "sketch-tiny.png", place / "out" / "sketch-tiny.md"
    assert picture.read_bytes()[:4] == b"\x89PNG"
    return table.read_text()


@pytest.mark.slow
def test_a_figure_runs_what_is_missing_and_is_drawn_again_from_runs_or_results(
    tmp_path, capsys, monkeypatch
):
    """The second time nothing runs; results to which the runs were added are enough alone."""
    monkeypatch.setattr(reproduce_module, "FIGURES", {"sketch": SMALL_FIGURE})
    first, results = tmp_path / "first", tmp_path / "results"
    # AdamW's default rate is one of those in the first panel, and all panels share EShampoo's run
    done = {point.runs[0].place: point.runs[0] for point in plan(SMALL_FIGURE, "tiny", 1, 40)}
    _, missing = [place for place in done if place.name.startswith("adamw")]
    for place, run in done.items():
        if place != missing:
            trained(run, first / "runs" / place)
    sketched(first, results)
    assert "3 runs, 0 of them in" in (told := capsys.readouterr().out)
    assert "2 finished before, 1 missing" in " ".join(told.split())
    assert read_log(first / "runs" / missing / FILE_NAME).finished
    assert not list(first.rglob("*.pt"))
    assert not results.exists()

    monkeypatch.setattr(jobs, "start", lambda words: pytest.fail("ran again"))
    again = sketched(first, results)
    assert "∞ (diverged)" in again
    assert "10.00%" in again  # F as a share of the run
    assert again.count("EShampoo") == 1  # every run has one row, in however many panels
    added = sketched(first, results, "--add")
    assert sketched(tmp_path / "second", results) == added
    assert "3 of them in" in capsys.readouterr().out.split("sketch:")[-1]
    assert not (tmp_path / "second" / "runs").exists()


def test_fresh_seeds_repeat_the_best_rate_of_every_curve(tmp_path):
    points = plan(SMALL_FIGURE, "tiny", 1, 4)[:2]  # AdamW at 3e-3, and at a rate that diverges
    logs = {p.runs[0].place: trained(p.runs[0], tmp_path / str(i)) for i, p in enumerate(points)}
    (again,) = repeated(points, logs, 2, 1)
    assert [run.seed for run in again.runs] == [1, 2]
    assert {run.options["lr"] for run in again.runs} == {3e-3}
    assert repeated(points, logs, 0, 1) == []


def test_a_failing_run_is_told(tmp_path, capsys, monkeypatch):
    broken = [sys.executable, "-c", "raise SystemExit('it broke')"]
    monkeypatch.setattr(jobs, "run_command", lambda *_: broken)
    monkeypatch.setattr(reproduce_module, "FIGURES", {"sketch": SMALL_FIGURE})
    words = ["reproduce", "sketch", "--scale", "tiny", "--out", str(tmp_path)]
    assert main([*words, "--runs", str(tmp_path / "runs")]) == 2
    error = capsys.readouterr().err
    assert "3 runs failed, the first with: it broke" in error
    assert error.count("\n") == 1


def test_wrong_options_are_told_before_anything_runs(tmp_path, capsys, monkeypatch):
    wrong = Curve("EShampoo", "eshampoo", {"tau": -1.0})
    figure = Figure("sketch", "", "", (Panel("", "digits-vit", (wrong,), "step"),), seeds=1)
    monkeypatch.setattr(reproduce_module, "FIGURES", {"sketch": figure})
    words = ["reproduce", "sketch", "--scale", "tiny", "--out", str(tmp_path)]
    assert main([*words, "--runs", str(tmp_path / "runs")]) == 2
    error = capsys.readouterr().err
    assert "refuses its options" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_table_is_what_the_results_say(name, tmp_path, monkeypatch):
    monkeypatch.setattr(reproduce_module, "draw", lambda figure, groups: b"")
    words = ["reproduce", name, "--stored", "--results", str(ROOT / "results")]
    known = parser().parse_args([*words, "--runs", str(tmp_path / "runs")])
    found = collect_all(FIGURES[name], known, Console())
    commands = [log.header["command"] for log in found.logs.values() if log.finished]
    assert len(commands) == len(found.logs) > 0
    assert all("--out OUT" in command for command in commands)
    write_figure(found, tmp_path / f"{name}-small", Console())
    table = (tmp_path / f"{name}-small.md").read_text()
    assert table == (ROOT / "docs" / "reproduction" / f"{name}-small.md").read_text()


@pytest.mark.slow
def test_a_published_figure_is_drawn_from_the_results_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "start", lambda words: pytest.fail("ran"))
    words = ["reproduce", "fig4", "--results", str(ROOT / "results"), "--out", str(tmp_path)]
    assert main([*words, "--runs", str(tmp_path / "runs")]) == 0
    assert (tmp_path / "fig4-small.png").read_bytes()[:4] == b"\x89PNG"


def test_runs_of_another_kind_of_processor_can_be_left_aside(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(reproduce_module, "processor", lambda: "another")
    words = ["reproduce", "fig4", "--results", str(ROOT / "results"), "--out", str(tmp_path)]
    words += ["--runs", str(tmp_path / "runs"), "--stored", "--here"]
    assert main(words) == 2
    assert "no run of fig4 is stored; leave out --stored" in capsys.readouterr().err
