"""The examples in docstrings and in the README run."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import eshampoo

ROOT = Path(eshampoo.__file__).parents[1]
README = ROOT / "README.md"
MODULES = [m.name for m in pkgutil.iter_modules(eshampoo.__path__) if not m.ispkg]
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.S) if README.exists() else []


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_give_what_they_show(name):
    result = doctest.testmod(importlib.import_module(f"eshampoo.{name}"))
    assert result.failed == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder()
    modules = [importlib.import_module(f"eshampoo.{name}") for name in MODULES]
    assert sum(len(test.examples) for m in modules for test in finder.find(m)) >= 8


@pytest.mark.skipif(not BLOCKS, reason="no README yet")
def test_the_code_of_the_readme_runs_from_top_to_bottom(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "readme"}
    for number, block in enumerate(BLOCKS):
        if not block.lstrip().startswith(("+", "-")):  # a diff
            exec(compile(block, f"README block {number}", "exec"), namespace)


def test_everything_public_is_documented():
    for name in eshampoo.__all__:
        assert getattr(eshampoo, name).__doc__, name
    for name in ("EShampoo", "Shampoo", "SOAP", "KLShampoo", "FullMatrixAdam"):
        cls = getattr(eshampoo, name)
        assert cls.__final__, name
        assert cls.__mro__[1].__name__ == "EigenbasisOptimizer"
