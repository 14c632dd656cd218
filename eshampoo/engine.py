"""The `torch.optim.Optimizer` shell: param groups, `step()`, and the state that goes in and out."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from .math.foreach import not_compiled
from .methods import Method
from .options import Options, described, offered
from .report import FactorReport, factor_reports
from .state.blocks import Failure, called, is_sharded
from .state.bucket import Batch, Bucket, batches
from .state.build import build
from .state.checkpoint import fill_, fill_from_adam_, pack, read_groups, read_state
from .step.nonfinite import ask, check_gradients, warn_of
from .step.precision import guarded
from .step.step import take_step
from .step.task import plan

if TYPE_CHECKING:
    from .ranks.team import Team


class EigenbasisOptimizer(Optimizer):
    """One step of any method of the table, for all parameters at once.

    Abstract: the user's classes are in `optimizers.py`, and say which row and which options.
    """

    method: ClassVar[Method]
    options: ClassVar[type[Options]]

    def __init_subclass__(cls) -> None:
        cls.__doc__ = f"{cls.__doc__}\n    Args:\n{described(cls.options)}\n    "

    def __init__(self, params: ParamsT, options: Options) -> None:
        self._forget()
        # A tensor, or nothing, is refused by torch.
        entries: list[Any] = [] if isinstance(params, Tensor) else list(params)
        self._given = max(1, sum(isinstance(entry, dict) for entry in entries))  # param groups
        defaults = {name: getattr(options, name) for name in offered(self.options)}
        super().__init__(entries or params, {**defaults, "method": self.method.name})

    def _forget(self) -> None:
        """The optimizer before it has any parameters."""
        self._buckets: list[Bucket] = []
        self._batches: list[Batch] = []
        self._shapes: list[dict[str, Any]] = []  # what the state of each group was laid out by
        self._known: dict[Any, Team] = {}  # by process group or mesh
        self._teams: dict[Tensor, Team] = {}  # of the parameters that other ranks have a part in
        self._voters: dict[Team, list[tuple[int, Tensor]]] = {}  # those without a basis, by team
        self._warned = False  # of gradients that were skipped
        self._calls = self.method.start  # of step(), the same on all ranks

    # ---------------------------------------------------------------- parameters

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, at any time; nothing changes if it is refused."""
        before = len(self.param_groups)
        if not isinstance(param_group["params"], Tensor | set):
            param_group = {**param_group, "params": list(param_group["params"])}
        if not isinstance(param_group["params"], set):
            _check_leaves(param_group["params"])
        super().add_param_group(param_group)
        try:
            self._build(before)
        except BaseException:
            del self.param_groups[before:]
            raise

    def _build(self, index: int) -> None:
        """Create the buckets and the state of one group, eagerly, so that checkpoints see it."""
        group, names = self.param_groups[index], self._names()
        o = self.options.of(group)
        # Numbers of other libraries become Python's, which files can hold.
        group.update({name: getattr(o, name) for name in offered(self.options)})
        params = [p for p in dict.fromkeys(group["params"]) if p.numel() > 0]
        for p in group["params"]:
            if not p.is_floating_point():
                raise TypeError(
                    f"{called(p, names)} has dtype {p.dtype}; parameters must be real "
                    "floating-point tensors: leave it out or view it as real"
                )
        teams = self._find_teams(params, o, index)
        buckets = build(index, params, self.method, o, teams, names)
        self._buckets += buckets
        self._batches += batches(buckets)
        self._shapes.append(o.shapes)
        self._teams |= teams
        plain = {p for bucket in buckets if bucket.elementwise for p in bucket.parameters}
        for p, team in teams.items():  # in the order of the parameters, which all ranks agree on
            if p in plain and is_sharded(p):
                self._voters.setdefault(team, []).append((index, p))
        for p in params:
            self.state[p] = {}
        for bucket in buckets:
            for p, views in bucket.views():
                self.state[p].update(views)

    def _find_teams(self, params: Sequence[Tensor], o: Options, index: int) -> "dict[Tensor, Team]":
        """The ranks that share the work on each parameter; those not listed are worked on here."""
        group = o.process_group
        if group is None and not any(is_sharded(p) for p in params):
            return {}
        # Slow to import, so only where needed.
        from .ranks.agreement import check_agreement, facts
        from .ranks.team import check_meshes, find_teams

        if group is not None:
            how_many = str(max(self._given, index + 1))
            about = {"the method": self.method.name, "the number of param groups": how_many}
            check_agreement(about | facts(o, params), group)
        check_meshes(self._parameters(), self._names())
        return find_teams(params, group, self._known)

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _names(self) -> dict[Tensor, str]:
        """Names of the parameters, where the optimizer was given them."""
        return {
            p: name
            for group in self.param_groups
            for p, name in zip(group["params"], group.get("param_names", ()), strict=False)
        }

    # ---------------------------------------------------------------- the step

    @not_compiled
    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Take one step; a closure that evaluates the loss anew is called first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Options and gradients are read, and refused if they are wrong, before anything changes.
        options = [self.options.of(group) for group in self.param_groups]
        for o, shapes in zip(options, self._shapes, strict=True):
            o.check_shapes(shapes)
        for p, team in self._teams.items():
            team.lay_out_gradient(p)
        check_gradients(self.param_groups, options, self._teams, self._names)
        tasks = plan(self._buckets, options, ask(self._voters, options))
        self._calls += 1
        devices = {batch.step.device.type for batch in self._batches}
        with guarded(devices, any(o.precision == "highest" for o in options)):
            failures, skipped = take_step(tasks, self._batches)
        if skipped and not self._warned:
            self._warned = True
            warn_of(skipped, self._names())
        if self._teams:
            failures = self._everyones(failures, options)
        if failures:
            listed = ", ".join(
                f"factor {mode} of {called(p, self._names())} ({in_a_row} times in a row)"
                for p, mode, in_a_row in failures
            )
            raise RuntimeError(
                f"no basis could be computed for {listed}, also in float64 and with damping; the "
                "old one was kept. Look at these gradients, or raise max_failures"
            )
        return loss

    def _everyones(self, failures: Sequence[Failure], options: Sequence[Options]) -> list[Failure]:
        """What to raise now: at the steps of checks, ranks tell each other of shared blocks.

        Gradients that were skipped delay the checks of their blocks, which only the owner knows; so
        all ranks count calls, and what failed in between waits.
        """
        found = [failure for failure in failures if failure[0] not in self._teams]
        for failure in failures:
            if failure[0] in self._teams:
                self._teams[failure[0]].unreported.append(failure)
        due = {b.route.team for b in self._buckets if options[b.group].checks_at(self._calls)}
        for team in dict.fromkeys(self._teams.values()):
            if team in due:
                found += team.everyones_failures([p for p, t in self._teams.items() if t is team])
        return found

    # ---------------------------------------------------------------- reports

    @property
    def basis_computations(self) -> int:
        """How many bases have been computed so far, over all factors."""
        return sum(sum(bucket.counters.computations) for bucket in self._buckets)

    def basis_report(self) -> list[FactorReport]:
        """Per parameter, block and factor: checks, basis computations, last criterion, history."""
        number = {p: n for n, p in enumerate(self._parameters())}
        names = self._names()
        found = [pair for bucket in self._buckets for pair in factor_reports(bucket, names)]
        found.sort(key=lambda pair: (number[pair[0]], pair[1].block, pair[1].mode))
        return [report for _, report in found]

    # ---------------------------------------------------------------- state in and out

    def state_dict(self) -> dict[str, Any]:
        """The state as tensors and numbers, safe for `torch.load(weights_only=True)`.

        With shared work every rank must call it, and every rank gets the same entries.
        """
        return pack(super().state_dict(), self._parameters(), self._buckets)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state of this method, or of `torch.optim.AdamW`.

        A state that does not fit is refused before anything has changed.
        """
        state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        groups = read_groups(state_dict, self.param_groups, self.method)
        for group, shapes in zip(groups, self._shapes, strict=True):
            self.options.of(group).check_shapes(shapes)
        state, adam = read_state(state_dict, self._parameters(), self._buckets, self._names())
        self.param_groups = groups
        (fill_from_adam_ if adam else fill_)(self._buckets, state)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        """For deepcopy and pickle: each parameter with values of its own, not views of stacks."""
        if self._known:
            raise TypeError(
                "an optimizer that shares its work over ranks cannot be copied or pickled; build "
                "another one and give it this one's state_dict()"
            )
        state = {p: {n: v.clone() for n, v in values.items()} for p, values in self.state.items()}
        history = [bucket.counters.history for bucket in self._buckets]
        own = {"defaults": self.defaults, "param_groups": self.param_groups}
        return {**own, "state": state, "history": history}

    def __setstate__(self, state: dict[str, Any]) -> None:
        values, history = state["state"], state["history"]
        own = {name: state[name] for name in ("defaults", "param_groups")}
        super().__setstate__({**own, "state": defaultdict(dict)})
        self._forget()
        self._given = len(self.param_groups)
        for index in range(len(self.param_groups)):
            self._build(index)
        fill_(self._buckets, values)
        for bucket, remembered in zip(self._buckets, history, strict=True):
            bucket.counters.history = remembered


def _check_leaves(params: Tensor | Sequence[Any]) -> None:
    for entry in [params] if isinstance(params, Tensor) else params:
        p = entry[1] if isinstance(entry, tuple) else entry
        if isinstance(p, Tensor) and not (p.is_leaf or p.retains_grad):
            raise ValueError(
                f"a tensor of shape {tuple(p.shape)} is the result of {p.grad_fn}; parameters must "
                "be leaf tensors: pass the tensors that it was computed from, or detach() it"
            )
