"""The one kind of error that the user can fix."""

from pathlib import Path

LONGEST = 800  # characters of an error message


class UserError(Exception):
    """A user's mistake, shown as one line (value, rule, fix), with exit code 2."""


def missing_data(name: str, path: Path | None, source: str) -> UserError:
    """Return the error for data that are not there: where they come from, and which flag to set."""
    where = "no path was given" if path is None else f"not found at {path}"
    return UserError(f"{name}: {where}; get {source} as --data PATH (or set ESHAMPOO_DATA)")


def printable(text: str) -> str:
    """Return text that is safe in a terminal: control and half characters become ``�``.

    >>> printable("a \\x1b[31mred\\x1b[0m name")
    'a �[31mred�[0m name'
    """
    return "".join(letter if letter.isprintable() else "�" for letter in text)


def one_line(message: str) -> str:
    """Return a message as one line, shortened in its middle; the fix, at its end, stays."""
    line = printable(" ".join(message.split()))
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 202]} … {line[-199:]}"
