"""The report prints as a table, becomes scalars for a logger, and is drawn."""

import pytest
import torch
from torch import nn

from eshampoo import BasisReport, EShampoo, FactorReport, plot_basis

TABLE = """\
parameter        shape  factor  size  checks  computed  waited  criterion     work  skipped
h.0.attn.weight  4×3    L          4      10         4       1        0.2  2.6e+02        0
h.0.attn.weight  4×3    R          3      10         2       0        0.1  5.4e+01        0
h.1.attn.weight  4×3    L          4      10         6       3        0.4  3.8e+02        0
head.weight      2×3    R          3       5         1       0       0.05  2.7e+01        0
bias             3      -          0       0         0       0          0  0.0e+00        7
"""


def row(name, shape=(4, 3), mode=0, block=0, **others):
    """A row with the size that follows from shape and mode, and nothing counted unless given."""
    size = shape[mode] if mode >= 0 else 0
    values = {
        "checks": 0, "computations": 0, "waited": 0, "criterion": 0.0, "work": 0.0,
        "failures": 0, "skipped": 0, "history": (),
    }  # fmt: skip
    return FactorReport(name, shape, block, mode, size, **{**values, **others})


def three_layers():
    return BasisReport(
        [
            row("h.0.attn.weight", checks=10, computations=4, waited=1, criterion=0.2, work=256.0),
            row("h.0.attn.weight", mode=1, checks=10, computations=2, criterion=0.1, work=54.0),
            row("h.1.attn.weight", checks=10, computations=6, waited=3, criterion=0.4, work=384.0),
            row("head.weight", (2, 3), 1, checks=5, computations=1, criterion=0.05, work=27.0),
            row("bias", (3,), -1, skipped=7),
        ]
    )


def test_a_report_prints_as_a_table_with_a_line_for_every_row():
    text = str(three_layers())
    assert text.splitlines() == TABLE.splitlines()


def test_columns_without_anything_to_say_are_left_out():
    assert "block" not in str(three_layers())
    assert "block" in str(BasisReport([row("w", block=1)]))
    assert "failures" in str(BasisReport([row("w", failures=2)]))
    assert "skipped" not in str(BasisReport([row("w")]))
    assert str(BasisReport()).startswith("parameter")


def test_scalars_are_sums_over_everything_and_means_of_each_layer_and_letter():
    scalars = three_layers().scalars()
    assert scalars == pytest.approx(
        {
            "basis/checks": 35, "basis/computations": 13, "basis/waited": 4, "basis/work": 721,
            "basis/failures": 0, "basis/skipped": 7,
            "basis/h.attn.weight/L/computations": 5, "basis/h.attn.weight/L/waited": 2,
            "basis/h.attn.weight/L/criterion": 0.3, "basis/h.attn.weight/L/work": 640,
            "basis/h.attn.weight/R/computations": 2, "basis/h.attn.weight/R/waited": 0,
            "basis/h.attn.weight/R/criterion": 0.1, "basis/h.attn.weight/R/work": 54,
            "basis/head.weight/R/computations": 1, "basis/head.weight/R/waited": 0,
            "basis/head.weight/R/criterion": 0.05, "basis/head.weight/R/work": 27,
        }
    )  # fmt: skip
    assert {type(value) for value in scalars.values()} <= {int, float}
    assert next(iter(three_layers().scalars("run"))) == "run/checks"


def test_without_names_a_layer_is_its_shape():
    assert [*BasisReport([row(None), row(None, (3, 3, 2), 2)]).layers()] == [
        ("4x3", "L"),
        ("3x3x2", "3"),
    ]


def test_letters_are_the_papers():
    letters = {(8,): "A", (1, 8): "A", (4, 3): "L"}
    assert {shape: row("w", shape).letter for shape in letters} == letters
    assert [row("w", (4, 3, 2, 5), mode).letter for mode in range(4)] == ["L", "R", "3", "4"]
    assert row("w", (4, 3))._replace(size=12).letter == "A"  # merged


def train(steps=20, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = EShampoo(model.named_parameters(), lr=1e-2, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 6)).square().mean().backward()
        optimizer.step()
    return optimizer


def test_an_optimizer_returns_a_report_that_is_still_a_list():
    report = train().basis_report()
    assert isinstance(report, list)
    assert report == [*report]
    assert len(str(report).splitlines()) == 1 + len(report) == 5
    assert report.scalars()["basis/computations"] == train().basis_computations > 0


def bars(axes):
    """The width of every bar by its colour, from the first line to the last."""
    found = {}
    for container in axes.containers:
        found[container.get_label()] = [patch.get_width() for patch in container]
    return found


def test_the_picture_shows_what_the_checks_led_to():
    axes = plot_basis(three_layers()).axes
    assert len(axes) == 1  # nothing was recorded
    found = bars(axes[0])
    assert [label.get_text() for label in axes[0].get_yticklabels()] == [
        "h.attn.weight  L", "h.attn.weight  R", "head.weight  R",
    ]  # fmt: skip
    assert found["basis computed"] == pytest.approx([0.5, 0.2, 0.2])
    assert found["waited for budget"] == pytest.approx([0.2, 0, 0])
    assert found["basis kept"] == pytest.approx([0.3, 0.8, 0.8])


def test_the_picture_shows_the_criterion_where_it_was_recorded(tmp_path):
    report = train(record=True, tau=0.1).basis_report()
    figure = plot_basis(report)
    lines = figure.axes[1].get_lines()
    for line, factor in zip(lines, report, strict=True):
        assert [*line.get_xdata()] == [step for step, value, _ in factor.history if value > 0]
        assert [*line.get_ydata()] == [value for _, value, _ in factor.history if value > 0]
    dots = sum(len(line.get_markevery()) for line in lines)
    assert dots == sum(computed for f in report for _, value, computed in f.history if value > 0)
    figure.savefig(tmp_path / "bases.png")
    assert (tmp_path / "bases.png").read_bytes().startswith(b"\x89PNG")


def test_a_report_without_factors_cannot_be_drawn():
    with pytest.raises(ValueError, match="1 rows and no factor, so there is nothing to draw"):
        plot_basis(BasisReport([row("bias", (3,), -1, skipped=1)]))
