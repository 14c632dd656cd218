"""The page of a study: what it found, in tables, sentences and two pictures."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.figure import Figure as Canvas

from eshampoo.lab.figures.figure import Figure
from eshampoo.lab.figures.table import row_text
from eshampoo.lab.figures.targets import shares
from eshampoo.lab.report.charts import colour, plain_axes, png
from eshampoo.lab.report.compare import Group
from eshampoo.lab.report.significance import Difference, difference, standard_error

NEAR = 0.05  # a loss is as good as the best within this share of it
HALF = 0.5  # the goal: AdamW's loss in this share of its steps


@dataclass(frozen=True)
class Problem:
    """One workload: the groups of the search by rate, and those of fresh seeds, by method."""

    name: str
    search: dict[str, list[Group]]
    fresh: dict[str, Group]

    @property
    def adamw(self) -> Group:
        """Return AdamW at its best rate, on fresh seeds."""
        return self.fresh["AdamW"]


def apart(group: Group, other: Group) -> Difference:
    """Test the difference of the final losses of two groups."""
    return difference(group.values("final_loss"), other.values("final_loss"))


def problem_table(problem: Problem) -> list[str]:
    """Return the table of one problem, from the lowest loss to the highest."""
    metric = problem.adamw.logs[0].header["metric"]
    columns = ["method", "learning rate", "final loss", metric]
    columns += ["steps to AdamW's", "CPU s to AdamW's", "CPU s", "against AdamW", "against SOAP"]
    lines = [row_text(columns), "|---" * len(columns) + "|"]
    for label, group in sorted(problem.fresh.items(), key=lambda item: item[1].mean("final_loss")):
        losses = group.values("final_loss")
        steps, seconds = shares(group, problem.adamw)
        loss = f"{fmean(losses):.4g} ± {standard_error(losses):.1g}"
        cells = [label, f"{group.run.rate:g}", loss, f"{fmean(group.metrics()):.3g}"]
        cells += [str(steps), str(seconds), f"{group.mean('cpu_seconds'):.0f}"]
        for rival in ("AdamW", "SOAP"):
            cells.append("–" if label == rival else str(apart(group, problem.fresh[rival])))
        lines.append(row_text(cells))
    return lines


def transfer(problem: Problem, method: str = "EShampoo") -> tuple[float, float, float]:
    """Return AdamW's best rate in the search, the method's loss there, and its best loss."""
    best = min(problem.search["AdamW"], key=lambda group: group.mean("final_loss"))
    own = {group.run.rate: group.mean("final_loss") for group in problem.search[method]}
    return best.run.rate, own.get(best.run.rate, math.nan), min(own.values())


def transfer_sentence(problem: Problem) -> str:
    """Say whether AdamW's learning rate serves EShampoo."""
    lr, there, best = transfer(problem)
    if math.isnan(there):
        return f"EShampoo was not tried at AdamW's best rate, {lr:g}."
    verdict = "it carries over" if there <= (1 + NEAR) * best else "it does not carry over"
    adamw = min(group.mean("final_loss") for group in problem.search["AdamW"])
    below = "below" if there < adamw else "not below"
    return (
        f"AdamW's best rate is {lr:g}; EShampoo ends at {there:.4g} there, {below} AdamW's"
        f" {adamw:.4g}, and at {best:.4g} at its own best rate: {verdict}."
    )


def summary(problems: Sequence[Problem]) -> list[str]:
    """Count on how many problems each goal is met."""
    ours = [(problem, problem.fresh["EShampoo"]) for problem in problems]
    halves = [p.name for p, group in ours if shares(group, p.adamw)[0].mean <= HALF]
    behind = [p.name for p, g in ours if apart(g, p.fresh["SOAP"]).word == "higher"]
    ahead = [p.name for p, g in ours if apart(g, p.fresh["SOAP"]).word == "lower"]
    lower = [p.name for p, g in ours if apart(g, p.adamw).word == "lower"]
    near = [p.name for p in problems if transfer(p)[1] <= (1 + NEAR) * transfer(p)[2]]
    beaten = [f"{' and '.join(names)} on {p.name}" for p, g in ours if (names := lower_than(g, p))]
    count = len(problems)

    def told(names: Sequence[str]) -> str:
        return f"{len(names)} of {count}" + (f" ({', '.join(names)})" if names else "")

    return [
        f"- EShampoo with its defaults ends lower than AdamW on {told(lower)}.",
        f"- It ends lower than SOAP on {told(ahead)}, higher on {told(behind)}.",
        f"- It reaches AdamW's final loss in at most half of the steps on {told(halves)}.",
        f"- At AdamW's best rate it is within {NEAR:.0%} of its own best loss on {told(near)}.",
        f"- It loses to {'; to '.join(beaten)}." if beaten else "- It loses to none of the others.",
    ]


def lower_than(group: Group, problem: Problem) -> list[str]:
    """Return the methods of a problem that end lower than a group, with their t and p."""
    return [
        f"{label} ({result.numbers})"
        for label, other in problem.fresh.items()
        if other is not group and (result := apart(other, group)).word == "lower"
    ]


def processors(problem: Problem) -> list[str]:
    """Return the kinds of processors that the runs on fresh seeds had."""
    logs = [log for group in problem.fresh.values() for log in group.logs]
    return sorted({log.header["environment"]["processor"] for log in logs})


def page(problems: Sequence[Problem], figure: Figure, command: str, left_out: Sequence[str]) -> str:
    """Write the page, with the command that writes it again."""
    seeds = len(problems[0].adamw.logs)
    torch_version = problems[0].adamw.logs[0].header["environment"]["torch"]
    lines = [
        f"# {figure.title}",
        "",
        "Every optimizer is tried at the same learning rates, a factor √10 apart, on two seeds; a"
        " rate is added while the best one is at an edge. The tables show"
        f" {seeds} fresh seeds at the best rate, mean ± standard error. The final loss is the mean"
        " over the last 5 % of the steps. *To AdamW's* is when the averaged loss first reaches"
        " AdamW's mean final loss, as a share of AdamW's whole run; CPU seconds are those of the"
        " process, with one thread. The last two columns compare final losses by Welch's t-test,"
        " as t(degrees of freedom) and p; a positive t means that the loss of the row is lower. We"
        " call two methods level if p > 0.05; p is not corrected for the number of comparisons.",
        "",
        f"    {command}",
        "",
        f"torch {torch_version}. This page is written by that command from the logs in results/."
        " CPU seconds also depend on the processor and on what else it does: if a problem was run"
        " on two types of processor, ignore differences in CPU time below 20 %.",
        "",
        f"![steps and CPU seconds to AdamW's loss]({figure.name}.png)",
        "",
        *summary(problems),
        "",
    ]
    for problem in problems:
        log = problem.adamw.logs[0]
        lines += [
            f"## {problem.name}",
            "",
            f"{log.header['parameters']:,} parameters, {log.run.steps} steps, batch"
            f" {log.header['setting']['batch']}; on {' and '.join(processors(problem))}.",
            "",
            *problem_table(problem),
            "",
            transfer_sentence(problem),
            "",
        ]
    lines += ["## Over the learning rate", "", f"![final loss]({figure.name}-rates.png)", ""]
    lines += ["## What was left out", "", *(f"- {entry}" for entry in left_out), ""]
    return "\n".join(lines)


def picture(problems: Sequence[Problem]) -> bytes:
    """Draw steps and CPU seconds to AdamW's loss as ratios, with standard errors."""
    canvas = Canvas(figsize=(11, 0.9 + 0.75 * len(problems)), layout="constrained")
    both: Any = canvas.subplots(1, 2, sharey=True)
    labels = [label for label in problems[0].fresh if label != "AdamW"]
    titles = ("steps to AdamW's final loss", "CPU seconds to AdamW's final loss")
    for side, (axes, title) in enumerate(zip(both, titles, strict=True)):
        for index, label in enumerate(labels):
            found = [
                (row, shares(problem.fresh[label], problem.adamw)[side])
                for row, problem in enumerate(problems)
                if label in problem.fresh
            ]
            kept = [(row, share) for row, share in found if math.isfinite(share.mean)]
            places = np.array([row for row, _ in kept]) + 0.12 * (index - len(labels) / 2)
            means = [share.mean for _, share in kept]
            errors = [share.error for _, share in kept]
            hue = colour(index)
            axes.errorbar(means, places, xerr=errors, fmt="o", color=hue, label=label)
        axes.axvline(1, color="0.6", linewidth=1)
        axes.set_xlim(left=0)
        axes.set_title(f"{title} (AdamW: 1)", fontsize=11)
        plain_axes(axes)
    both[0].set_yticks(range(len(problems)), [problem.name for problem in problems])
    both[0].invert_yaxis()
    both[1].legend(fontsize=8, frameon=False)
    return png(canvas)
