"""The examples in docstrings, in the README and on the pages run, and what README says is true."""

import doctest
import importlib.util
import inspect
import re
import shlex
import subprocess
from pathlib import Path

import pytest

import eshampoo
from eshampoo.classes import CLASSES

ROOT = Path(eshampoo.__file__).parents[1]
README = (ROOT / "README.md").read_text()
# Modules of the library, its lab and the benchmarks, in every folder, that show an example.
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for package in ("eshampoo", "benchmarks")
    for path in sorted((ROOT / package).rglob("*.py"))
    if ".venv" not in path.parts and ">>>" in path.read_text()
]
# Pages whose code runs from top to bottom. docs/how.md quotes a file that has tests of its own, and
# docs/distributed.md shows lines that need ranks.
SHOWN_ELSEWHERE = {"distributed.md", "how.md"}
# Pages that a command writes: the API from the code, the others from logs and measurements.
GENERATED = {"api.md", "benchmarks.md", "evidence.md"}
PAGES = [
    path
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if "```python" in path.read_text() and path.name not in SHOWN_ELSEWHERE
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
    assert {"README.md", "index.md", "recipes.md", "migrating.md"} <= names


def test_the_code_of_how_it_works_is_that_of_the_one_file():
    text = (ROOT / "examples" / "eshampoo_one_file.py").read_text()
    quoted = blocks(ROOT / "docs" / "how.md")
    assert len(quoted) >= 6
    assert [block for block in quoted if f"\n\n\n{block}" not in text] == []


def words(path):
    return len(path.read_text().split())


def test_the_site_has_twelve_pages_and_twelve_thousand_words():
    pages = [path for path in (ROOT / "docs").glob("*.md") if path.name != "api.md"]
    assert len(pages) == 12
    assert sum(words(path) for path in pages if path.name not in GENERATED) <= 12_000
    assert words(ROOT / "README.md") <= 600


@pytest.mark.parametrize("line", re.findall(r"^    (make demo .*?)  ", README, re.M))
def test_make_takes_the_build_of_torch_and_the_device_that_readme_names(line, tmp_path):
    """`make -n` prints what it would do, in a place without an environment."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    words = shlex.split(line)
    command = [words[0], "-n", *words[1:]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    chosen = dict(word.split("=", 1) for word in words if "=" in word)
    assert f"-c constraints.txt {chosen.get('TORCH', 'torch')}\n" in done.stdout
    assert f"--device {chosen.get('DEVICE', 'cpu')} " in done.stdout


def test_no_link_is_named_after_a_file():
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        names = re.findall(r"\[`?([\w/.-]+\.(?:md|py|ipynb|txt))`?\]\(", path.read_text())
        assert not names, (path.name, names)


def test_every_page_is_in_the_navigation_of_the_site():
    site = (ROOT / "mkdocs.yml").read_text()
    pages = [path.name for path in (ROOT / "docs").glob("*.md")]
    assert [page for page in pages if not re.search(rf": {re.escape(page)}$", site, re.M)] == []


def test_the_table_of_every_figure_is_linked():
    linked = (ROOT / "docs" / "reproduction.md").read_text()
    tables = [path.name for path in (ROOT / "docs" / "reproduction").glob("*.md")]
    assert [name for name in tables if f"(reproduction/{name})" not in linked] == []


def test_links_between_pages_lead_somewhere():
    broken = []
    for path in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)\s#]+)(?:#[^)]*)?\)", path.read_text()):
            if not re.match(r"[a-z]+:", target) and not (path.parent / target).exists():
                broken.append(f"{path.relative_to(ROOT)}: {target}")
    assert not broken, broken


def script(name):
    """A script of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_the_site_shows_every_keyword_of_a_class_with_its_default(cls):
    hooks = script("hooks")
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
    page = (ROOT / "docs" / "reliability.md").read_text()
    assert f"| Python | {pythons[0]} to {pythons[-1]} |" in page


def test_the_price_in_readme_is_that_of_the_benchmarks():
    readme = (ROOT / "README.md").read_text()
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    measured = {}
    for line in page.splitlines():
        if line.startswith("| vit_s |"):
            cells = [cell.strip() for cell in line.split("|")[2:-1]]
            measured[cells[0]] = float(cells[1]), float(cells[-2])  # plain ms, bytes of state
    (ours, state), (adamw, less) = measured["EShampoo"], measured["torch AdamW, foreach"]
    soap = measured["SOAP"][1]
    assert (
        f"{state:.0f} bytes of state per parameter at ViT-S (AdamW {less:g}, SOAP {soap:g})"
        in readme
    )
    assert f"a step {ours / adamw:.0f} times as long as AdamW's `foreach` step" in readme


def test_everything_public_is_documented():
    for name in eshampoo.__all__:
        assert getattr(eshampoo, name).__doc__, name
    for name in (cls.__name__ for cls in CLASSES):
        cls = getattr(eshampoo, name)
        assert cls.__final__, name
        assert cls.__mro__[1].__name__ == "EigenbasisOptimizer"
