"""The console command ``eshampoo``: its arguments, and one line for each mistake in them."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from eshampoo.lab.errors import INTERRUPTED, UserError, one_line

EXTRA = (
    "h5py",
    "matplotlib",
    "numpy",
    "PIL",
    "rdkit",
    "rich",
    "scipy",
    "sklearn",
    "tensorboard",
    "tokenizers",
)


class Parser(argparse.ArgumentParser):
    """An argument parser that complains in one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


def positive(text: str) -> int:
    """Read a whole number of at least 1."""
    return whole(text, 1, 10**9)


def some(text: str) -> int:
    """Read a number of seeds, threads or processes: small, and at least 1."""
    return whole(text, 1, 1000)


def seed(text: str) -> int:
    """Read a whole number that torch's generator takes."""
    return whole(text, -(2**63), 2**63 - 1)


def whole(text: str, least: int, most: int) -> int:
    """Read a whole number within bounds."""
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from {least} to {most}")
    return number


def parser() -> Parser:
    """Build the parser of all commands and their arguments."""
    top = Parser(prog="eshampoo", description="Train, compare and reproduce with eshampoo.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    workloads = commands.add_parser("workloads", help="list the workloads and their data")
    train = commands.add_parser(
        "train",
        allow_abbrev=False,
        help="train one workload with one optimizer",
        epilog="Any keyword of the optimizer is an option too: --frequency 10 --tau 0.05. A"
        " schedule gives values and the share of the run at which each starts: --tau 0.8,0.01@0.9",
    )
    compare = commands.add_parser("compare", allow_abbrev=False, help="train several and compare")
    reproduce = commands.add_parser("reproduce", allow_abbrev=False, help="make a figure")
    study = commands.add_parser("study", allow_abbrev=False, help="compare on many problems")
    report = commands.add_parser("report", allow_abbrev=False, help="write report.html for runs")

    train.add_argument("workload", metavar="WORKLOAD")
    train.add_argument("--optimizer", required=True, metavar="NAME")
    train.add_argument("--seed", type=seed, default=0)
    compare.add_argument("workload", metavar="WORKLOAD")
    compare.add_argument(
        "--optimizers",
        default="adamw,shampoo,soap,eshampoo",
        metavar="LIST",
        help="names with options after colons: adamw:lr=0.001,eshampoo:tau=0.05:frequency=10",
    )
    compare.add_argument("--seeds", type=some, default=3, metavar="N")
    add_figure_arguments_(reproduce, "FIGURE")
    add_figure_arguments_(study, "STUDY")
    report.add_argument("directory", type=Path, metavar="DIR")
    add_run_arguments_((train, compare, reproduce, study))
    for command in (train, compare):
        command.add_argument("--resume", action="store_true", help="continue an interrupted run")
        command.add_argument("--checkpoint-every", type=positive, default=200, metavar="STEPS")
        command.add_argument("--tensorboard", action="store_true", help="also log to TensorBoard")
        command.add_argument(
            "--evaluations", type=positive, metavar="N", help="how often to take the metric"
        )
    for command in (workloads, train, compare, reproduce, study):
        command.add_argument(
            "--data",
            type=Path,
            metavar="PATH",
            default=os.environ.get("ESHAMPOO_DATA"),
            help="file or directory of the data (or set ESHAMPOO_DATA)",
        )
    return top


def add_figure_arguments_(command: Parser, what: str) -> None:
    """Add the arguments of a command that makes many runs for one page."""
    command.add_argument("figure", metavar=what)
    command.add_argument("--only", metavar="LIST", help="only these workloads, separated by commas")
    command.add_argument(
        "--jobs",
        type=some,
        default=1,
        metavar="N",
        help="how many runs at a time; with more than one, each has one thread",
    )
    command.add_argument(
        "--seeds", type=some, metavar="N", help="number of seeds, instead of the figure's"
    )
    places = (
        ("--results", Path("results"), "compressed logs; runs that are there are not made again"),
        ("--runs", Path("runs/figures/logs"), "where missing runs are trained and continued"),
    )
    for name, place, purpose in places:
        text = f"{purpose} (default: {place})"
        command.add_argument(name, type=Path, default=place, metavar="DIR", help=text)
    switches = (
        ("--add", "add the runs of the figure to --results, compressed"),
        ("--stored", "train nothing; use the runs that there are, and name those that are missing"),
        ("--here", "make runs again whose stored logs are of another kind of processor"),
    )
    for name, purpose in switches:
        command.add_argument(name, action="store_true", help=purpose)


def add_run_arguments_(commands: Sequence[Parser]) -> None:
    """Add the arguments of every command that trains."""
    for command in commands:
        command.add_argument("--scale", choices=("tiny", "small", "paper"), default="small")
        command.add_argument(
            "--steps", type=positive, metavar="N", help="number of steps, instead of the scale's"
        )
        command.add_argument("--out", type=Path, metavar="DIR")
        command.add_argument(
            "--threads", type=some, metavar="N", help="number of threads of each run"
        )
        command.add_argument("--device", default="cpu", help="where runs compute: cpu, cuda, …")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return 0 when done, 130 when interrupted and saved, 2 for a mistake."""
    typed = list(sys.argv[1:] if arguments is None else arguments)
    try:
        known, rest = parser().parse_known_args(typed)
        if rest and known.command != "train":
            raise UserError(f"unknown argument {rest[0]!r} (see eshampoo {known.command} --help)")
        from eshampoo.lab.commands import perform

        return perform(known, rest, typed)
    except UserError as error:
        return complain(str(error))
    except OSError as error:  # the user has to fix what the system refuses
        where = "" if error.filename is None else f"{error.filename}: "
        return complain(f"{where}{error.strerror or error}; give another path or make it usable")
    except FloatingPointError as error:  # a step with nonfinite="raise"
        return complain(str(error))
    except KeyboardInterrupt:
        complain("interrupted")
        return INTERRUPTED
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRA:
            raise
        return complain(f"the lab needs {error.name}; install it with: pip install 'eshampoo[lab]'")


def complain(message: str) -> int:
    """Write one line to the error stream and return the exit code of a mistake."""
    sys.stderr.write(f"eshampoo: {one_line(message)}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
