"""What README and the page of the study say is what the results say."""

import re
from pathlib import Path

import pytest
from rich.console import Console

from eshampoo.lab.cli import parser
from eshampoo.lab.figures.ours import EVIDENCE, NAMES
from eshampoo.lab.figures.page import at_adamws_rate, best, short_table
from eshampoo.lab.figures.reproduce import collect_all
from eshampoo.lab.figures.study import page_of, problems

pytestmark = pytest.mark.slow  # they read all results
ROOT = Path(__file__).parents[3]
START, END = "<!-- table: eshampoo study evidence -->\n", "<!-- end of table -->\n"
COUNTS = ("none", "one", "two", "three", "four", "five", "six", "seven", "all")


def mean(group):
    return group.mean("final_loss")


def below_at_adamws_rate(problem):
    there = at_adamws_rate(problem)
    return there is not None and mean(there) < mean(best(problem.search["AdamW"]))


# What README may say "on all eight" or "on five of eight" about, and on which problems it is so.
CLAIMS = {
    "EShampoo ends below AdamW": lambda p: mean(p.rows["EShampoo"]) < mean(p.adamw),
    "At AdamW's rate EShampoo ends below AdamW": below_at_adamws_rate,
    "EShampoo has the lowest loss, or is level with it,": lambda p: "EShampoo" in p.lowest(),
    "With KL factors it is so": lambda p: "EShampoo, KL factors" in p.lowest(),
    "No other method needs fewer steps to AdamW's loss than EShampoo": lambda p: p.first(
        "EShampoo", lambda way: way.steps
    ),
    "EShampoo is first in CPU seconds": lambda p: (
        p.is_timed and p.first("EShampoo", lambda way: way.seconds)
    ),
    "EShampoo is at AdamW's loss after fewer steps than AdamW": lambda p: (
        p.way("EShampoo").steps < p.way("AdamW").steps
    ),
}


def wrong_claims(text, groups):
    """The sentences about a number of problems that are not so, or that nobody can check."""
    wrong = []
    for sentence in re.split(r"(?<=\.)\s+", re.sub(r"<!--.*?-->|^\|.*$", "", text, flags=re.M)):
        if not re.search(r"\beight\b", sentence):
            continue
        found = re.fullmatch(r"(.+?) on (\w+)(?: of)?(?: the)? eight\.", " ".join(sentence.split()))
        claim = CLAIMS.get(found[1]) if found else None
        if claim is None or found[2] not in COUNTS:
            wrong.append(f"cannot check: {sentence}")
        elif (count := sum(map(claim, groups))) != COUNTS.index(found[2]):
            wrong.append(f"it is {count}: {sentence}")
    return wrong


@pytest.fixture(scope="module")
def found():
    words = ["study", "evidence", "--stored", "--results", str(ROOT / "results")]
    known = parser().parse_args([*words, "--runs", str(ROOT / "no runs")])
    return collect_all(EVIDENCE, known, Console(quiet=True))


@pytest.fixture(scope="module")
def groups(found):
    return problems(found)


def test_the_page_of_the_study_is_what_the_results_say(found, groups):
    assert (ROOT / "docs" / "evidence.md").read_text() == page_of(found, groups)
    assert [problem.name for problem in groups] == [*NAMES]


def test_readme_says_about_the_runs_what_the_results_say(groups):
    readme = (ROOT / "README.md").read_text()
    table = readme.partition(START)[2].partition(END)[0]
    assert table.splitlines() == short_table(groups, NAMES)
    assert wrong_claims(readme.partition("## Use it")[0], groups) == []


def test_a_wrong_sentence_is_found(groups):
    lower = sum(map(CLAIMS["EShampoo ends below AdamW"], groups))
    right, wrong = (COUNTS[lower], COUNTS[lower - 1])
    sentence = "EShampoo ends below AdamW on {} of the eight."
    assert wrong_claims(f"Some text. {sentence.format(right)} More.", groups) == []
    assert wrong_claims(sentence.format(wrong), groups) == [
        f"it is {lower}: {sentence.format(wrong)}"
    ]
    unknown = "EShampoo is twice as fast on all eight."
    assert wrong_claims(unknown, groups) == [f"cannot check: {unknown}"]
