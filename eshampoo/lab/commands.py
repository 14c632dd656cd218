"""What the commands do, and what they print."""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from eshampoo.lab.catalogue import WORKLOADS, setting, workload
from eshampoo.lab.errors import INTERRUPTED, UserError
from eshampoo.lab.files import held, made, write_atomic
from eshampoo.lab.optimizers import Option, check_options, own_memory, parse_option
from eshampoo.lab.report.compare import comparison_table, group_logs, time_text, verdict
from eshampoo.lab.run.checkpoint import discard_checkpoints
from eshampoo.lab.run.progress import RunDisplay
from eshampoo.lab.run.runlog import FILE_NAME, Log, find_logs, finished, read_log
from eshampoo.lab.run.runs import Run
from eshampoo.lab.run.training import stop_on_signal, train

# What to try after a comparison.
OWN_MODEL = """Next, with your own model and the rate that you use for AdamW:
    from eshampoo import EShampoo
    optimizer = EShampoo(model.named_parameters(), lr=3e-4)"""


def perform(known: argparse.Namespace, rest: Sequence[str], typed: Sequence[str]) -> int:
    """Carry out a parsed command: ``rest`` are optimizer keywords, ``typed`` the whole line."""
    console = Console(markup=False, emoji=False)  # show names unchanged
    if known.command == "workloads":
        return list_workloads(known.data, console)
    if known.command == "report":
        return report(known.directory, console)
    if known.command == "train":
        return train_one(known, keyword_options(rest), command_text(typed), console)
    if known.command == "compare":
        return compare(known, command_text(typed), console)
    if known.command == "study":
        from eshampoo.lab.figures.study import study

        return study(known, console)
    from eshampoo.lab.figures.reproduce import reproduce

    return reproduce(known, console)


def command_text(typed: Sequence[str]) -> str:
    """Return the line as typed, but without the places of data and results on this machine."""
    words = list(typed)
    for place in ("data", "out"):
        for index, word in enumerate(words):
            if word == f"--{place}" and index + 1 < len(words):
                words[index + 1] = place.upper()
            elif word.startswith(f"--{place}="):
                words[index] = f"--{place}={place.upper()}"
    return shlex.join(["eshampoo", *words])


def keyword_options(rest: Sequence[str]) -> dict[str, Option]:
    """Read words such as ``--tau 0.1 --frequency=10`` as options."""
    options: dict[str, Option] = {}
    words = list(rest)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise UserError(f"unexpected argument {word!r}; keywords are typed as --name value")
        key, equals, text = word[2:].partition("=")
        if not equals:
            if not words or words[0].startswith("--"):
                raise UserError(f"--{key} needs a value, for instance --{key}=VALUE")
            text = words.pop(0)
        options[key.replace("-", "_")] = parse_option(text)
    return options


def optimizer_list(text: str) -> list[tuple[str, dict[str, Option]]]:
    """Read a list such as ``adamw,eshampoo:tau=0.1:frequency=10`` as names with options."""
    chosen = []
    for part in text.split(","):
        name, *pairs = part.strip().split(":")
        options = {}
        for pair in pairs:
            key, equals, value = pair.partition("=")
            if not equals:
                raise UserError(f"cannot read {pair!r} of {part!r}; write name:key=value:key=value")
            options[key] = parse_option(value)
        check_options(name, options)
        if (name, options) in chosen:
            raise UserError(f"{part.strip()!r} is listed twice; give the second one other options")
        chosen.append((name, options))
    return chosen


def list_workloads(data: Path | None, console: Console) -> int:
    """Show the table of workloads, and say whether their data are there."""
    table = Table("workload", "trains", "metric", "scales (steps)", "data")
    for row in WORKLOADS.values():
        try:
            found = row.locate(data)
            status = ("found", "green") if found else ("ready", "green")
            place = found.name if found else row.origin
        except UserError:
            status = ("missing", "yellow")
            place = f"{row.origin}; give --data PATH"
        scales = ", ".join(f"{scale} {row.settings[scale].steps}" for scale in row.settings)
        data_cell = Text.assemble(status, " ", place)
        table.add_row(row.name, row.title, row.metric_name, scales, data_cell)
    console.print(table)
    return 0


def execute(
    runs: Sequence[tuple[Run, Path]],
    directory: Path,
    known: argparse.Namespace,
    command: str,
    console: Console,
) -> bool:
    """Train runs below a directory under a live display; return False when interrupted.

    It locks the directory meanwhile. A run that is refused before its first step leaves nothing.
    """
    for run, _ in runs:
        check_options(run.optimizer, run.options)
    with made(directory), held(directory):
        return train_all(runs, known, command, console)


def train_all(
    runs: Sequence[tuple[Run, Path]], known: argparse.Namespace, command: str, console: Console
) -> bool:
    """Train the runs one after another on the same data; return False when interrupted."""
    chosen = setting(runs[0][0])
    threads = known.threads or chosen.threads
    if threads is not None:
        torch.set_num_threads(threads)
    with console.status("loading the data"):
        dataset = chosen.data(workload(runs[0][0].workload).locate(known.data))
    display = RunDisplay(console, [run for run, _ in runs])
    with stop_on_signal() as stopped, display:
        for run, out in runs:
            if known.resume and finished(out, run):
                display.skip(run)
                continue
            done = train(
                run,
                dataset,
                out,
                command=command,
                resume=known.resume,
                checkpoint_every=known.checkpoint_every,
                device=known.device,
                watch=display.observer(run, out / "tensorboard" if known.tensorboard else None),
                stopped=stopped,
            )
            if not done:
                return False
    return True


def train_one(
    known: argparse.Namespace, options: dict[str, Option], command: str, console: Console
) -> int:
    """Carry out ``eshampoo train``: one run, and a table of its results."""
    row = workload(known.workload)
    check_options(known.optimizer, options)
    lengths = {"steps": known.steps, "evaluations": known.evaluations}
    options = {**own_memory(known.optimizer), **options}
    run = row.run(known.optimizer, options, scale=known.scale, seed=known.seed, **lengths)
    out = known.out or Path("runs") / run.place
    existing = out / FILE_NAME
    if existing.exists() and not known.resume:
        raise UserError(f"{out} holds a run already; add --resume or choose another --out")
    if not execute([(run, out)], out, known, command, console):
        console.print(f"interrupted and saved; continue: same command with --resume --out {out}")
        return INTERRUPTED
    log = read_log(existing)
    show([log], console)
    console.print(f"log: {existing}")
    return 0


def compare(known: argparse.Namespace, command: str, console: Console) -> int:
    """Carry out ``eshampoo compare``: every optimizer with every seed, table, verdict and page."""
    row = workload(known.workload)
    chosen = optimizer_list(known.optimizers)
    directory = known.out or Path("runs") / f"compare-{row.name}"
    lengths = {"steps": known.steps, "evaluations": known.evaluations}
    runs = [
        row.run(name, {**own_memory(name), **options}, scale=known.scale, seed=seed, **lengths)
        for seed in range(known.seeds)
        for name, options in chosen
    ]
    placed = [(run, directory / run.name) for run in runs]
    if not execute(placed, directory, known, command, console):
        console.print("interrupted and saved; continue with the same command and --resume")
        return INTERRUPTED
    for _, out in placed:
        discard_checkpoints(out)
    logs = [read_log(out / FILE_NAME) for _, out in placed]
    show(logs, console)
    write_report(logs, directory, console)
    console.print(time_text(group_logs(logs)))
    console.print(OWN_MODEL)
    return 0


def show(logs: Sequence[Log], console: Console) -> None:
    """Show the comparison table and the verdict."""
    groups = group_logs(logs)
    columns, rows = comparison_table(groups)
    title = f"{logs[0].run.workload}, {logs[0].run.steps} steps"
    table = Table(*columns, title=title, box=SIMPLE, padding=0)  # fits into 80 columns
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    for cells in rows:
        table.add_row(*cells)
    console.print(table)
    console.print(Text(verdict(groups), style="bold"))


def write_report(logs: Sequence[Log], directory: Path, console: Console) -> None:
    """Write report.html and say where it is."""
    from eshampoo.lab.report.page import report_page

    page = directory / "report.html"
    write_atomic(page, report_page(logs).encode())
    console.print(f"report: {page}")


def report(directory: Path, console: Console) -> int:
    """Carry out ``eshampoo report DIR``: table, verdict and page, only from the logs."""
    logs = find_logs(directory)
    show(logs, console)
    write_report(logs, directory, console)
    return 0
