"""What must be reached: each bar as a ratio of numbers from one run."""

from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import Any, NamedTuple

from .contenders import SOAP_PEERS

Number = float | None


class Bar(NamedTuple):
    """One line of the table."""

    case: str
    value: Number
    bar: float
    reach: float
    detail: str = ""

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        if self.value <= self.reach:
            return "reached"
        return "pass" if self.value <= self.bar else f"missed by {self.value / self.bar - 1:.0%}"


class Results:
    """Cases by kind, shapes and contender; rounds of the same case keep their order."""

    def __init__(self, cases: Iterable[Mapping[str, Any]]) -> None:
        self.cases = [case for case in cases if "result" in case]

    def rounds(self, kind: str, shapes: str | None, contender: str | None = None) -> dict[int, Any]:
        return {
            case.get("round", 0): case["result"]
            for case in self.cases
            if case["spec"]["kind"] == kind
            and case["spec"].get("shapes") == shapes
            and case["spec"].get("contender") == contender
        }

    def value(self, shapes: str, contender: str, *path: str) -> Number:
        """The median over rounds of one number of a measured optimizer."""
        found = [dig(r, *path) for r in self.rounds("measure", shapes, contender).values()]
        numbers = [number for number in found if number is not None]
        return median(numbers) if numbers else None

    def inside(self, rounds: Mapping[int, Any], above: str, below: str, key: str) -> Number:
        """The median over rounds of a ratio inside one process."""
        pairs = [(dig(r, above, key), dig(r, below, key)) for r in rounds.values()]
        return ratio_of_medians(pairs)

    def against(self, ours: str, peer: str, shapes: str, what: str) -> Number:
        """The median over rounds of ours / peer, in processes that ran one after the other."""
        a = self.rounds("measure", shapes, ours)
        b = self.rounds("measure", shapes, peer)
        return ratio_of_medians(
            [(dig(a[n], what, "wall"), dig(b[n], what, "wall")) for n in a if n in b]
        )


def dig(result: Any, *path: str) -> Number:  # noqa: ANN401 - JSON
    """A number inside nested dictionaries, if it is there."""
    for key in path:
        if not isinstance(result, Mapping) or key not in result:
            return None
        result = result[key]
    return float(result)


def ratio_of_medians(pairs: Iterable[tuple[Number, Number]]) -> Number:
    """The median of the ratios that are known."""
    ratios = [a / b for a, b in pairs if a is not None and b]
    return median(ratios) if ratios else None


def _best(results: Results, ours: str, shapes: str, what: str) -> tuple[Number, str]:
    """The largest ratio ours / peer: the best peer, and its name."""
    found = [
        (ratio, peer)
        for peer in SOAP_PEERS
        if (ratio := results.against(ours, peer, shapes, what)) is not None
    ]
    return max(found) if found else (None, "no SOAP peer was measured")


def all_bars(results: Results) -> list[Bar]:
    """Every bar, also those that were not measured."""
    within: Callable[[str, str, str, str], Number] = lambda shapes, who, above, below: (  # noqa: E731
        results.inside(results.rounds("measure", shapes, who), above, below, "wall")
    )
    bars = [
        Bar(f"EShampoo plain step / 3-unit limit, {title}", within(shapes, "eshampoo", *p), b, r)
        for shapes, title, b, r in (
            ("vit_s", "ViT-S", 1.15, 0.95),
            ("vit_192", "192×6", 1.30, 1.2),
            ("vit_64", "64×4", 1.9, 1.5),
        )
        for p in [("plain", "limit")]
    ]
    stale = within("vit_s", "shampoo", "plain", "limit")
    bars.append(Bar("stale Shampoo + Adam graft / 2-unit limit, ViT-S", stale, 1.15, 1.0))
    bars += [
        Bar(f"check-only / plain step, {shapes}", within(shapes, "eshampoo", *p), 1.05, 1.02)
        for shapes in ("vit_s", "vit_192", "vit_64")
        for p in [("check", "plain")]
    ]
    plain, name = _best(results, "eshampoo", "vit_s", "plain")
    bars.append(Bar("EShampoo plain / best SOAP peer, ViT-S", plain, 0.70, 0.55, name))
    cycle, name = _best(results, "soap", "vit_s", "cycle")
    bars.append(Bar("SOAP / best SOAP peer, mean of F = 10, ViT-S", cycle, 0.85, 0.7, name))
    every, name = _best(results, "eshampoo", "vit_s", "refresh")
    bars.append(Bar("refresh of all, EShampoo / best SOAP peer, ViT-S", every, 0.6, 0.5, name))
    part = results.inside(results.rounds("partial", "vit_s"), "partial", "eigh", "wall")
    bars.append(Bar("refresh of all, partial (S = d/4) / eigh, ViT-S", part, 0.35, 0.2))
    mean = results.inside(results.rounds("training", None), "adaptive", "plain", "mean")
    bars.append(Bar("mean of 280 steps, F = 1, τ = 0.1, partial / plain", mean, 1.35, 1.15))
    rounds = results.rounds("even", "vit_192").values()
    uneven = [(dig(r, "default", "largest"), dig(r, "default", "median")) for r in rounds]
    longest = ratio_of_medians(uneven)
    bars.append(Bar("largest / median step, 192×6", longest, 2.5, 2.0))
    size = results.value("vit_s", "eshampoo", "state_bytes_per_parameter")
    bars.append(Bar("state bytes per parameter, ViT-S", size, 38.5, 31.0))
    return bars
