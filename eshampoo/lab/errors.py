"""The one kind of error that the user can fix, and the exit code of an interruption."""

from pathlib import Path

INTERRUPTED = 130  # the exit code after Ctrl-C


class UserError(Exception):
    """A user's mistake, shown as one line (value, rule, fix), with exit code 2."""


def missing_data(name: str, path: Path | None, source: str) -> UserError:
    """Return the error for data that are not there: where they come from, and which flag to set."""
    where = "no path was given" if path is None else f"not found at {path}"
    return UserError(f"{name}: {where}; get {source} as --data PATH (or set ESHAMPOO_DATA)")


def one_line(message: str) -> str:
    """Return a message as one line."""
    return " ".join(message.split())
