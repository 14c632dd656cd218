"""What MkDocs does beside rendering: keyword tables from the code, and links out of docs/.

A line `<!-- keywords: EShampoo -->` in a page becomes the table of the keywords of that class,
read from its options, and `<!-- about: EShampoo -->` what its docstring says before them. The
generated table of a figure gets its picture.
"""

import inspect
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import eshampoo  # noqa: E402
from eshampoo.options import RULES, offered  # noqa: E402

# What the groups of keywords in eshampoo/options.py are called on the site.
HEADINGS = {
    "Common": "All optimizers",
    "Bases": "Bases",
    "Blocks": "Blocks",
    "Observed": "Statistics of other gradients",
    "SecondMoment": "The scale D",
    "Averaged": "Factors",
    "Moments": "Moments for many entries",
    "Roots": "Inverse roots and grafting",
    "NewtonSchulz": "Newton–Schulz",
}
ENTRY = re.compile(r"^    (\w+): (.*(?:\n      .*)*)", re.M)


def meanings(group: type) -> dict[str, str]:
    """The text of every keyword of a group, from its docstring."""
    text = inspect.cleandoc(group.__doc__ or "").partition("Args:\n")[2]
    return {name: " ".join(words.split()) for name, words in ENTRY.findall(text)}


def about(name: str) -> str:
    """What the docstring of a class says before its arguments."""
    return inspect.cleandoc(getattr(eshampoo, name).__doc__ or "").partition("\nArgs:\n")[0]


def keyword_table(name: str) -> str:
    """The keywords of a class: default, what a value must be, and meaning, group by group."""
    keywords = getattr(eshampoo, name).keywords
    known, own, lines = {f.name: f for f in fields(keywords)}, offered(keywords), []
    groups = [group for group in reversed(keywords.__mro__) if group.__name__ in HEADINGS]
    for group in groups:
        heading = HEADINGS[group.__name__]
        lines += ["", f"**{heading}**", "", "| keyword | default | meaning |", "|---|---|---|"]
        for key, meaning in meanings(group).items():
            if key not in own:
                continue
            rule = RULES[key].words
            if meaning.partition(" ")[0].isalpha() and not meaning.startswith("p "):  # a word
                meaning = meaning[0].upper() + meaning[1:]
            text = meaning + (f" *{rule[0].upper()}{rule[1:]}.*" if rule else "")
            cells = (f"`{key}`", f"`{known[key].default!r}`", text.replace("|", "\\|"))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(['<div class="keywords" markdown>', *lines, "", "</div>"])


def outside(match: re.Match[str], folder: Path) -> str:
    """A link to a file of the repository that is not on the site becomes its path.

    The text stays beside the path if the name of the file does not say the same.
    """
    text, target = match.groups()
    path = target.partition("#")[0]
    if re.match(r"[a-z]+:", target) or not path:
        return match.group()
    real = (folder / path).resolve()
    if (ROOT / "docs") in real.parents and real.is_file():
        return match.group()
    shown = f"`{real.relative_to(ROOT).as_posix()}`"
    return shown if text.lower().replace(" ", "_") in real.stem else f"{text} ({shown})"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:  # noqa: ANN401 - of MkDocs
    """Called by MkDocs for every page."""
    source = Path(page.file.abs_src_path)
    if source.parent.name == "reproduction":
        title, _, rest = markdown.partition("\n")
        markdown = f"{title}\n\n![{title.strip('# ')}]({source.stem}.png)\n{rest}"
    for marker, written in (("keywords", keyword_table), ("about", about)):
        for name in re.findall(rf"<!-- {marker}: (\w+) -->", markdown):
            markdown = markdown.replace(f"<!-- {marker}: {name} -->", written(name))
    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", lambda m: outside(m, source.parent), markdown)


def on_page_content(html: str, **_: Any) -> str:  # noqa: ANN401 - of MkDocs
    """Called by MkDocs for every page: long names of tests and their files may break."""
    return re.sub(
        r"<code>tests?[_/][\w/.]+</code>",
        lambda m: re.sub(r"(?<=[\w])([/_])(?!code)", r"\1<wbr>", m.group()),
        html,
    )
