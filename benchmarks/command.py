"""The command line of a script."""

import argparse


def command_line(script: str, text: str | None) -> argparse.ArgumentParser:
    """A parser for `python -m benchmarks.SCRIPT`, whose help is the docstring as it is written."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{script}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
