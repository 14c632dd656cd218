"""What the fields of a log may hold. Anybody may have written or damaged a log."""

from collections.abc import Callable, Mapping
from typing import Any

Field = Callable[[Any], bool]

LARGEST = 1e100  # a run logs nothing larger; sums and squares of such numbers stay finite


def number(value: object) -> bool:
    """Tell whether a value is a number of sensible size."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def number_or_null(value: object) -> bool:
    """Tell whether a value is a number or null, which stands for a number that was not finite."""
    return value is None or number(value)


def whole(value: object) -> bool:
    """Tell whether a value is a whole number of 64 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def count(value: object) -> bool:
    """Tell whether a value is a positive count."""
    return isinstance(value, int) and whole(value) and value > 0


def word(value: object) -> bool:
    """Tell whether a value is text without control characters, which would reach the terminal."""
    return isinstance(value, str) and value.isprintable()


def text(value: object) -> bool:
    """Tell whether a value is text."""
    return isinstance(value, str)


def table(value: object) -> bool:
    """Tell whether a value is a JSON object."""
    return isinstance(value, Mapping)


def option(value: object) -> bool:
    """Tell whether a value is one of an optimizer's options: a scalar, a word or numbers."""
    if isinstance(value, list | tuple):
        return all(number(part) for part in value)
    return value is None or isinstance(value, bool) or number(value) or word(value)


def options(value: object) -> bool:
    """Tell whether a value is a table of options."""
    return isinstance(value, Mapping) and all(word(k) and option(v) for k, v in value.items())


def machine(value: object) -> bool:
    """Tell whether a value describes a machine, with the number of threads to continue with."""
    return isinstance(value, Mapping) and count(value.get("threads")) and value["threads"] <= 1000


RUN: Mapping[str, Field] = {
    "workload": word,
    "scale": word,
    "optimizer": word,
    "options": options,
    "seed": whole,
    "steps": count,
}
RECORDS: Mapping[str, Mapping[str, Field]] = {
    "run": {
        "run": table,
        "setting": table,
        "examples": count,
        "parameters": count,
        "metric": word,
        "trivial": number_or_null,
        "command": text,
        "environment": machine,
    },
    "evaluation": {"step": count, "metric": number_or_null},
    "end": {
        "final_loss": number_or_null,
        "seconds": number,
        "optimizer_share": number,
        "computations": whole,
    },
}
OPTIONAL: Mapping[str, Field] = {"cpu_seconds": number, "evaluations": count}
FACTOR: Mapping[str, Field] = {
    "parameter": text,
    "kind": text,
    "letter": text,
    "block": whole,
    "mode": whole,
    "size": whole,
}


def check(record: Mapping[str, Any], fields: Mapping[str, Field]) -> None:
    """Raise ValueError for a field that is missing or holds what no run writes."""
    for key, holds in fields.items():
        if key not in record:
            raise ValueError(f"no {key!r}")
        if not holds(record[key]):
            raise ValueError(f"{key!r} with {record[key]!r:.60}")
    for key in record.keys() & OPTIONAL.keys():
        if not OPTIONAL[key](record[key]):
            raise ValueError(f"{key!r} with {record[key]!r:.60}")
