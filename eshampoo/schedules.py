"""Schedules of the threshold τ: callables from a parameter's step t to a number.

They are plain data, so that you can copy and pickle an optimizer with a schedule.
"""

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True)
class constant:  # noqa: N801 - used like a function
    """τ(t) = value."""

    value: float

    def __call__(self, step: int) -> float:
        return self.value


@dataclass(frozen=True)
class piecewise:  # noqa: N801
    """τ(t) = values[i] for boundaries[i-1] ≤ t < boundaries[i] (Fig. 5 left of the paper).

    Examples:
        >>> tau = piecewise(boundaries=(100,), values=(0.01, 0.8))
        >>> tau(99), tau(100)
        (0.01, 0.8)
    """

    boundaries: tuple[int, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.values) != len(self.boundaries) + 1:
            raise ValueError(
                f"piecewise got {len(self.boundaries)} boundaries and {len(self.values)} values; "
                "n boundaries separate n + 1 values: give one value more than boundaries"
            )
        if list(self.boundaries) != sorted(self.boundaries):
            raise ValueError(
                f"piecewise boundaries {self.boundaries} must not decrease: sort them by step"
            )

    def __call__(self, step: int) -> float:
        return self.values[bisect_right(self.boundaries, step)]


@dataclass(frozen=True)
class linear:  # noqa: N801
    """τ(t) goes from `start` to `end` in a straight line over `steps` steps, and stays there."""

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"linear got steps={self.steps}; it must be at least 1")

    def __call__(self, step: int) -> float:
        share = min(max(step / self.steps, 0.0), 1.0)
        return self.start + share * (self.end - self.start)
