"""docs/internals.md is true of the code: the functions and tests that it names exist, and a step
calls the functions in the order of the story. docs/api.md is complete."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

import eshampoo

ROOT = Path(eshampoo.__file__).parents[1]
PAGE = (ROOT / "docs" / "internals.md").read_text()
# Names in backticks, and the file that defines them: "`compare`, `rescale_` (step/phases.py)".
NAMED = re.compile(r"((?:`[\w.]+`s?(?:,? and |, )?)+) \(([\w/]+\.py)\)")
NOUNS = re.compile(r"^\| `(\w+)` \| .* \| ([\w/]+\.py) \|$", re.M)


def mentions(text):
    """Every name that a text places in a file, in order, as (file, name)."""
    for names, file in NAMED.findall(text):
        yield from ((file, name) for name in re.findall(r"`([\w.]+)`", names))


def defined_in(file):
    """What a module defines: functions, classes, their members and fields."""
    for node in ast.walk(ast.parse((ROOT / "eshampoo" / file).read_text())):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name


@pytest.fixture(scope="module")
def walk():
    spec = importlib.util.spec_from_file_location("walk", ROOT / "docs" / "walk.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_name_is_in_the_file_that_the_page_gives():
    found = [*mentions(PAGE), *((file, name) for name, file in NOUNS.findall(PAGE))]
    assert len(found) > 40
    missing = [
        f"{name} is not in {file}"
        for file, name in found
        for part in name.split(".")
        if part not in {*defined_in(file)}
    ]
    assert not missing, missing


def test_every_function_and_test_beside_an_equation_of_the_paper_exists():
    page = PAGE.partition("## From the paper to the code")[2]
    placed = re.findall(r"((?:`\w+`,? )+)in ([\w/]+\.py)", page)
    functions = [(file, name) for names, file in placed for name in re.findall(r"`(\w+)`", names)]
    assert len(functions) >= 10
    missing = [name for file, name in functions if name not in {*defined_in(file)}]
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", page)
    assert len(named) >= 10
    missing += [name for name in named if f"def {name}(" not in tests]
    assert not missing, missing


def test_the_api_page_has_every_public_name():
    page = (ROOT / "docs" / "api.md").read_text()
    assert [name for name in eshampoo.__all__ if name not in page] == []


def test_there_are_about_a_dozen_nouns():
    assert 10 <= len(NOUNS.findall(PAGE)) <= 15


def test_a_check_step_calls_the_functions_of_the_page_in_its_order(walk):
    story = PAGE.partition("**Before anything changes")[2].partition("`python docs/walk.py`")[0]
    called = list(dict.fromkeys(walk.walks()["check"]))
    # A function that the page mentions twice comes where it is mentioned last.
    told = list(dict.fromkeys(reversed([*mentions(story)])))[::-1]
    told = [mention for mention in told if mention in called]
    assert len(told) >= 15
    assert told == [call for call in called if call in told]


def test_the_counts_of_functions_and_files_are_those_of_the_walk(walk):
    for kind, calls in walk.walks().items():
        sentence = rf"{kind}\s+step [^.]*? (\d+) functions in (\d+) files .*? (\d+) times"
        told = tuple(map(int, re.search(sentence, PAGE).groups()))
        assert told == walk.counts(calls), (
            f"{kind} step: put the numbers of `python docs/walk.py` on the page"
        )
