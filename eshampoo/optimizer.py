"""The `torch.optim.Optimizer` shell: param groups, `step()`, and the state that goes in and out."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import chain
from multiprocessing.context import get_spawning_popen
from operator import attrgetter, is_not
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from . import validate
from .methods import Method
from .options import ADAM_KEYS, RULES, Keywords, Options, Statistics, offered
from .report import BasisReport, reports
from .state import checkpoint
from .state.bucket import Bucket, entries
from .state.dtensor import held_sizes, is_sharded, lay_out_gradient
from .state.layout import build
from .step.precision import guarded
from .step.step import plan, take_step
from .torch_names import not_compiled

if TYPE_CHECKING:
    from .ranks.team import Team

T = TypeVar("T")

# What may change about a tensor that stays the same object, as in `model.to`.
LOOK = attrgetter("shape", "dtype", "device")

# How many param groups are printed; the others are counted.
GROUPS_SHOWN = 12


class EigenbasisOptimizer(Optimizer):
    """One step of any method of the table, for all parameters at once.

    Abstract: the classes for users, in `classes.py`, name their row and their keywords.
    """

    method: ClassVar[Method]
    keywords: ClassVar[type[Keywords]]

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        self._trained: set[Tensor] = set()  # parameters that keep their state while frozen
        self._laid_out = False  # until all groups have been added
        self._own = offered(self.keywords)
        Options.of(defaults, self._own)  # checked before the parameters, as in torch
        super().__init__(params, {**defaults, "method": self.method.name})
        self._build_all()

    def _reset(self) -> None:
        """Forget everything that is built from the parameters."""
        self._buckets: list[Bucket] = []
        self._shaped_by: list[Options] = []  # what each group said when its state was laid out
        self._raw_options, self._options_cache = list[Any](), list[Options]()  # of all groups
        self._teams: dict[Any, Team] = {}  # by process group or mesh
        self._started = False  # stepped, or loaded a state
        self._warned = False  # the user has been told of skipped gradients
        self._calls = {"step": self.method.start, "observe": 0}  # the same on all ranks
        # Bases that failed too often, until all ranks know.
        self._failures: list[validate.Failure] = []

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, at any time; nothing changes if it is refused."""
        if not self._laid_out:  # the state is laid out when torch has added all groups
            super().add_param_group(param_group)
            return
        self._follow()
        super().add_param_group(param_group)
        try:
            self._build(len(self.param_groups) - 1)
        except BaseException:
            self.param_groups.pop()
            raise
        self._remember()

    @torch.inference_mode(False)
    def _build(self, index: int) -> None:
        """Create the buckets and the state of one group, eagerly, so that checkpoints see it."""
        group = self.param_groups[index]
        names, o = self._names(), Options.of(group, self._own)
        # Numbers of other libraries become Python numbers, which checkpoints can hold.
        group.update({name: getattr(o, name) for name in self._own})
        validate.check_params(group["params"], names)
        params = [p for p in dict.fromkeys(group["params"]) if self._trains(p)]
        teams: dict[Tensor, Team] = {}
        if o.process_group is not None or any(map(is_sharded, params)):
            from .ranks.team import teams_of  # slow to import, so only where needed

            about = [self.method.name, f"{len(self.param_groups)} param groups"]
            teams = teams_of(params, o, index, about, names, self._teams)
        buckets = build(index, params, self.method, o, teams, names)
        self._buckets += buckets
        self._shaped_by.append(o)
        for bucket in buckets:
            for p, views in entries(bucket).items():
                self.state[p].update(views)

    def _trains(self, p: Tensor) -> bool:
        """Whether a parameter has state: from the first moment at which it requires gradients."""
        return p.numel() > 0 and (p.requires_grad or p.grad is not None or p in self._trained)

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _names(self) -> dict[Tensor, str]:
        """Names of the parameters, where the optimizer was given them."""
        return {
            p: name
            for group in self.param_groups
            for p, name in zip(group["params"], group.get("param_names", ()), strict=False)
        }

    def __repr__(self) -> str:
        """The groups, one per line, and what they have other than the defaults of the class."""
        usual = {f.name: f.default for f in fields(self.keywords)} | {"method": self.method.name}
        lines = []
        for index, group in enumerate(self.param_groups):
            known = {"params", "param_names"} | {k for k, v in usual.items() if group.get(k) == v}
            facts = [f"{k}: {v}" for k, v in group.items() if k == "lr" or k not in known]
            count = f"Parameter Group {index}: {len(group['params'])} tensors"
            lines.append(", ".join([count, *facts]))
        more = [f"and {len(lines) - GROUPS_SHOWN} more groups"] if lines[GROUPS_SHOWN:] else []
        return "\n    ".join([f"{type(self).__name__} (", *lines[:GROUPS_SHOWN], *more]) + "\n)"

    # ---------------------------------------------------------------- tensors and entries replaced

    def _remember(self) -> None:
        """Remember the tensors and the entries for which state was laid out."""
        self._params = [list(group["params"]) for group in self.param_groups]
        self._looks = list(map(LOOK, chain(*self._params)))
        self._shown = {p: self.state[p] for p in chain(*self._params) if p in self.state}
        self._frozen = [p for p in chain(*self._params) if p not in self._shown]
        self._views = list(chain.from_iterable(map(dict.values, self._shown.values())))

    def _follow(self) -> None:
        """Follow tensors that were replaced in the param groups, and entries written into `state`.

        Frameworks replace tensors, move them and materialise them, and users unfreeze parameters.
        Every step calls this, so loops over parameters are left to functions written in C.
        """
        groups = [group["params"] for group in self.param_groups]
        params, entries = list(chain(*groups)), list(map(self.state.get, self._shown))
        values = list(chain.from_iterable(entry.values() for entry in entries if entry))
        written = len(values) != len(self._views) or any(map(is_not, values, self._views))
        if (
            written
            or list(map(len, groups)) != list(map(len, self._params))
            or any(map(is_not, params, chain(*self._params)))
            or list(map(LOOK, params)) != self._looks
            or any(map(self._trains, self._frozen))
        ):
            self._move_state(written)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _move_state(self, written: bool) -> None:
        """Move the state, or what was written over it, by place to the tensors in the groups."""
        now, names = self._parameters(), self._names()
        sizes = [len(group["params"]) for group in self.param_groups]
        validate.check_params(now, names)
        validate.check_successors(list(map(len, self._params)), sizes, self._looks, now, names)
        if written:
            stored, wanted = dict(self.state), checkpoint.expected(self._buckets)
            for p in self._shown:
                if stored.get(p):
                    validate.check_entries(p, stored[p], wanted[p], names)
        else:
            stored = checkpoint.collect([b for b in self._buckets if not b.state.step.is_meta])
        pairs = zip(chain(*self._params), now, strict=True)
        moved = {q: stored[p] for p, q in pairs if p in stored}
        self._trained = self._trained | moved.keys()
        before = dict(vars(self))
        try:
            self._build_all()
        except BaseException:
            vars(self).update(before)
            raise
        self._started, self._calls = before["_started"], before["_calls"]
        checkpoint.fill_(self._buckets, moved, adam=False)

    def _build_all(self) -> None:
        """Build the state of all groups, as it is before their first gradient."""
        self._reset()
        self.state = defaultdict(dict)
        for index in range(len(self.param_groups)):
            self._build(index)
        self._laid_out = True
        self._remember()

    # ---------------------------------------------------------------- the step

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], T]) -> T: ...
    @not_compiled
    @torch.inference_mode(False)  # the state must not become inference tensors
    @torch.no_grad()
    def step(self, closure: Callable[[], T] | None = None) -> T | None:
        """Take one step; a closure, if given, is called first and evaluates the loss again."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._run("step")
        return loss

    @not_compiled
    @torch.inference_mode(False)
    @torch.no_grad()
    def observe(self) -> None:
        """Let the factors, and D of EShampoo, see the current gradients; no parameter moves.

        For param groups with statistics="observe", whose `step()` leaves the factors alone.
        """
        self._run("observe")

    def _run(self, call: Statistics) -> None:
        """Take in the current gradients, in a step or as an observation."""
        self._follow()
        # Options and gradients are read, and refused if they are wrong, before anything changes.
        options, count = self._options(), self._calls[call] + 1
        if call == "observe":
            validate.check_observable(options)
        shared = bool(self._teams)
        checks = shared and any(o.statistics == call and o.checks_at(count) for o in options)
        if checks or (shared and not self._started):
            self._agree(f"{call}() number {count}")
        self._check_gradients(options)
        tasks = plan(call, self._buckets, options)
        if not self._started:
            validate.warn_if_without_basis(self._buckets, self._names())
            self._started = True
        devices = {bucket.memory[0].type for bucket in self._buckets}
        with guarded(devices, {o.precision for o in options}):
            failures, skipped = take_step(tasks)
        self._calls[call] += 1
        if skipped and not self._warned:
            self._warned = True
            validate.warn_of_skipped(skipped, self._names())
        self._failures += failures
        if checks or (self._failures and not shared):  # ranks tell each other at their checks
            told, self._failures = self._failures, []
            words = validate.failed_bases(told, self._names()) if told else ""
            if words := self._any_words(words):
                raise RuntimeError(words)

    def _check_gradients(self, options: Sequence[Options]) -> None:
        """Place the gradients of DTensors like their parameters; refuse gradients of no use."""
        params = self._parameters()
        for p in params if self._teams else ():
            lay_out_gradient(p)
        if any(p.is_meta for p in params):
            validate.check_materialised(params, self._names())
        for p in params:
            if (grad := p.grad) is not None and (grad.is_sparse or grad.is_complex()):
                validate.refuse_gradient(p, grad, self._names())
        pairs = zip(self.param_groups, options, strict=True)
        watched = [p for group, o in pairs if o.nonfinite == "raise" for p in group["params"]]
        if watched:
            ranks = max([1, *(team.size for team in self._teams.values())])  # they share a norm
            sizes = zip(watched, held_sizes(watched).tolist(), strict=True)
            bad = [p for p, size in sizes if not size < ranks**-0.5]
            words = validate.not_finite(bad, self._names()) if bad else ""
            if words := self._any_words(words):
                raise FloatingPointError(words)

    def _any_words(self, words: str) -> str:
        """The words of the first rank that has any; "" if none has."""
        teams = list(self._teams.values())
        for team in teams if len(teams) < 2 else [*teams, *teams]:  # twice, to reach all ranks
            words = next(filter(None, team.of_all(words)), "")
        return words

    def _agree(self, call: str) -> None:
        """Refuse a call that other ranks do not make, or make with other options."""
        for team in self._teams.values():
            team.check_call(call, self._options())

    def _options(self) -> list[Options]:
        """What the param groups say; read again if anything was written into them."""
        groups = [{**group, "params": None, "param_names": None} for group in self.param_groups]
        raw = [x for group in groups for pair in group.items() for x in pair]
        # Lists and tensors may have changed in place, except rates, which are read when used.
        kinds = {type(x) for group in groups for key, x in group.items() if key != "lr"}
        unknown = list in kinds or Tensor in kinds or len(raw) != len(self._raw_options)
        if unknown or any(map(is_not, raw, self._raw_options)):
            options = [Options.of(group, self._own) for group in groups]
            validate.check_shaping(options, self._shaped_by)
            self._raw_options, self._options_cache = raw, options
        return self._options_cache

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
        self._follow()
        self._agree(f"state_dict() after step {self._calls['step']}")
        state_dict = checkpoint.state_dict_of(self.param_groups, checkpoint.collect(self._buckets))
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            state_dict = post_hook(self, state_dict) or state_dict
        return state_dict

    def adamw_state_dict(self) -> dict[str, Any]:
        """The state as `torch.optim.AdamW` loads it, to go on with AdamW.

        Momentum is rotated back exactly. The second moment is as near to Adam's as D can tell.
        """
        self._follow()
        self._agree("adamw_state_dict()")
        packed = checkpoint.state_dict_of(self.param_groups, checkpoint.to_adam(self._buckets))
        for group, o in zip(packed["param_groups"], self._options(), strict=True):
            for key in {"method", *RULES}.difference(ADAM_KEYS):
                group.pop(key, None)
            group["betas"] = (o.betas[0], o.beta_scale)
        return packed

    @torch.inference_mode(False)
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state of this method, or of `torch.optim.AdamW`.

        A state that does not fit is refused before anything has changed.
        """
        self._follow()
        self._agree("load_state_dict()")
        loaded, error, before = None, None, dict(vars(self))
        try:
            loaded = self._read(state_dict)
        except Exception as refusal:
            error = refusal
        words = "" if error is None else str(error) or type(error).__name__
        words = self._any_words(words)  # what one rank refuses, all ranks refuse
        if loaded is None or words:
            vars(self).update(before)
            raise error or ValueError(words)
        self.param_groups, saved, adam = loaded
        self._started = True
        checkpoint.fill_(self._buckets, saved, adam)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _read(self, state_dict: dict[str, Any]) -> tuple[list[Any], checkpoint.Entries, bool]:
        """Read and check a state: param groups, entries, and whether they are AdamW's."""
        validate.check_state_dict(state_dict)
        state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        groups = checkpoint.read_groups(state_dict, self.param_groups, self.method.name)
        validate.check_shaping([Options.of(g, self._own) for g in groups], self._shaped_by)
        saved, names = checkpoint.saved_entries(state_dict, self._parameters()), self._names()
        self._trained = self._trained | saved.keys()
        self._follow()  # frozen parameters that were trained before get room for their state
        adam = all("method" not in group for group in state_dict["param_groups"])
        checkpoint.check_saved(saved, adam, self._buckets, names)
        if adam:
            validate.warn_if_without_basis(self._buckets, names)
        return groups, saved, adam

    def __getstate__(self) -> dict[str, Any]:
        """For deepcopy and pickle: each parameter has its own values, not views of stacks."""
        validate.check_copyable(self._teams)
        self._follow()
        own = {"defaults": self.defaults, "param_groups": self.param_groups}
        state = checkpoint.collect(self._buckets)
        if get_spawning_popen() is not None:
            self._sent = state  # tensors on their way to a new process must live until it starts
        return {**own, "state": state, "_started": self._started}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "state": defaultdict(dict)})
        self._own = offered(self.keywords)
        self._trained = set(state["state"])
        self._build_all()
        checkpoint.fill_(self._buckets, state["state"], adam=False)
        self._started = state["_started"]
