"""The one kind of error that is the user's to put right."""

from pathlib import Path


class UserError(Exception):
    """A mistake in what was typed or given; shown as one line (value, rule, fix), exit code 2."""


def missing_data(name: str, path: Path | None, source: str) -> UserError:
    """Return the error for data that are not there: where they come from, and which flag to set."""
    where = "no path was given" if path is None else f"not found at {path}"
    return UserError(f"{name}: {where}; get {source} as --data PATH (or set ESHAMPOO_DATA)")
