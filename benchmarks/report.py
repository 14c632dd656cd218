"""The page and the figure, from the JSON: `python -m benchmarks.report results.json docs/`."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import shapes
from .bars import Results, all_bars
from .contenders import CONTENDERS

COLUMNS = (
    ("plain ms", ("plain", "wall"), 1e3),
    ("CPU ms", ("plain", "cpu"), 1e3),
    ("limit ms", ("limit", "wall"), 1e3),
    ("stacked limit ms", ("stacked_limit", "wall"), 1e3),
    ("check ms", ("check", "wall"), 1e3),
    ("refresh ms", ("refresh", "wall"), 1e3),
    ("mean of 10 ms", ("cycle", "wall"), 1e3),
    ("first ms", ("first", "wall"), 1e3),
    ("state B/param", ("state_bytes_per_parameter",), 1.0),
    ("peak B/param", ("peak_bytes_per_parameter",), 1.0),
)


def title(spec: Mapping[str, Any]) -> str:
    """What a case is called in the output, on the page and in --only."""
    return " ".join(str(spec[key]) for key in ("kind", "shapes", "contender") if key in spec)


def case_table(results: Results, names: Sequence[str]) -> str:
    """One line per optimizer and model that was measured, as Markdown."""
    head = ["model", "optimizer", *(column[0] for column in COLUMNS)]
    lines = ["| " + " | ".join(head) + " |", "|---|---|" + "--:|" * len(COLUMNS)]
    for name in names:
        for who, contender in CONTENDERS.items():
            if not results.rounds("measure", name, who):
                continue
            cells = [_cell(results.value(name, who, *path), scale) for _, path, scale in COLUMNS]
            lines.append("| " + " | ".join([name, contender.title, *cells]) + " |")
    return "\n".join(lines)


def _cell(value: float | None, scale: float) -> str:
    return (
        ""
        if value is None
        else f"{value * scale:.3g}"
        if value * scale < 100
        else (f"{value * scale:.0f}")
    )


def bar_table(results: Results) -> str:
    """The bars as Markdown."""
    lines = ["| case | measured | bar | reach for | |", "|---|--:|--:|--:|---|"]
    for bar in all_bars(results):
        value = "" if bar.value is None else f"{bar.value:.2f}"
        name = CONTENDERS[bar.detail].title if bar.detail in CONTENDERS else bar.detail
        detail = f"{bar.verdict} ({name})" if name else bar.verdict
        lines.append(f"| {bar.case} | {value} | {bar.bar} | {bar.reach} | {detail} |")
    return "\n".join(lines)


def growth_table(results: Results, names: Sequence[str]) -> str:
    """EShampoo beside AdamW and the limit over widths or depths."""
    lines = ["| width × layers | plain ms | limit ms | ratio | AdamW ms | state B/param | peak |"]
    lines.append("|---|--:|--:|--:|--:|--:|--:|")
    for name in names:
        width, count = name.split(":")[1:]
        numbers = [
            results.value(name, "eshampoo", "plain", "wall"),
            results.value(name, "eshampoo", "limit", "wall"),
            results.value(name, "adamw_foreach", "plain", "wall"),
        ]
        ratio = results.inside(
            results.rounds("measure", name, "eshampoo"), "plain", "limit", "wall"
        )
        cells = [_cell(numbers[0], 1e3), _cell(numbers[1], 1e3), _cell(ratio, 1.0)]
        cells.append(_cell(numbers[2], 1e3))
        for key in ("state_bytes_per_parameter", "peak_bytes_per_parameter"):
            cells.append(_cell(results.value(name, "eshampoo", key), 1.0))
        lines.append(f"| {width} × {count} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def widths() -> list[str]:
    """The models that grow in width."""
    return [f"layers:{width}:{shapes.GROWTH_LAYERS}" for width in shapes.WIDTHS]


def depths() -> list[str]:
    """The models that grow in depth."""
    return [f"layers:{shapes.GROWTH_WIDTH}:{count}" for count in shapes.DEPTHS]


def page(record: Mapping[str, Any]) -> str:
    """docs/benchmarks.md."""
    results = Results(record["cases"])
    m = record["machine"]
    skipped = [case for case in record["cases"] if "skipped" in case]
    again = sorted({title(case["spec"]) for case in record["cases"] if case.get("again")})
    models = "\n".join(f"- `{name}`: {model}" for name, model in shapes.TITLES.items())
    parts = [
        "# Benchmarks",
        f"Written by `{record['command']}`; do not edit. {m['cpu']}, {m['cores']} cores, "
        f"{on_device(m)}**{m['threads']} threads**, torch {m['torch']}, Python {m['python']}, "
        f"{m['system']}; load at the start {m['load_at_start']}. "
        "Peers: see `benchmarks/requirements.txt`.",
        "Every case runs in a fresh process. Every step has new random gradients, the same for "
        "all optimizers. Numbers are medians. Cases that we compare run in turn. The *limit* is "
        "the time of the bare matrix products, `torch.mm` into outputs made beforehand: 3 units of "
        "mn(m+n) multiply-adds for EShampoo, 2 for stale Shampoo. The *stacked limit* takes `bmm` "
        "instead. ScalableShampoo preconditions from its first step here. Every SOAP has F = 10 "
        "and no basis on sides above 2,048. We measured HeavyBall's compiled SOAP on one model "
        "only, because compiling takes minutes.",
        "## Bars",
        "A ratio must stay below its *bar*. *Reach for* is the goal beyond that.",
        bar_table(results),
        "![plain step beside the limit and the peers, and growth](benchmarks.png)",
        "## All optimizers",
        models,
        folded("Times and bytes", case_table(results, list(shapes.MODELS))),
        "## Growth",
        folded(
            f"With the width ({shapes.GROWTH_LAYERS} square layers)",
            growth_table(results, widths()),
        ),
        folded(
            f"With the number of layers (width {shapes.GROWTH_WIDTH})",
            growth_table(results, depths()),
        ),
    ]
    if again:
        parts.append(
            "Measured again after the rest, with `--only … --update`: " + ", ".join(again) + "."
        )
    if skipped:
        lines = [f"- {title(case['spec'])}: {case['skipped']}" for case in skipped]
        parts += ["## Not measured", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def folded(summary: str, table: str) -> str:
    """A table that a reader opens."""
    return f"<details markdown>\n<summary>{summary}</summary>\n\n{table}\n\n</details>"


def on_device(machine: Mapping[str, Any]) -> str:
    """What the steps ran on, if not on the CPU."""
    return f"steps on **{machine['device']}**, " if "device" in machine else ""


def figure(record: Mapping[str, Any], path: Path) -> None:
    """Left: plain steps at ViT-S; middle and right: growth."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    results = Results(record["cases"])
    fig, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.8), constrained_layout=True)
    bars = [
        (contender.title, wall * 1e3, contender.package == "eshampoo")
        for who, contender in CONTENDERS.items()
        if (wall := results.value("vit_s", who, "plain", "wall")) is not None
    ]
    bars.sort(key=lambda bar: bar[1])
    colors = ["#0072b2" if ours else "#999999" for *_, ours in bars]
    left.barh([bar[0] for bar in bars], [bar[1] for bar in bars], color=colors)
    left.set(title="plain step, SimpleViT-S/16", xlabel="ms", xscale="log")
    for axes, names, label, part in (
        (middle, widths(), "width", 1),
        (right, depths(), "layers", 2),
    ):
        for who, what, style in (
            ("eshampoo", "plain", "o-"),
            ("eshampoo", "limit", "s--"),
            ("adamw_foreach", "plain", "^:"),
        ):
            points = [
                (int(name.split(":")[part]), wall * 1e3)
                for name in names
                if (wall := results.value(name, who, what, "wall")) is not None
            ]
            series = CONTENDERS[who].title if what == "plain" else "limit"
            if points:
                axes.loglog(*zip(*points, strict=True), style, label=series)
                axes.legend()
        axes.set(title=f"growth with {label}", xlabel=label, ylabel="ms")
    fig.savefig(path, dpi=150)
    plt.close(fig)


def main(source: str, folder: str) -> None:
    record = json.loads(Path(source).read_text())
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / "benchmarks.md").write_text(page(record))
    figure(record, Path(folder) / "benchmarks.png")


if __name__ == "__main__":
    main(*sys.argv[1:3])
