"""The page of a study: what it found, in a picture, sentences, one table, and details."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure as Canvas

from eshampoo.lab.figures.figure import Figure
from eshampoo.lab.figures.table import missing_sentence, row_text
from eshampoo.lab.figures.targets import Way, on_processor, spent, way_to_adamw
from eshampoo.lab.report.charts import draw_losses, plain_axes, png
from eshampoo.lab.report.compare import Group
from eshampoo.lab.report.significance import Difference, difference, standard_error
from eshampoo.lab.run.runlog import Array, Log
from eshampoo.lab.run.runs import Run

OURS = ("EShampoo", "EShampoo, KL factors")
FEW = 2  # fewer seeds than this cannot be tested


@dataclass(frozen=True)
class Problem:
    """One workload: the groups of the search by method, and those of fresh seeds."""

    name: str
    search: Mapping[str, Sequence[Group]]  # one group for each learning rate and β2
    fresh: Mapping[str, Group]

    @property
    def is_fresh(self) -> bool:
        """Tell whether every method has fresh seeds; else the seeds of the search must do."""
        counts = [len(self.fresh[label].logs) for label in self.search if label in self.fresh]
        return len(counts) == len(self.search) and min(counts) >= FEW

    @property
    def rows(self) -> dict[str, Group]:
        """Return each method at its best learning rate and β2."""
        if self.is_fresh:
            return {label: self.fresh[label] for label in self.search}
        return {label: best(groups) for label, groups in self.search.items()}

    @property
    def adamw(self) -> Group:
        """Return AdamW at its best learning rate and β2."""
        return self.rows["AdamW"]

    @property
    def processor(self) -> str:
        """Return the kind of processor that most methods had."""
        kinds = [{log.processor for log in group.logs} for group in self.rows.values()]
        counts = Counter(sorted(kind for found in kinds for kind in found))
        return counts.most_common(1)[0][0]

    def way(self, label: str) -> Way:
        """Return the way of a method to AdamW's loss."""
        return way_to_adamw(self.rows[label], self.adamw, self.processor)

    def price(self, label: str) -> float:
        """Return the CPU seconds of a method's whole run, as a share of AdamW's."""
        rows = self.rows[label], self.adamw
        ours, adamws = (spent(group, self.processor) for group in rows)
        return ours / adamws

    def seconds(self, log: Log) -> Array:
        """Return CPU seconds up to each step, as if gradients took as long as AdamW's."""
        unit = fmean(run.cpu_times["cpu"].sum() / run.gradients[-1] for run in self.adamw.logs)
        return unit * log.gradients

    def lowest(self) -> list[str]:
        """Return the method with the lowest final loss, and those that are level with it.

        The seeds of the search are too few to call methods level.
        """
        rows = self.rows
        first = min(rows, key=lambda label: rows[label].mean("final_loss"))
        if not self.is_fresh:
            return [first]
        return [
            label
            for label, group in rows.items()
            if label == first or apart(rows[first], group).word == "level"
        ]

    def first(self, ours: str, quantity: Callable[[Way], float]) -> bool:
        """Tell whether one of our methods is the first of it and all others at AdamW's loss."""
        ways = {label: quantity(self.way(label)) for label in self.rows}
        others = [way for label, way in ways.items() if label not in OURS]
        own = ways.get(ours, math.inf)
        return math.isfinite(own) and all(own <= way for way in others)

    @property
    def is_timed(self) -> bool:
        """Tell whether every method has a run on the same kind of processor."""
        return all(on_processor(group, self.processor).logs for group in self.rows.values())


def best(groups: Sequence[Group]) -> Group:
    """Return the group with the lowest final loss."""
    return min(groups, key=lambda group: group.mean("final_loss"))


def apart(group: Group, other: Group) -> Difference:
    """Test the difference of the final losses of two groups."""
    return difference(group.values("final_loss"), other.values("final_loss"))


def beta2(run: Run) -> str:
    """Write the β2 of a run."""
    betas = run.options.get("betas")
    return f"{betas[1]:g}" if isinstance(betas, tuple) else "–"


def share(value: float) -> str:
    """Write a share of AdamW's run."""
    return f"{value:.2f}" if math.isfinite(value) else "–"


def loss(group: Group) -> str:
    """Write a mean final loss with three or four digits."""
    return f"{group.mean('final_loss'):.4g}"


def whole_table(problems: Sequence[Problem]) -> list[str]:
    """Return loss, steps and CPU seconds of every method that is on more than one problem.

    The lowest loss is bold, with those that are level with it; so is the shortest way. Our methods
    are next to AdamW, so that a phone shows them without scrolling.
    """
    found = common(problems)
    near = [label for label in ("AdamW", *OURS) if label in found]
    labels = [*near, *(label for label in found if label not in near)]
    lines = [row_text(["", "", *labels]), "|---" * (2 + len(labels)) + "|"]
    for problem in problems:
        rows, lowest = problem.rows, problem.lowest()
        cells = [bold(loss(rows[k]), k in lowest) if k in rows else "–" for k in labels]
        none = Way(math.nan, math.nan)
        ways = {label: problem.way(label) if label in rows else none for label in labels}
        lines.append(row_text([problem.name, "loss", *cells]))
        columns = (
            ("steps", {label: way.steps for label, way in ways.items()}),
            ("seconds", {label: way.seconds for label, way in ways.items()}),
        )
        for name, shares in columns:
            shortest = min(value for value in shares.values() if not math.isnan(value))
            cells = [bold(share(value), value == shortest) for value in shares.values()]
            lines.append(row_text(["", name, *cells]))
    return lines


def common(problems: Sequence[Problem]) -> list[str]:
    """Return the methods that are on more than one problem."""
    counts = Counter(label for problem in problems for label in problem.search)
    return [label for label, count in counts.items() if count > 1 or len(problems) == 1]


def bold(text: str, chosen: bool) -> str:
    """Mark a cell of a table."""
    return f"**{text}**" if chosen and text != "–" else text


def problem_table(problem: Problem) -> list[str]:
    """Return the table of one problem, from the lowest loss to the highest."""
    metric = problem.adamw.logs[0].header["metric"]
    columns = ["method", "learning rate", "β2", "seeds", "final loss", metric]
    columns += ["steps to AdamW's", "CPU s to AdamW's", "CPU s of the run", "against AdamW"]
    columns += ["EShampoo against it"]
    lines = [row_text(columns), "|---" * len(columns) + "|"]
    ours = problem.rows["EShampoo"]
    for label, group in sorted(problem.rows.items(), key=lambda item: item[1].mean("final_loss")):
        error = standard_error(group.values("final_loss"))
        spread = "" if math.isnan(error) else f" ± {error:.1g}"
        way, price = problem.way(label), problem.price(label)
        cells = [label, f"{group.run.rate:g}", beta2(group.run), str(len(group.logs))]
        cells += [loss(group) + spread, f"{fmean(group.metrics()):.3g}"]
        cells += [share(way.steps), share(way.seconds), share(price)]
        cells += ["–" if label == "AdamW" else str(apart(group, problem.adamw))]
        cells += ["–" if label == "EShampoo" else str(apart(ours, group))]
        lines.append(row_text(cells))
    return lines


def at_adamws_rate(problem: Problem) -> Group | None:
    """Return EShampoo of the search at AdamW's best learning rate, if it was tried there."""
    lr = best(problem.search["AdamW"]).run.rate
    there = [group for group in problem.search["EShampoo"] if group.run.rate == lr]
    return there[0] if there else None


def transfer_sentence(problem: Problem) -> str:
    """Say how EShampoo does at AdamW's best learning rate, on the seeds of the search."""
    adamw, there = best(problem.search["AdamW"]), at_adamws_rate(problem)
    if there is None:
        return f"EShampoo was not tried at AdamW's best rate, {adamw.run.rate:g}."
    own = best(problem.search["EShampoo"])
    best_rate = (
        "This is also EShampoo's best rate."
        if own is there
        else f"EShampoo's best rate is {own.run.rate:g}: it ends at {loss(own)}."
    )
    return (
        f"In the search AdamW's best rate is {adamw.run.rate:g}: AdamW ends at {loss(adamw)}, and"
        f" EShampoo at {loss(there)}. {best_rate}"
    )


def findings(problems: Sequence[Problem]) -> list[str]:
    """Say on how many problems each goal is met, one sentence each."""
    timed = [p for p in problems if p.is_timed]

    def told(chosen: Sequence[Problem], among: Sequence[Problem] = problems) -> str:
        return f"{len(chosen)} of {len(among)}" + (
            f" ({', '.join(problem.name for problem in chosen)})" if chosen else ""
        )

    sentences = []
    for label in OURS:
        lowest = [p for p in problems if label in p.lowest()]
        steps = [p for p in problems if p.first(label, lambda way: way.steps)]
        seconds = [p for p in timed if p.first(label, lambda way: way.seconds)]
        name = label.replace(", ", " with ")
        sentences += [
            f"{name} has the lowest final loss, or is level with it, on {told(lowest)}.",
            f"{name} is first at AdamW's final loss: in steps on"
            f" {told(steps)}, in CPU seconds on {told(seconds, timed)}.",
        ]
    if len(timed) < len(problems):
        mixed = " and ".join(p.name for p in problems if not p.is_timed)
        sentences.append(f"On {mixed} types of processor are mixed, so CPU seconds do not count.")
    rates = [(p, there) for p in problems if (there := at_adamws_rate(p)) is not None]
    below = [
        p
        for p, there in rates
        if there.mean("final_loss") < best(p.search["AdamW"]).mean("final_loss")
    ]
    sooner = [p for p in problems if p.way("EShampoo").steps < p.way("AdamW").steps]
    beaten = [
        f"to {' and '.join(names)} on {p.name}"
        for p in problems
        if p.is_fresh and (names := lower_than(p.rows["EShampoo"], p))
    ]
    untried = ", ".join(p.name for p in problems if at_adamws_rate(p) is None)
    sentences += [
        f"At AdamW's best rate EShampoo ends lower than AdamW on {told(below)}"
        + (f"; we did not try this rate on {untried}." if untried else "."),
        f"EShampoo reaches AdamW's final loss after fewer steps than AdamW on {told(sooner)}.",
    ]
    if beaten:
        sentences.append(f"EShampoo loses {', and '.join(beaten)}.")
    return sentences


def lower_than(group: Group, problem: Problem) -> list[str]:
    """Return the methods of a problem that end lower than a group, with their t and p."""
    return [
        f"{label} ({result.numbers})"
        for label, other in problem.rows.items()
        if other is not group and (result := apart(other, group)).word == "lower"
    ]


def details(problem: Problem) -> list[str]:
    """Return the part of the page about one problem, folded away."""
    log = problem.adamw.logs[0]
    kinds = sorted({log.processor for group in problem.rows.values() for log in group.logs})
    seeds = "fresh seeds" if problem.is_fresh else "seeds of the search (fresh ones are missing)"
    setting = (
        f"{log.header['parameters']:,} parameters, {log.run.steps} steps, batch"
        f" {log.header['setting']['batch']}; {seeds}; on {' and '.join(kinds)}."
    )
    if len(kinds) > 1:
        setting += f" CPU seconds are those of runs on {problem.processor} alone."
    table, rates = problem_table(problem), transfer_sentence(problem)
    return folded(problem.name, [setting, "", *table, "", rates])


INTRODUCTION = (
    "Each method is tuned first. Then it runs again with fresh seeds, and these runs count. *Loss*"
    " is the final training loss. *Steps* and *seconds* (of CPU time) say how soon a method"
    " reaches AdamW's final loss, as shares of AdamW's whole run. **Bold** is the lowest loss,"
    " with all that are level with it, and the shortest way."
)

PROTOCOL = (
    "**Search.** Every method is tried at learning rates about a factor √10 apart, on two seeds."
    " EShampoo's rates are a factor of two or three apart. If the best rate is at an edge, we try"
    " one more. Every method but EShampoo is tried with β2 = 0.95 and with the workload's own β2;"
    " the better one counts.",
    "**Loss** is the mean training loss over the last 5 % of the steps.",
    "**Steps and seconds.** We average the loss over the seeds. The table says when this mean first"
    " reaches AdamW's mean final loss. AdamW itself has a share, too.",
    "**CPU seconds** are those of the process, with one thread. A machine is not equally fast at"
    " all hours, so we count as if the gradients of every run took as long as AdamW's. We compare"
    " only runs on one type of processor.",
    "**Level** means that Welch's t-test finds no difference: p > 0.05, not corrected for the"
    " number of comparisons. We write t(degrees of freedom); a positive t means a lower loss.",
    "**First in steps or seconds** means no later than any other method. There EShampoo (Gram"
    " factors, the default) and EShampoo with KL factors do not compete with each other.",
)


def folded(summary: str, lines: Sequence[str]) -> list[str]:
    """Return lines of a page that a reader unfolds."""
    return ['<details markdown="1">', f"<summary>{summary}</summary>", "", *lines, "", "</details>"]


def introduction(problems: Sequence[Problem], command: str, missing: Sequence[Run]) -> list[str]:
    """Say what the page shows, how it was measured, and which runs it does not have."""
    lines = [INTRODUCTION, ""]
    if searched := [problem.name for problem in problems if not problem.is_fresh]:
        lines += [
            f"**Fresh seeds are missing on {', '.join(searched)}.** There the table has the two"
            " seeds of the search. They also chose the rate, so these losses are a little low. Two"
            " seeds are too few to call methods level, so only the lowest loss is bold.",
            "",
        ]
    torch_version = problems[0].adamw.logs[0].header["environment"]["torch"]
    lines += [
        f"    {command}",
        "",
        f"This command writes the page from the logs in results/ (torch {torch_version}).",
        "",
        *folded("How it was measured", [f"- {entry}" for entry in PROTOCOL]),
        "",
    ]
    if missing:
        lines += [*folded(f"Missing runs: {len(missing)}", [missing_sentence(missing)]), ""]
    return lines


def page(
    problems: Sequence[Problem],
    figure: Figure,
    command: str,
    left_out: Sequence[str],
    missing: Sequence[Run] = (),
) -> str:
    """Write the page, with the command that writes it again."""
    lines = [f"# {figure.title}", "", *introduction(problems, command, missing)]
    curves = f"{figure.name}.png"
    lines += [
        f"[![loss against CPU seconds]({curves})]({curves})",
        "",
        *(f"- {sentence}" for sentence in findings(problems)),
        "",
        *whole_table(problems),
        "",
    ]
    for problem in problems:
        for label in problem.search.keys() - {*common(problems)}:
            way = problem.way(label)
            lines += [
                f"On {problem.name}, {label} ends at {loss(problem.rows[label])} (steps"
                f" {share(way.steps)}, seconds {share(way.seconds)}).",
                "",
            ]
    lines += ["## Each problem", ""]
    for problem in problems:
        lines += [*details(problem), ""]
    rates = f"{figure.name}-rates.png"
    lines += ["## Over the learning rate", "", f"[![final loss]({rates})]({rates})", ""]
    lines += ["## What was left out", "", *(f"- {entry}" for entry in left_out), ""]
    return "\n".join(lines)


def picture(problems: Sequence[Problem]) -> bytes:
    """Draw the loss against CPU seconds on every problem, of runs on one kind of processor."""
    labels = dict.fromkeys(label for problem in problems for label in problem.search)
    columns = min(4, len(problems))
    lines = math.ceil(len(problems) / columns)
    canvas = Canvas(figsize=(3.3 * columns, 2.9 * lines), layout="constrained")
    grid: Any = canvas.subplots(lines, columns, squeeze=False)
    for axes in grid.flat[len(problems) :]:
        axes.set_axis_off()
    for problem, axes in zip(problems, grid.flat, strict=False):
        rows = {label: problem.rows.get(label, Group(label, ())) for label in labels}
        drawn = [(k, on_processor(group, problem.processor)) for k, group in rows.items()]
        draw_losses(axes, drawn, "CPU seconds", problem.seconds)
        axes.set_title(problem.name, fontsize=11)
        plain_axes(axes)
    axes = max(grid.flat, key=lambda axes: len(axes.get_legend_handles_labels()[1]))
    canvas.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=8)
    return png(canvas)


def short_table(problems: Sequence[Problem], names: Mapping[str, str]) -> list[str]:
    """Return the table of README: losses, and steps and CPU seconds to AdamW's loss.

    AdamW's own way is in brackets. The lowest loss is bold, with those that are level with it.
    """
    columns = ["", "AdamW", "best of the others", "EShampoo", "KL factors", "steps", "CPU seconds"]
    lines = [row_text(columns), "|---" + "|--:" * (len(columns) - 1) + "|"]
    for problem in problems:
        rows, lowest = problem.rows, problem.lowest()
        others = [label for label in rows if label not in (*OURS, "AdamW")]
        rival = min(others, key=lambda label: rows[label].mean("final_loss"))
        digits = 4 if problem.adamw.mean("final_loss") > 1 else 3
        cells = [names[problem.name]]
        for label in ("AdamW", rival, *OURS):
            mean = f"{rows[label].mean('final_loss'):.{digits}g}" if label in rows else "–"
            text = bold(mean, label in lowest)
            cells.append(f"{text} ({label.partition(',')[0]})" if label == rival else text)
        ours, adamws = problem.way("EShampoo"), problem.way("AdamW")
        cells.append(f"{share(ours.steps)} ({share(adamws.steps)})")
        cells.append(f"{share(ours.seconds)} ({share(adamws.seconds)})")
        lines.append(row_text(cells))
    return lines
