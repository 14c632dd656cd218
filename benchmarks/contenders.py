"""The optimizers that are measured: ours and the peers, each built on a list of parameters.

Peers live in an environment of their own (benchmarks/.venv), so each is imported when it is built.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

NEVER = 10**9
LONGEST = 2048  # the longest side with a basis in every SOAP: HeavyBall's default


class Stepper(Protocol):
    """What is measured: anything with a step and a state."""

    def step(self) -> object: ...

    @property
    def state(self) -> Any: ...  # noqa: ANN401 - every library has its own


class Pair:
    """torch's Muon takes matrices only: AdamW beside it for the rest.

    It iterates in bfloat16, which few CPUs have: float32 in its place, in this process.
    """

    def __init__(self, matrices: list[Tensor], rest: list[Tensor]) -> None:
        torch.Tensor.bfloat16 = torch.Tensor.clone  # type: ignore[method-assign]
        self.parts: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw")
        ]
        if rest:
            self.parts.append(torch.optim.AdamW(rest, foreach=True))

    def step(self) -> None:
        for part in self.parts:
            part.step()

    @property
    def state(self) -> list[Any]:
        return [part.state for part in self.parts]


class Contender(NamedTuple):
    """One row of the tables."""

    title: str
    build: Callable[[Sequence[Tensor]], Stepper]
    units: int = 0  # matrix products of a plain step in units of mn(m+n), where we know it
    cycle: int = 1  # how many steps until everything repeats
    package: str = "torch"


def _ours(name: str, **keywords: Any) -> Callable[[Sequence[Tensor]], Stepper]:  # noqa: ANN401
    def build(params: Sequence[Tensor]) -> Stepper:
        import eshampoo

        optimizer: Stepper = getattr(eshampoo, name)(list(params), **keywords)
        return optimizer

    return build


def _torch_muon(params: Sequence[Tensor]) -> Stepper:
    matrices = [p for p in params if p.dim() == 2]
    if not matrices:
        raise ValueError("torch's Muon takes matrices, and this model has only convolutions")
    return Pair(matrices, [p for p in params if p.dim() != 2])


def _heavyball(compiled: bool) -> Callable[[Sequence[Tensor]], Stepper]:
    def build(params: Sequence[Tensor]) -> Stepper:
        heavyball = import_module("heavyball")
        if not compiled:
            heavyball.utils.compile_mode = None
        keywords = {"precondition_frequency": 10, "max_precond_dim": LONGEST}
        optimizer: Stepper = heavyball.SOAP(list(params), **keywords)
        return optimizer

    return build


def _pytorch_optimizer(name: str, **keywords: Any) -> Callable[[Sequence[Tensor]], Stepper]:  # noqa: ANN401
    def build(params: Sequence[Tensor]) -> Stepper:
        optimizer: Stepper = getattr(import_module("pytorch_optimizer"), name)(
            list(params), **keywords
        )
        return optimizer

    return build


def _adamw(*, fused: bool) -> Callable[[Sequence[Tensor]], Stepper]:
    return lambda params: torch.optim.AdamW(list(params), fused=fused, foreach=not fused)


CONTENDERS = {
    "eshampoo": Contender(
        "EShampoo", _ours("EShampoo", frequency=NEVER, budget=None), 3, package="eshampoo"
    ),
    "shampoo": Contender(
        "Shampoo, stale roots, Adam grafting",
        _ours("Shampoo", frequency=NEVER),
        2,
        package="eshampoo",
    ),
    "soap": Contender("SOAP", _ours("SOAP", max_dim=LONGEST), 3, cycle=10, package="eshampoo"),
    "muon": Contender("Muon", _ours("Muon"), package="eshampoo"),
    "adamw_foreach": Contender("torch AdamW, foreach", _adamw(fused=False)),
    "adamw_fused": Contender("torch AdamW, fused", _adamw(fused=True)),
    "torch_muon": Contender("torch Muon in float32 (AdamW for the rest)", _torch_muon),
    "heavyball_soap": Contender(
        "HeavyBall SOAP, eager", _heavyball(False), cycle=10, package="heavyball"
    ),
    "heavyball_soap_compiled": Contender(
        "HeavyBall SOAP, compiled", _heavyball(True), cycle=10, package="heavyball"
    ),
    "po_soap": Contender(
        "pytorch_optimizer SOAP",
        _pytorch_optimizer("SOAP", max_precondition_dim=LONGEST),
        cycle=10,
        package="pytorch_optimizer",
    ),
    "po_shampoo": Contender(
        "pytorch_optimizer ScalableShampoo",
        # Its first 25 steps do nothing but graft: the preconditioned step is what is compared.
        _pytorch_optimizer(
            "ScalableShampoo", start_preconditioning_step=1, preconditioning_compute_steps=NEVER
        ),
        package="pytorch_optimizer",
    ),
}

OURS = tuple(name for name, c in CONTENDERS.items() if c.package == "eshampoo")
SOAP_PEERS = tuple(
    name for name, c in CONTENDERS.items() if c.cycle > 1 and c.package != "eshampoo"
)
PEERS = tuple(name for name in CONTENDERS if name not in OURS)
