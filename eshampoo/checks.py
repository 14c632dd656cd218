"""When the criterion is evaluated: every F steps, or when enough of a factor's average is new.

Legend: a check at step s, the next one n steps later; β is β2, ν the novelty that is asked for.
"""

from bisect import bisect_left
from dataclasses import dataclass, field
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, Inexact, localcontext
from fractions import Fraction
from functools import cached_property, lru_cache


@dataclass(frozen=True)
class Every:
    """Checks at the steps t with t mod F = 0."""

    frequency: int

    def __call__(self, step: int) -> bool:
        return step % self.frequency == 0


@dataclass(frozen=True)
class WhenNew:
    """Checks at t = 1, and whenever the share ν of a factor's average came after the last check.

        ρ(s, t) = 1 − β^{t−s} (1 − β^s) / (1 − β^t) ≥ ν,      a sum (β = 1): ρ = 1 − s/t

    With n = t − s this is β^n (1 − νβ^s) ≤ 1 − ν. The steps depend on β and ν alone, so ranks and
    resumed runs agree on them without any state. The first gradient of a method that does not
    count it, t = 0, is a check too.

    >>> checks = when_new(0.999, 0.1)
    >>> [t for t in range(1, 40) if checks(t)]
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 18, 20, 23, 26, 29, 33, 37]
    """

    beta: float
    novelty: float
    _steps: list[int] = field(
        default_factory=lambda: [1], init=False, repr=False, compare=False
    )  # of the checks, as far as anybody has asked

    def __call__(self, step: int) -> bool:
        if step <= 1:
            return True
        if self.novelty == 1 and self.beta > 0:  # something of the first gradient always remains
            return False
        steps = self._steps
        while (last := steps[-1]) < step:
            gap = last - steps[-2] if len(steps) > 1 else 1
            if gap == self._longest:  # and stays so: gaps never shrink
                return (step - last) % gap == 0
            steps.append(last + self._gap(last, at_least=gap))
        return steps[bisect_left(steps, step)] == step

    def _gap(self, last: int, at_least: int) -> int:
        """The smallest n with ρ(s, s + n) ≥ ν."""
        if self._longest is None:  # s ≤ (1 − ν) (s + n)
            return -(-self._odds.numerator * last // self._odds.denominator)
        gaps = range(at_least, self._longest)
        return at_least + bisect_left(gaps, True, key=lambda n: self._is_new(last, n))

    @cached_property
    def _odds(self) -> Fraction:
        """ν / (1 − ν)."""
        novelty = Fraction(repr(float(self.novelty)))
        return novelty / (1 - novelty)

    @cached_property
    def _longest(self) -> int | None:
        """The gap that is reached at last, when β^s has vanished; those of a sum grow for ever."""
        if self.beta == 1:
            return None
        enough = 1
        while not self._is_new(None, enough):
            enough *= 2
        return bisect_left(range(enough), True, lo=1, key=lambda n: self._is_new(None, n))

    def _is_new(self, last: int | None, n: int) -> bool:
        """Whether β^n (1 − νβ^s) ≤ 1 − ν; without s, where β^s has vanished."""
        old = 0.0 if last is None else self.beta**last
        left, right = self.beta**n * (1 - self.novelty * old), 1 - self.novelty
        # A power magnifies the rounding of β by its exponent.
        rounding = 1e-15 * (8 + n + (last or 0) * old)
        if abs(left - right) > rounding:
            return left < right
        return self._is_exactly_new(last, n)

    def _is_exactly_new(self, last: int | None, n: int) -> bool:
        """The same with as many digits as it takes.

        β and ν are the decimal numbers that were written: with 0.9 and 0.1, β = 1 − ν.
        """
        beta, novelty = (Decimal(repr(float(x))) for x in (self.beta, self.novelty))
        digits = 50
        while True:
            with localcontext(Context(prec=digits, Emin=MIN_EMIN, Emax=MAX_EMAX)) as context:
                old = Decimal(0) if last is None else beta**last
                left, right = beta**n * (1 - novelty * old), 1 - novelty
                exact = not context.flags[Inexact]
                if exact or abs(left - right) > Decimal(10) ** (5 - digits):
                    return left <= right
            digits *= 2


# Steps that were once found are kept, for some pairs (β, ν): both may change at any step.
when_new = lru_cache(maxsize=64)(WhenNew)
