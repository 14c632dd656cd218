"""Figures: every one is planned, runs what is missing, and is drawn from logs alone."""

import shutil
from pathlib import Path

import pytest

from eshampoo.lab.cli import main
from eshampoo.lab.figures import jobs
from eshampoo.lab.figures import reproduce as reproduce_module
from eshampoo.lab.figures.catalogue import FIGURES, Curve, Figure, Panel
from eshampoo.lab.figures.reproduce import plan, run_directory, scaled_frequency
from eshampoo.lab.run.runlog import FILE_NAME, read_log

PUBLISHED = Path(__file__).parents[3] / "docs" / "reproduction"

MERGED = {"merge_dims": False}
SMALL_FIGURE = Figure(
    name="sketch",
    title="A sketch",
    claim="nothing",
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
        Panel("Share", "digits-vit", (Curve("EShampoo", "eshampoo", MERGED, 700),), "share"),
        Panel("Cost", "digits-vit", (Curve("EShampoo", "eshampoo", MERGED, 700),), "cost"),
        Panel(
            "Patterns", "digits-vit", (Curve("EShampoo", "eshampoo", MERGED, 700),), "step", "layer"
        ),
    ),
    seeds=1,
)


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("scale", ["tiny", "small", "paper"])
def test_every_run_of_every_figure_has_options_that_its_optimizer_takes(name, scale):
    points = plan(FIGURES[name], scale, None, None)
    assert {point.panel for point in points} == set(range(len(FIGURES[name].panels)))
    if scale == "paper":  # shorter runs may scale two frequencies to the same one
        labels = {
            (point.panel, point.curve.label, point.runs[0].options.get("lr")) for point in points
        }
        assert len(labels) == len(points)
        for panel in range(len(FIGURES[name].panels)):
            runs = [point.runs[0].name for point in points if point.panel == panel]
            assert len(set(runs)) == len(runs)


def test_the_frequency_keeps_its_share_of_the_run():
    assert scaled_frequency(100, 7050, 7050) == 100
    assert scaled_frequency(100, 1050, 7050) == 15
    assert scaled_frequency(1, 1050, 7050) == 1


def test_a_figure_runs_what_is_missing_and_is_redrawn_from_exported_logs(
    tmp_path, capsys, monkeypatch
):
    """The second time nothing runs; the exported compact logs alone are enough as well."""
    monkeypatch.setattr(reproduce_module, "FIGURES", {"sketch": SMALL_FIGURE})
    out, export = tmp_path / "out", tmp_path / "export"
    words = ["reproduce", "sketch", "--scale", "tiny", "--steps", "40", "--out"]
    assert main([*words, str(out), "--jobs", "2", "--export", str(export)]) == 0
    # AdamW's default rate is one of those in the first panel, and all panels share EShampoo's run
    assert "3 runs, 0 of them finished" in capsys.readouterr().out
    assert len(list(out.rglob(FILE_NAME))) == 3
    assert not list(out.rglob("*.pt"))

    monkeypatch.setattr(jobs, "start", lambda words: pytest.fail("ran again"))
    for place in (out, export):
        (place / "sketch-tiny.png").unlink()
        assert main([*words, str(place)]) == 0
        assert (place / "sketch-tiny.png").read_bytes()[:4] == b"\x89PNG"
        table = (place / "sketch-tiny.md").read_text()
        assert "∞ (diverged)" in table
        assert "10.00%" in table  # F as a share of the run
        assert table.count("EShampoo") == 1  # every run has one row, in however many panels


def test_a_failing_run_is_told(tmp_path, capsys, monkeypatch):
    wrong = Curve("EShampoo", "eshampoo", {"tau": -1.0})
    figure = Figure("sketch", "", "", (Panel("", "digits-vit", (wrong,), "step"),), seeds=1)
    monkeypatch.setattr(reproduce_module, "FIGURES", {"sketch": figure})
    words = ["reproduce", "sketch", "--scale", "tiny", "--out", str(tmp_path)]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "1 runs failed" in error
    assert "refuses its options" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", FIGURES)
def test_every_point_of_a_published_figure_has_its_log(name):
    for point in plan(FIGURES[name], "small", None, None):
        for run in point.runs:
            log = read_log(run_directory(PUBLISHED, run) / FILE_NAME)
            assert log.run == run
            assert log.finished
            assert "--out OUT" in log.header["command"]


def test_a_published_figure_is_drawn_from_its_logs_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "start", lambda words: pytest.fail("ran"))
    copy = shutil.copytree(PUBLISHED, tmp_path / "copy")
    (copy / "fig4-small.png").unlink()
    assert main(["reproduce", "fig4", "--out", str(copy)]) == 0
    assert (copy / "fig4-small.png").read_bytes()[:4] == b"\x89PNG"
    assert (copy / "fig4-small.md").read_text() == (PUBLISHED / "fig4-small.md").read_text()
