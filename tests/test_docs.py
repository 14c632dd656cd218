"""The examples in docstrings and in the README run."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

import eshampoo
from eshampoo.optimizers import CLASSES

ROOT = Path(eshampoo.__file__).parents[1]
# Modules of the library, its lab and the benchmarks, in every folder, that show an example.
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for package in ("eshampoo", "benchmarks")
    for path in sorted((ROOT / package).rglob("*.py"))
    if ">>>" in path.read_text()
]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_give_what_they_show(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0


def test_the_library_has_examples():
    finder = doctest.DocTestFinder()
    modules = [importlib.import_module(name) for name in MODULES if name.startswith("eshampoo.")]
    assert sum(len(test.examples) for m in modules for test in finder.find(m)) >= 8


def test_the_code_of_the_readme_runs_from_top_to_bottom(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "readme"}
    blocks = [block for block in BLOCKS if not block.lstrip().startswith(("+", "-"))]  # no diffs
    assert blocks
    for number, block in enumerate(blocks):
        exec(compile(block, f"README block {number}", "exec"), namespace)


def test_everything_public_is_documented():
    for name in eshampoo.__all__:
        assert getattr(eshampoo, name).__doc__, name
    for name in (cls.__name__ for cls in CLASSES):
        cls = getattr(eshampoo, name)
        assert cls.__final__, name
        assert cls.__mro__[1].__name__ == "EigenbasisOptimizer"
