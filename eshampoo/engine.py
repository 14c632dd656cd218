"""The `torch.optim.Optimizer` shell: param groups, `step()`, and the state that goes in and out."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, islice
from multiprocessing.context import get_spawning_popen
from operator import is_not
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from .math.foreach import not_compiled
from .methods import Method
from .options import Options, Statistics, offered
from .report import BasisReport, reports
from .state import binding, checkpoint, damage, foreign
from .state.blocks import is_sharded
from .state.bucket import Batch, Bucket, batches, remember_, remembered
from .state.build import build, show_
from .state.garbage import not_collected
from .step.nonfinite import ask, check_gradients, warn_of
from .step.precision import guarded
from .step.refresh import raise_for
from .step.step import TAKE
from .step.task import check_use, plan

if TYPE_CHECKING:
    from .ranks.team import Team


class EigenbasisOptimizer(Optimizer):
    """One step of any method of the table, for all parameters at once.

    Abstract: the classes for users, in `optimizers.py`, name their row and their options.
    """

    method: ClassVar[Method]
    options: ClassVar[type[Options]]

    def __init__(self, params: ParamsT, options: Options) -> None:
        self._forget()
        self._ready = False  # until all groups have been added
        self._warned = self._begun = False  # told of skipped gradients; stepped, or loaded a state
        self._calls = {"step": self.method.start, "observe": 0}  # the same on all ranks
        defaults = {name: getattr(options, name) for name in offered(self.options)}
        self.options.of(defaults)  # checked before the parameters, as in torch
        entries: list[Any] = [] if isinstance(params, Tensor) else list(params)  # torch refuses []
        self._given = max(1, sum(isinstance(entry, dict) for entry in entries))  # param groups
        super().__init__(entries or params, {**defaults, "method": self.method.name})
        self._bond, self._ready = binding.bind(self.param_groups, self.state), True

    def _forget(self) -> None:
        """Reset everything that is built from the parameters."""
        self._buckets: list[Bucket] = []
        self._batches: list[Batch] = []
        self._shapes: list[dict[str, Any]] = []  # the options that shaped the state of each group
        self._said, self._read = list[Any](), list[Options]()  # of all groups: raw, and as options
        self._known: dict[Any, Team] = {}  # by process group or mesh
        self._teams: dict[Tensor, Team] = {}  # of parameters that other ranks have a part in
        self._voters: dict[Team, list[tuple[int, Tensor]]] = {}  # sharded and without a basis

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, at any time; nothing changes if it is refused."""
        before = len(self.param_groups)
        if self._ready:
            self._follow()
        super().add_param_group(binding.listed(param_group, offered(self.options)))
        try:
            self._build(before)
        except BaseException:
            del self.param_groups[before:]
            raise
        if self._ready:
            self._bond = binding.bind(self.param_groups, self.state)

    @not_collected()
    @torch.inference_mode(False)
    def _build(self, index: int) -> None:
        """Create the buckets and the state of one group, eagerly, so that checkpoints see it."""
        group = self.param_groups[index]
        names, o = self._names(), self.options.of(group)
        # Numbers of other libraries become Python numbers, which checkpoints can hold.
        group.update({name: getattr(o, name) for name in offered(self.options)})
        params = [p for p in dict.fromkeys(group["params"]) if p.numel() > 0]
        binding.check_kinds(group["params"], names)
        teams: dict[Tensor, Team] = {}  # of parameters that other ranks have a part in
        if o.process_group is not None or any(map(is_sharded, params)):
            from .ranks.team import agreed_teams  # slow to import, so only where needed

            about = {"the method": self.method.name}
            about["the number of param groups"] = str(max(self._given, index + 1))
            teams = agreed_teams(params, o, index, about, self._parameters(), names, self._known)
        buckets = build(index, params, self.method, o, teams, names)
        self._buckets += buckets
        self._batches += batches(buckets)
        self._shapes.append(o.shapes)
        self._teams |= teams
        plain = {p for bucket in buckets if bucket.elementwise for p in bucket.parameters}
        for p, team in teams.items():  # in the order of the parameters, which all ranks agree on
            if p in plain and is_sharded(p):
                self._voters.setdefault(team, []).append((index, p))
        show_(buckets, params, self.state)

    def _agree(self, call: str, read: bool = True) -> None:
        """Refuse a call that other ranks do not make, or make with other options."""
        for team in self._known.values():
            team.check_call(call, self._options(), read or team.device.type == "cpu")

    def _groups(self) -> list[dict[str, Any]]:
        """The param groups, each once: like torch's, `state_dict` accepts a group listed twice."""
        return list({id(group): group for group in self.param_groups}.values())

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _names(self) -> dict[Tensor, str]:
        return binding.named(self.param_groups)

    # ---------------------------------------------------------------- what it is bound to

    def _follow(self, groups: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Bind to what the param groups and `state` hold now, if that has changed."""
        groups = self.param_groups if groups is None else groups
        if not (self._same_tensors(groups) and self._same_entries()):
            self._rebind()

    def _same_tensors(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        # Every step calls this, so loops over parameters are left to functions written in C.
        bond, tensors = self._bond, [group["params"] for group in groups]
        return (
            [len(params) if isinstance(params, list) else None for params in tensors] == bond.sizes
            and not any(map(is_not, chain(*tensors), chain(*bond.groups)))
            and all(list(map(look, params)) == seen for look, params, seen in bond.looks)
        )

    def _same_entries(self) -> bool:
        bond, values = self._bond, islice(self.state.values(), len(self._bond.shown))
        shown, kept = (chain.from_iterable(map(dict.values, d)) for d in (bond.shown, bond.kept))
        return (
            len(self.state) >= len(bond.shown)
            and not any(map(is_not, values, bond.shown))
            and list(map(len, bond.shown)) == list(map(len, bond.kept))
            and not any(map(is_not, shown, kept))
        )

    @torch.inference_mode(False)
    @torch.no_grad()
    def _rebind(self) -> None:
        """Move the state to the tensors that the groups hold now; a refusal changes nothing."""
        heir_of = binding.heirs(self._bond, binding.as_lists_(self.param_groups), self._begun)
        edits = binding.read_edits(self._bond, self.state, heir_of)
        edits.take_()
        if edits.afresh or not self._same_tensors(self.param_groups):
            self._rebuild(heir_of, edits)
        else:
            for bucket in self._buckets if edits.written else ():
                bucket.set_clock()
        self._bond = binding.bind(self.param_groups, self.state)

    def _rebuild(self, heir_of: Mapping[Tensor, Tensor], edits: binding.Edits) -> None:
        """Lay out the state again, and fill in the old values."""
        before, names = dict(vars(self)), [group.get("param_names") for group in self.param_groups]
        kept = binding.carried(self._bond, self._buckets, heir_of, edits)
        histories = remembered(self._buckets)
        others = {key: value for key, value in self.state.items() if not isinstance(key, Tensor)}
        binding.rename_(self.param_groups, self._bond, heir_of)
        try:
            self._build_all()
            fix = "Set back the options of its param group"
            checkpoint.check_fit(kept, checkpoint.expected(self._buckets), self._names(), fix)
        except BaseException:
            vars(self).update(before)
            for group, given in zip(self.param_groups, names, strict=True):
                group.update({} if given is None else {"param_names": given})
            raise
        checkpoint.fill_(self._buckets, kept, self.state)
        remember_(self._buckets, histories, heir_of)
        extras = {q: edits.extras.get(p, {}) for q, p in heir_of.items()}
        checkpoint.add_others_(self.state, {**extras, **others})

    def _build_all(self) -> None:
        """Build the state of all groups, as it is before their first gradient."""
        self._forget()
        self.state = defaultdict(dict)
        self._given = len(self.param_groups)
        for index in range(len(self.param_groups)):
            self._build(index)

    # ---------------------------------------------------------------- the step

    @not_compiled
    @torch.inference_mode(False)  # the state must not become inference tensors
    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Take one step; a closure, if given, is called first and evaluates the loss again."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._see("step")
        return loss

    @not_compiled
    @torch.inference_mode(False)
    @torch.no_grad()
    def observe(self) -> None:
        """Let the factors, and D of EShampoo, see the current gradients; no parameter moves.

        For param groups with statistics="observe", whose `step()` leaves the factors alone.
        """
        self._see("observe")

    def _see(self, call: Statistics) -> None:
        """Take in the current gradients, in a step or as an observation."""
        self._follow()
        if self._bond.on_meta:
            binding.check_materialised(self._bond)
        # Options and gradients are read, and refused if they are wrong, before anything changes.
        options = self._options()
        if call == "observe":
            check_use(options)
        shared, count = bool(self._known), self._calls[call] + 1
        due = [shared and o.statistics == call and o.checks_at(count) for o in options]
        self._agree(f"{call}() number {count}", any(due))
        for p, team in self._teams.items():
            team.lay_out_gradient(p)
        check_gradients(self.param_groups, options, self._teams, self._names)
        verdicts = ask(self._voters, options) if call == "step" else {}
        tasks = plan(call, self._buckets, options, verdicts)
        if not self._begun:
            self._begun = True
            binding.warn_if_plain(self._buckets, options, self._names())
        devices = {batch.step.device.type for batch in self._batches}
        with guarded(devices, any(o.precision == "highest" for o in options)):
            failures, skipped = TAKE[call](tasks, self._batches)
        self._calls[call] += 1
        if skipped and not self._warned:
            self._warned = True
            warn_of(skipped, self._names())
        if self._teams:
            from .ranks.team import everyones

            checked = {bucket.route.team for bucket in self._buckets if due[bucket.group]}
            failures = everyones(failures, self._teams, checked)
        if failures:
            raise_for(failures, self._names())

    def _options(self) -> list[Options]:
        """What the param groups say; read again if anything was written into them."""
        groups = [{**group, "params": None, "param_names": None} for group in self._groups()]
        said = [x for group in groups for pair in group.items() for x in pair]
        # Lists and tensors may have changed in place, except rates, which are read when used.
        kinds = {type(x) for group in groups for key, x in group.items() if key != "lr"}
        unknown = list in kinds or Tensor in kinds or len(said) != len(self._said)
        if unknown or any(map(is_not, said, self._said)):
            read = [self.options.of(group) for group in groups]
            for o, shapes in zip(read, self._shapes, strict=True):
                o.check_shapes(shapes)
            self._said, self._read = said, read
        return self._read

    @property
    def basis_computations(self) -> int:
        """How many bases have been computed so far, over all factors."""
        self._follow()
        return sum(sum(bucket.counters.computations) for bucket in self._buckets)

    def basis_report(self) -> BasisReport:
        """A list that prints as a table: checks, computations and criterion of every factor."""
        self._follow()
        return reports(self._buckets, self._parameters(), self._names())

    # ---------------------------------------------------------------- state in and out

    def state_dict(self) -> dict[str, Any]:
        """The state as tensors and numbers, safe for `torch.load(weights_only=True)`.

        If ranks share work, every rank must call this, and every rank gets the same entries.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        self._follow(self._groups())
        self._agree(f"state_dict() after step {self._calls['step']}")
        with not_collected():
            state_dict = checkpoint.pack(self.param_groups, self.state, self._buckets)
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            state_dict = post_hook(self, state_dict) or state_dict
        return state_dict

    @not_collected()
    @torch.inference_mode(False)
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state of this method, or of `torch.optim.AdamW`.

        A state that does not fit is refused before anything has changed.
        """
        self._follow()
        self._agree("load_state_dict()")
        with damage.refused_together(self._known.values()):
            hooks = self._optimizer_load_state_dict_pre_hooks.values()
            state_dict = checkpoint.after_hooks(state_dict, self, hooks)
        self._follow()  # hooks may have changed groups or state
        names, params = self._names(), self._parameters()
        with damage.refused_together(self._known.values()):
            groups = checkpoint.read_groups(state_dict, self.param_groups, self.method)
            for group, shapes in zip(groups, self._shapes, strict=True):
                self.options.of(group).check_shapes(shapes)
            loaded = checkpoint.read_state(state_dict, params, self._buckets, names)
        with damage.refused_together(self._known.values()):
            lenient = {p for g in groups if g["nonfinite"] == "propagate" for p in g["params"]}
            damage.check_values(loaded.state, lenient, self.method.start, names)
        self.param_groups, self._begun = groups, True
        if loaded.adam:
            foreign.warn_of_others(state_dict["param_groups"])
            binding.warn_if_plain(self._buckets, self._options(), names)
        checkpoint.take_over_(self._buckets, loaded, self.state)
        self._bond = binding.bind(self.param_groups, self.state)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        """For deepcopy and pickle: each parameter has its own values, not views of stacks."""
        binding.check_copyable(self._known)
        self._follow()
        state = {key: checkpoint.apart(value) for key, value in self.state.items()}
        if get_spawning_popen() is not None:
            self._lent = state  # tensors on their way to a new process must live until it starts
        history = [bucket.counters.history for bucket in self._buckets]
        own = {"defaults": self.defaults, "param_groups": self.param_groups}
        return {**own, "state": state, "history": history, "begun": self._begun}

    def __setstate__(self, state: dict[str, Any]) -> None:
        values, history = state["state"], state["history"]
        own = {name: state[name] for name in ("defaults", "param_groups")}
        super().__setstate__({**own, "state": defaultdict(dict)})
        self._warned, self._begun = False, state["begun"]
        self._calls = {"step": self.method.start, "observe": 0}
        self._build_all()
        own_values = {p: v for p, v in values.items() if isinstance(p, Tensor)}
        checkpoint.fill_(self._buckets, own_values, self.state)
        checkpoint.add_others_(self.state, values)
        for bucket, its_history in zip(self._buckets, history, strict=True):
            bucket.counters.history = its_history
        self._bond, self._ready = binding.bind(self.param_groups, self.state), True
