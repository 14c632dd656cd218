"""The documentation of a class: the text of `Options`, reduced to the keywords of the class."""

import re

from .options import Options, offered

SECTION = re.compile(r"^    (\w.*:)\n((?: {8}.*\n)+)", re.MULTILINE)
ENTRY = re.compile(r"^        (\w+):.*\n(?: {12}.*\n)*", re.MULTILINE)


def described(options: type[Options]) -> str:
    """The sections of the text, with the entries of the keywords that these options offer."""
    own = {"params", *offered(options)}
    found = []
    for section in SECTION.finditer(Options.__doc__ or ""):
        title, entries = section.groups()
        kept = [entry.group() for entry in ENTRY.finditer(entries) if entry.group(1) in own]
        if kept:
            found.append(f"    {title}\n{''.join(kept)}")
    return "\n".join(found)
