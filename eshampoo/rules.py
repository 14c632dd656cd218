"""What the values of keywords must be, in code and in words, and how they are read."""

import math
import re
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, NamedTuple, get_args

from torch import Tensor
from torch.nn import Parameter


def plain(value: Any) -> Any:  # noqa: ANN401 - whatever a group holds
    """Turn numbers of other libraries, and pairs of them, into Python's; keep all other values."""
    if isinstance(value, tuple | list):
        return tuple(map(plain, value))
    if isinstance(value, Tensor) or type(value).__module__ == "numpy":
        return plain(value.tolist())
    if isinstance(value, Real) and not isinstance(value, bool):
        return int(value) if isinstance(value, Integral) else float(value)
    return value


def plain_unless_tensor(value: Any) -> Any:  # noqa: ANN401
    """Like `plain`, but keep tensors: the host does not read a learning rate from its device."""
    return value if isinstance(value, Tensor) else plain(value)


def whole(value: Any) -> Any:  # noqa: ANN401
    """Like `plain`, and turn a float without a fraction into a whole number: 10.0 becomes 10."""
    value = plain(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Rule(NamedTuple):
    """What a value must be, as a test and in words, and how it is read."""

    holds: Callable[[Any], bool]
    words: str
    read: Callable[[Any], Any] = plain

    def check(self, name: str, value: object) -> None:
        """Refuse a value with the usual error."""
        if not self.holds(value):
            raise ValueError(
                f"{name}={value!r} is not valid: {self.words}{_if_quoted(value)}. Pass such a "
                f"value to the constructor or write it into the param group"
            )


def _if_quoted(value: object) -> str:
    """What to say about a number in quotes."""
    if not isinstance(value, str) or not re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", value, re.I):
        return ""
    return f", and this is a string, not a number (as YAML reads 1e-3): write float({value!r})"


def number(value: object) -> float:
    """The value, or NaN, which no rule admits, if it is not a number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else math.nan  # type: ignore[arg-type]


def only_false(why: str) -> Rule:
    """For a switch of torch's own optimizers that cannot be on here."""
    return Rule(lambda v: v is None or v is False, f"it must be None or False, because {why}")


def one_of(words: object, *more: object) -> Rule:
    """One of the words of a Literal, or one of `more`."""
    allowed = (*more, *get_args(words))
    return Rule(lambda v: v in allowed, f"it must be one of {', '.join(map(repr, allowed))}")


def _is_lr(value: object) -> bool:
    if isinstance(value, Tensor):  # its value is not read from other devices
        on_host = type(value) in (Tensor, Parameter) and value.is_cpu
        return value.numel() == 1 and (not on_host or 0 <= value.item() < math.inf)
    return 0 <= number(value) < math.inf


ANYTHING = Rule(lambda _: True, "")
AT_LEAST_0 = Rule(lambda v: 0 <= number(v) < math.inf, "it must be at least 0")
AT_LEAST_0_OR_NONE = Rule(
    lambda v: v is None or AT_LEAST_0.holds(v), "it must be None or a finite number of at least 0"
)
BELOW_1 = Rule(lambda v: 0 <= number(v) < 1, "it must lie in [0, 1)")
SHARE = Rule(lambda v: 0 <= number(v) <= 1, "it must lie in [0, 1]")
POSITIVE = Rule(lambda v: 0 < number(v) < math.inf, "it must be more than 0")
POSITIVE_OR_NONE = Rule(
    lambda v: v is None or 0 < number(v) < math.inf, "it must be None or more than 0"
)
SHARE_OR_NONE = Rule(lambda v: v is None or SHARE.holds(v), "it must be None or lie in [0, 1]")
LR = Rule(_is_lr, "it must be at least 0, and a Tensor lr must be 1-element", plain_unless_tensor)
PAIR = Rule(lambda v: isinstance(v, tuple | list) and len(v) == 2, "it must be a pair (β1, β2)")
TAU = Rule(
    lambda v: callable(v) or number(v) >= 0,
    "it must be a number of at least 0 (0 recomputes at every check, 1 never) or a function of t",
)
COUNT = Rule(
    lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= 1,
    "it must be a whole number of at least 1",
    whole,
)
FREQUENCY = Rule(
    lambda v: v == "auto" or COUNT.holds(v),
    "it must be 'auto' or a whole number of at least 1",
    whole,
)
ABOVE_0 = Rule(lambda v: 0 < number(v) <= 1, "it must lie in (0, 1]")
SWITCH = Rule(lambda v: isinstance(v, bool), "it must be True or False")

# Values that contradict each other: a test, their names, and what the error says about them.
CONTRADICTIONS: tuple[tuple[Callable[[Any], bool], tuple[str, str], str], ...] = (
    (
        lambda o: o.rms is not None and o.graft is not None,
        ("rms", "graft"),
        "both set the size of an update; leave one of them at None",
    ),
    (
        lambda o: o.sides != "both" and o.vectors == "full",
        ("sides", "vectors"),
        "contradict each other, as a vector has one side; set sides='both' or vectors='adam'",
    ),
    (
        lambda o: o.exponent != 0.5 and o.correction == "bounded",
        ("exponent", "correction"),
        "contradict each other, as Adam's bound needs √D; set exponent=0.5 or correction='naive'",
    ),
    (
        lambda o: o.statistics != "step" and o.correction == "bounded",
        ("statistics", "correction"),
        "contradict each other, as Adam's bound needs M and D of the same gradients; set "
        "statistics='step' or correction='naive'",
    ),
    (
        lambda o: o.moment != "entry" and o.correction in ("bounded", "optimal"),
        ("moment", "correction"),
        "contradict each other, as this correction needs every entry of D; set moment='entry' or "
        "correction='naive'",
    ),
)
