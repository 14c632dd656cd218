"""The report: one file that opens offline, readable axes, and names that stay text."""

import html
import json
import re

import pytest
from tiny_runs import tiny, trained

from eshampoo.lab.report.charts import AGAINST, chart, draw_losses
from eshampoo.lab.report.compare import group_logs, verdict
from eshampoo.lab.report.page import report_page
from eshampoo.lab.run.runlog import FILE_NAME, read_log


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """Two short runs, one of them with bases."""
    out = tmp_path_factory.mktemp("runs")
    return [trained(tiny(name, steps=12), out / name) for name in ("adamw", "eshampoo")]


def test_the_page_is_complete_in_itself(logs):
    page = report_page(logs)
    assert html.escape(verdict(group_logs(logs))) in page
    assert not re.search(r"https?://|<script", page)
    # the loss against steps and time; of the bases criterion, layers and factors
    assert page.count('<img alt="') == page.count('src="data:image/svg+xml;base64,') == 2 + 3
    assert report_page(logs) == page


def test_the_label_of_an_axis_does_not_lie_over_its_numbers(logs):
    seen = []

    def draw(axes):
        draw_losses(axes, [("AdamW", group_logs(logs)[0])], *AGAINST["step"])
        axes.plot([1, 12], [12345.678, 0.00123])
        seen.append(axes)

    chart("Loss", 4.2, draw)
    (axes,) = seen
    numbers = [tick.label1.get_window_extent() for tick in axes.yaxis.get_major_ticks()]
    assert len(numbers) > 2
    assert axes.yaxis.label.get_window_extent().x1 < min(box.x0 for box in numbers)


def test_names_in_a_log_are_text_on_the_page(logs, tmp_path):
    lines = logs[0].path.read_text().splitlines()
    header = json.loads(lines[0])
    header["run"]["optimizer"] = header["command"] = "<script>alert('&')</script>"
    path = tmp_path / FILE_NAME
    path.write_text("\n".join([json.dumps(header), *lines[1:]]))
    page = report_page([read_log(path)])
    assert "<script" not in page
    assert page.count("&lt;script&gt;alert(&#x27;&amp;&#x27;)") > 2


def test_a_run_that_diverged_or_did_not_finish_has_a_page(tmp_path):
    diverged = trained(tiny("adamw", lr=1e30), tmp_path / "diverged")
    stopped = trained(tiny("eshampoo"), tmp_path / "stopped", stopped=lambda: True)
    assert "1 of the runs are unfinished" in report_page([diverged, stopped])
    assert "No run has finished yet." in report_page([stopped])
