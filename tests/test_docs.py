"""The examples in docstrings, in the README and on the pages of the site run."""

import doctest
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

import eshampoo
from eshampoo.classes import CLASSES

ROOT = Path(eshampoo.__file__).parents[1]
# Modules of the library, its lab and the benchmarks, in every folder, that show an example.
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for package in ("eshampoo", "benchmarks")
    for path in sorted((ROOT / package).rglob("*.py"))
    if ".venv" not in path.parts and ">>>" in path.read_text()
]
# Pages whose code runs from top to bottom. The others show lines of scripts that are run elsewhere:
# recipes those of examples/ (tests/recipes), docs/distributed.md those that need ranks.
SHOWN_ELSEWHERE = {"distributed.md"}
PAGES = [
    path
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if "```python" in path.read_text()
    and path.parent.name != "recipes"
    and path.name not in SHOWN_ELSEWHERE
]


def blocks(path):
    """The Python code of a page."""
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.S)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_give_what_they_show(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0


def test_the_library_has_examples():
    finder = doctest.DocTestFinder()
    modules = [importlib.import_module(name) for name in MODULES if name.startswith("eshampoo.")]
    assert sum(len(test.examples) for m in modules for test in finder.find(m)) >= 8


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_code_of_a_page_runs_from_top_to_bottom(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "page"}
    for number, block in enumerate(blocks(path)):
        exec(compile(block, f"{path.name}, block {number}", "exec"), namespace)


def test_pages_with_code_are_found():
    names = {path.name for path in PAGES}
    assert {"README.md", "index.md", "watching.md", "migrating.md", "soap.md"} <= names


def test_every_page_is_in_the_navigation_of_the_site():
    site = (ROOT / "mkdocs.yml").read_text()
    pages = [p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if not re.search(rf"[ :-] {re.escape(page)}$", site, re.M)] == []


def test_links_between_pages_lead_somewhere():
    broken = []
    for path in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)\s#]+)(?:#[^)]*)?\)", path.read_text()):
            if not re.match(r"[a-z]+:", target) and not (path.parent / target).exists():
                broken.append(f"{path.relative_to(ROOT)}: {target}")
    assert not broken, broken


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_the_site_shows_every_keyword_of_a_class_with_its_default(cls):
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \|", hooks.keyword_table(cls.__name__), re.M)
    parameters = [*inspect.signature(cls).parameters.values()][1:]  # without params
    assert dict(rows) == {p.name: repr(p.default) for p in parameters}
    assert len(rows) == len(parameters)


def test_versions_agree():
    version = eshampoo.__version__
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.search(rf"^version: {re.escape(version)}$", citation, re.M)
    headings = re.findall(r"^## \[([\d.]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[0] == version
    pythons = re.findall(r":: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert f"| Python | {pythons[0]} to {pythons[-1]} |" in (ROOT / "docs/versions.md").read_text()


def test_everything_public_is_documented():
    for name in eshampoo.__all__:
        assert getattr(eshampoo, name).__doc__, name
    for name in (cls.__name__ for cls in CLASSES):
        cls = getattr(eshampoo, name)
        assert cls.__final__, name
        assert cls.__mro__[1].__name__ == "EigenbasisOptimizer"
