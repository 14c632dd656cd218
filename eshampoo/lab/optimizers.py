"""The optimizers by the names that are typed, and the options that they take."""

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer

from eshampoo.lab.errors import UserError
from eshampoo.optimizers import CLASSES

Option = bool | int | float | str | None | tuple[float, ...]

OPTIMIZERS: Mapping[str, type[Optimizer]] = {
    found.__name__.lower(): found for found in (AdamW, *CLASSES)
}


def optimizer_class(name: str) -> type[Optimizer]:
    """Return the class behind a typed name."""
    if name not in OPTIMIZERS:
        raise UserError(f"unknown optimizer {name!r}; choose one of: {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]


def parse_option(text: str) -> Option:
    """Read a typed value: ``none``, ``true``, ``10``, ``0.1``, ``0.9,0.999`` or a word."""
    words: dict[str, Option] = {"none": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    try:
        return tuple(float(part) for part in text.split(",")) if "," in text else text
    except ValueError:
        return text


def check_options(name: str, options: Mapping[str, Option]) -> None:
    """Refuse options that are no keywords of the optimizer's constructor."""
    keywords = [
        key for key in inspect.signature(optimizer_class(name)).parameters if key != "params"
    ]
    for key in options:
        if key not in keywords:
            close = difflib.get_close_matches(key, keywords, 1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise UserError(f"{name} has no keyword {key!r}; {hint}it takes: {', '.join(keywords)}")


def build_optimizer(name: str, model: nn.Module, options: Mapping[str, Option]) -> Optimizer:
    """Build the optimizer over all parameters of ``model``, named so that reports can tell them.

    A scheduled option (see ``schedule``) starts at its first value; the loop sets the others.
    """
    check_options(name, options)
    values: dict[str, Any] = {key: scheduled(value, 0.0) for key, value in options.items()}
    try:
        return optimizer_class(name)(model.named_parameters(), **values)
    except (TypeError, ValueError) as error:
        raise UserError(f"{name} refuses its options: {error}") from error


def schedule(option: Option) -> list[tuple[float, float]] | None:
    """Read ``"0.8,0.01@0.9"`` as [(0, 0.8), (0.9, 0.01)]: share of the run, value from it on."""
    if not isinstance(option, str) or "@" not in option:
        return None
    pieces = []
    try:
        for part in option.split(","):
            value, _, share = part.partition("@")
            pieces.append((float(share or 0), float(value)))
    except ValueError as error:
        raise UserError(
            f"cannot read the schedule {option!r}; write values with the share of the run at which"
            " each starts, for instance 0.8,0.01@0.9"
        ) from error
    return sorted(pieces)


def scheduled(option: Option, share: float) -> Option:
    """Return the value of an option after a share of the run; it is constant unless scheduled."""
    pieces = schedule(option)
    if pieces is None:
        return option
    return [value for start, value in pieces if start <= share][-1]
