"""The report in a real browser: it renders, is silent, shows its curves, and fits a phone."""

import io

import numpy as np
import pytest
from browser import CHROMIUM, DRIVER, Browser
from PIL import Image

from eshampoo.lab.cli import main

pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="Chromium and chromedriver were not found (Debian: apt install chromium-driver)",
)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The report of a short comparison."""
    out = tmp_path_factory.mktemp("report")
    optimizers = "adamw,eshampoo:frequency=3:merge_dims=false:vectors=full"
    words = ["compare", "digits-vit", "--optimizers", optimizers, "--seeds", "2"]
    words += ["--scale", "tiny", "--steps", "20", "--threads", "1", "--out", str(out)]
    assert main(words) == 0
    return out / "report.html"


CURVES = """
return [...document.querySelectorAll('path.curve')].map(path => {
  const box = path.getBoundingClientRect();
  return [box.width, box.height, path.getTotalLength()];
});
"""
TEXTS = """
return [...document.querySelectorAll('svg text')].map(t => t.getBoundingClientRect().height);
"""
# nothing may stick out of the window, and no label of an axis out of its chart
OVERFLOW = """
const wide = [...document.querySelectorAll('body *')].filter(
  element => element.getBoundingClientRect().right > innerWidth + 1);
return [document.documentElement.scrollWidth, innerWidth, wide.map(e => e.outerHTML.slice(0, 80))];
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "height", "mobile"), [(1280, 900, False), (390, 844, True)], ids=["desktop", "phone"]
)
def test_the_report_renders(page, width, height, mobile, tmp_path):
    with Browser(tmp_path / "profile", width, height, mobile) as browser:
        browser.open(page.as_uri())
        assert browser.console() == []
        assert browser.run("return performance.getEntriesByType('resource').length") == 0
        assert browser.run("return innerWidth") == pytest.approx(width, abs=20)

        verdict = browser.run("return document.querySelector('.verdict').innerText")
        assert "AdamW" in verdict or "EShampoo" in verdict
        assert browser.run("return document.querySelectorAll('table tbody tr').length") == 4

        curves = browser.run(CURVES)
        # two charts of two optimizers; norms, biases and three kinds of weights twice; L, R and A
        assert len(curves) == 2 + 2 + 5 + 5 + 3
        assert all(box_width > 50 and length > 50 for box_width, _, length in curves)
        assert all(box_height > 50 for _, box_height, _ in curves[:4])
        assert min(browser.run(TEXTS)) >= 10, "labels are too small to read"

        scroll, inner, sticking_out = browser.run(OVERFLOW)
        assert sticking_out == []
        assert scroll <= inner

        picture = np.asarray(Image.open(io.BytesIO(browser.screenshot())).convert("L"))
        assert picture.std() > 10
