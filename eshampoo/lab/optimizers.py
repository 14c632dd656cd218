"""The optimizers by the names that users type, and their options."""

import difflib
import inspect
import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, AdamW, Optimizer

from eshampoo.classes import CLASSES, Muon
from eshampoo.grouping import parameter_groups
from eshampoo.lab.errors import UserError

Option = bool | int | float | str | None | tuple[float, ...]

OPTIMIZERS: Mapping[str, type[Optimizer]] = {
    found.__name__.lower(): found for found in (AdamW, *CLASSES, LBFGS)
}


def optimizer_class(name: str) -> type[Optimizer]:
    """Return the class behind a typed name."""
    if name not in OPTIMIZERS:
        raise UserError(f"unknown optimizer {name!r}; choose one of: {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]


def keywords(name: str) -> list[str]:
    """Return the keywords that an optimizer takes."""
    return [key for key in inspect.signature(optimizer_class(name)).parameters if key != "params"]


def own_memory(name: str) -> Mapping[str, Option]:
    """Return EShampoo's own β2, which is part of its default; others take the workload's."""
    if name != "eshampoo":
        return {}
    return {"betas": inspect.signature(optimizer_class(name)).parameters["betas"].default}


def parse_option(text: str) -> Option:
    """Read a typed value: ``none``, ``true``, ``10``, ``0.1``, ``0.9,0.999`` or a word."""
    words: dict[str, Option] = {"none": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return finite(text)
    except ValueError:
        pass
    try:
        return tuple(finite(part) for part in text.split(",")) if "," in text else text
    except ValueError:
        return text


def finite(text: str) -> float:
    """Read a number; one that is too large for a float is refused."""
    number = float(text)
    if not math.isfinite(number):
        raise UserError(f"{text[:20]!r} is not a finite number; type one below 1e308")
    return number


def check_options(name: str, options: Mapping[str, Option]) -> None:
    """Refuse options that the optimizer does not have, and values that it cannot step with."""
    taken = keywords(name)
    for key in options:
        if key not in taken:
            close = difflib.get_close_matches(key, taken, 1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise UserError(f"{name} has no keyword {key!r}; {hint}it takes: {', '.join(taken)}")
    starts = {start for option in options.values() for start, _ in schedule(option) or []}
    begun: Optimizer | None = None
    for share in sorted({0.0, *starts}):
        parameter = nn.Parameter(torch.zeros(2, 2))
        parameter.grad = torch.zeros(2, 2)
        try:
            with warnings.catch_warnings():  # about a stand-in for the user's parameters
                warnings.simplefilter("ignore", UserWarning)
                fresh = construct(name, [("weight", parameter)], options, share)
                begun = fresh if begun is None else begun
                set_scheduled_(begun, options, share)  # some options cannot change during a run
                for optimizer in (fresh, begun):
                    optimizer.step(lambda: 0.0)
        except (TypeError, ValueError, RuntimeError, AssertionError, OverflowError) as error:
            raise refusal(name, error) from error


def build_optimizer(name: str, model: nn.Module, options: Mapping[str, Option]) -> Optimizer:
    """Build the optimizer over all parameters of ``model``, with their names for reports.

    A scheduled option (see ``schedule``) starts at its first value; the loop sets the others.
    """
    return construct(name, parameters_for(name, model), options, 0.0)


def parameters_for(name: str, model: nn.Module) -> Iterable[Any]:
    """Return named parameters; for Muon in groups, so that AdamW trains embeddings and head."""
    if optimizer_class(name) is not Muon:
        return model.named_parameters()
    return parameter_groups(model, {kind: {"matrices": "adam"} for kind in ("embeddings", "head")})


def construct(
    name: str,
    parameters: Iterable[Any],
    options: Mapping[str, Option],
    share: float,
) -> Optimizer:
    """Build an optimizer with the options that hold after a share of the run."""
    values: dict[str, Any] = {key: scheduled(value, share) for key, value in options.items()}
    try:
        return optimizer_class(name)(parameters, **values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise refusal(name, error) from error


def refusal(name: str, error: Exception) -> UserError:
    """Return the error for values that an optimizer does not take."""
    return UserError(f"{name} refuses its options: {error}")


def schedule(option: Option) -> list[tuple[float, float]] | None:
    """Read ``"0.8,0.01@0.9"`` as [(0, 0.8), (0.9, 0.01)]: share of the run, value from it on."""
    if not isinstance(option, str) or "@" not in option:
        return None
    pieces = []
    try:
        for part in option.split(","):
            value, _, share = part.partition("@")
            pieces.append((float(share or 0), float(value)))
        pieces.sort()
        starts = [start for start, _ in pieces]
        if starts[0] != 0 or len({*starts}) < len(starts) or not all(0 <= s <= 1 for s in starts):
            raise ValueError("one value starts at 0, the others each at another share up to 1")
    except ValueError as error:
        raise UserError(
            f"cannot read the schedule {option!r} ({error}); write values with the share of the run"
            " at which each starts, for instance 0.8,0.01@0.9"
        ) from error
    return pieces


def set_scheduled_(optimizer: Optimizer, options: Mapping[str, Option], share: float) -> None:
    """Write the values that scheduled options have after a share of the run into the groups."""
    for group in optimizer.param_groups:
        for key, option in options.items():
            if schedule(option) is not None:
                group[key] = scheduled(option, share)


def scheduled(option: Option, share: float) -> Option:
    """Return the value of an option after a share of the run; a plain option is constant."""
    pieces = schedule(option)
    if pieces is None:
        return option
    return [value for start, value in pieces if start <= share][-1]
