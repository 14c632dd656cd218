"""The live display of runs, and TensorBoard beside it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from eshampoo.lab.run.runs import Run, label
from eshampoo.lab.run.training import Progress as Step

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

REDRAW = 0.1  # seconds between redraws; redrawing costs time


class RunDisplay:
    """A bar for each optimizer with its loss, speed, basis computations and time left."""

    def __init__(self, console: Console, runs: Sequence[Run]) -> None:
        self.runs = list(runs)
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[state]}", markup=False),
            TimeRemainingColumn(compact=True),
            console=console,
            expand=True,
        )
        self.tasks: dict[str, TaskID] = {}
        for run in self.runs:
            name = label(run, self.runs)
            if name not in self.tasks:
                total = sum(other.steps for other in self.runs if label(other, self.runs) == name)
                self.tasks[name] = self.progress.add_task(name, total=total, state="", start=False)
        self.overall = self.progress.add_task(
            "all", total=sum(run.steps for run in self.runs), state=""
        )
        self.writers: list[SummaryWriter] = []

    def __enter__(self) -> "RunDisplay":
        self.progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.progress.stop()
        for writer in self.writers:
            writer.close()

    def skip(self, run: Run) -> None:
        """Count a run that was finished before."""
        self.progress.update(self.tasks[label(run, self.runs)], advance=run.steps)
        self.progress.update(self.overall, advance=run.steps)

    def writer(self, directory: Path) -> "SummaryWriter":
        """Start a log of TensorBoard; it is closed with the display."""
        from torch.utils.tensorboard import SummaryWriter

        self.writers.append(SummaryWriter(str(directory)))
        return self.writers[-1]

    def observer(self, run: Run, tensorboard: Path | None) -> Callable[[Step], None]:
        """Return the function to call after every step of a run."""
        task = self.tasks[label(run, self.runs)]
        self.progress.start_task(task)
        writer: SummaryWriter | None = None
        previous, drawn = 0, 0.0

        def observe(step: Step) -> None:
            nonlocal previous, drawn, writer
            if tensorboard is not None:
                writer = writer or self.writer(tensorboard)
                writer.add_scalar("loss", step.loss, step.step)
                writer.add_scalar("basis computations", step.computations, step.step)
            if step.seconds - drawn < REDRAW and step.step != run.steps:
                return
            drawn = step.seconds
            state = f"loss {step.loss:.4f}  {step.speed:.1f} steps/s  {step.computations} bases"
            self.progress.update(task, advance=step.step - previous, state=state)
            self.progress.update(self.overall, advance=step.step - previous)
            previous = step.step

        return observe
