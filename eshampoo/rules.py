"""What the values of keywords must be: tests with their words, and the usual error."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, get_args

from torch import Tensor


class Rule(NamedTuple):
    """What a value must be, as a test and in words."""

    holds: Callable[[Any], bool]
    words: str

    def check(self, name: str, value: object) -> None:
        """Refuse a value with the usual error."""
        if not self.holds(value):
            raise ValueError(
                f"{name}={value!r} is not valid: {self.words}. Pass such a value to the "
                f"constructor or write it into the param group"
            )


def number(value: object) -> float:
    """The value, or NaN, which no rule admits, if it is not a number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else math.nan  # type: ignore[arg-type]


def one_of(words: object, *more: object) -> Rule:
    """One of the words of a Literal."""
    allowed = (*more, *get_args(words))
    return Rule(lambda v: v in allowed, f"it must be one of {', '.join(map(repr, allowed))}")


def _is_lr(value: object) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else 0 <= number(value) < math.inf


ANYTHING = Rule(lambda _: True, "")
AT_LEAST_0 = Rule(lambda v: 0 <= number(v) < math.inf, "it must be at least 0")
AT_LEAST_0_OR_NONE = Rule(lambda v: v is None or AT_LEAST_0.holds(v), AT_LEAST_0.words)
BELOW_1 = Rule(lambda v: 0 <= number(v) < 1, "it must lie in [0, 1)")
SHARE = Rule(lambda v: 0 <= number(v) <= 1, "it must lie in [0, 1]")
POSITIVE_OR_NONE = Rule(
    lambda v: v is None or 0 < number(v) < math.inf, "it must be None or more than 0"
)
SHARE_OR_NONE = Rule(lambda v: v is None or SHARE.holds(v), SHARE.words)
LR = Rule(_is_lr, "it must be at least 0, and a tensor must have one element")
PAIR = Rule(lambda v: isinstance(v, tuple | list) and len(v) == 2, "it must be a pair (β1, β2)")
TAU = Rule(
    lambda v: callable(v) or number(v) >= 0,
    "it must be a number of at least 0 (0 recomputes at every check, 1 never)",
)
COUNT = Rule(
    lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= 1,
    "it must be a whole number of at least 1",
)
FREQUENCY = Rule(
    lambda v: v == "auto" or COUNT.holds(v), "it must be 'auto' or a whole number of at least 1"
)
ABOVE_0 = Rule(lambda v: 0 < number(v) <= 1, "it must lie in (0, 1]")
SWITCH = Rule(lambda v: isinstance(v, bool), "it must be True or False")
