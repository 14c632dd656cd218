"""The `torch.optim.Optimizer` shell: buckets, `step()`, and the state that goes in and out."""

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from .blocks import Block, called, cut, is_sharded, local, padded
from .bucket import Bucket, Wave, waves
from .checkpoint import fill_, fill_from_adam_, pack, read_groups, read_state
from .methods import Method
from .options import Options
from .refresh import Failure, refresh_
from .report import FactorReport, factor_reports
from .work import Task, Update, advance, finish, graft_parameters, post

if TYPE_CHECKING:
    from .layout import Place

OPTIMAL_LIMIT = 4096
"""Largest block for correction="optimal", which keeps a matrix of that size squared."""


class EigenbasisOptimizer(Optimizer):
    """One step of any method of the table, for all parameters at once.

    Abstract: the user's classes are in `optimizers.py` and only add signatures.
    """

    method: ClassVar[Method]

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        self._buckets: list[Bucket] = []
        self._waves: list[Wave] = []
        self._layouts: list[dict[str, Any]] = []
        self._places: dict[Any, Place] = {}
        self._shared: dict[Tensor, Place] = {}  # parameters that other ranks have a part in
        self._warned = False  # of gradients that were skipped
        self._voters: dict[Place, list[tuple[int, Tensor]]] = {}  # those without a basis, by group
        self._calls = -1 if self.method.delayed else 0  # of step(), alike on all ranks
        self._unreported: dict[Place, list[Failure]] = defaultdict(list)
        # A tensor, or nothing, is refused by torch.
        entries: list[Any] = [] if isinstance(params, Tensor) else list(params)
        self._given = max(1, sum(isinstance(entry, dict) for entry in entries))  # param groups
        super().__init__(entries or params, {**defaults, "method": self.method.name})

    # ---------------------------------------------------------------- parameters and layout

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
        group = self.param_groups[index]
        options = Options.of(group, self.method)
        params = [p for p in dict.fromkeys(group["params"]) if p.numel() > 0]
        for p in group["params"]:
            if not p.is_floating_point():
                raise TypeError(
                    f"{called(p, self._names())} has dtype {p.dtype}; parameters must be real "
                    "floating-point tensors: leave it out or view it as real"
                )
        places = self._find_places(params, options, index)
        members: dict[tuple[Any, ...], list[Block]] = defaultdict(list)
        for p in params:
            for modes, block in self._blocks(p, options):
                dtype = torch.promote_types(p.dtype, torch.float32)
                place = places.get(p) if modes else None
                members[block.shape, modes, dtype, p.device, place].append(block)
        owners = _assign(members)
        buckets = []
        kinds: dict[Tensor, int] = defaultdict(int)
        for key, blocks in members.items():
            shape, modes, dtype, device, place = key
            like = torch.empty(0, dtype=dtype, device=device)
            own, exchange = blocks, None
            if place is not None:
                from .layout import Exchange  # a place exists, so this is imported already

                exchange = Exchange(place, blocks, owners[key], like)
                own = [blocks[number] for number in exchange.mine]
            kind = {p: kinds[p] for p in dict.fromkeys(block.parameter for block in blocks)}
            for p in kind:
                kinds[p] += 1
            buckets.append(
                Bucket(index, own, shape, modes, kind, self.method, options, like, exchange)
            )
        self._buckets += buckets
        self._waves += waves(buckets)
        self._layouts.append(options.layout)
        self._shared |= places
        plain = {p for bucket in buckets if not bucket.modes for p in bucket.parameters}
        for p in places:  # in the order of the parameters, which all ranks agree on
            if p in plain and is_sharded(p):
                self._voters.setdefault(places[p], []).append((index, p))
        for bucket in buckets:
            for p, views in bucket.views():
                # A rank without a block of p has an entry too: checkpoints ask for it.
                self.state[p].update(views if views and next(iter(views.values())).numel() else {})

    def _blocks(self, p: Tensor, options: Options) -> Iterator[tuple[tuple[int, ...], Block]]:
        """Modes and blocks of a parameter; plain Adam works on what this rank holds of it."""
        plan = cut(p.shape, options, self.method)
        if not plan.modes:
            held = local(p)  # it may be empty, but a checkpoint wants an entry on every rank
            box = tuple(slice(0, size) for size in held.shape)
            yield (), Block(p, 0, 1, box, (padded(held.numel()),))
            return
        for number, (box, shape) in enumerate(zip(plan.boxes, plan.shapes, strict=True)):
            size = torch.Size(shape).numel()
            if options.correction == "optimal" and len(shape) > 1 and size > OPTIMAL_LIMIT:
                raise ValueError(
                    f"correction='optimal' keeps a full matrix per block and takes blocks of at "
                    f"most {OPTIMAL_LIMIT} elements; {called(p, self._names())} has one of shape "
                    f"{shape}. Lower max_dim, or use 'basis_aware'"
                )
            yield plan.modes, Block(p, number, len(plan.boxes), box, shape)

    def _find_places(
        self, params: Sequence[Tensor], options: Options, index: int
    ) -> dict[Tensor, "Place"]:
        """The ranks that share the work on each parameter; those not listed are worked on here."""
        group = self.param_groups[index]["process_group"]
        if group is None and not any(is_sharded(p) for p in params):
            return {}
        # Slow to import, so only where needed.
        from .layout import Place, check_agreement, check_meshes, facts, mesh_of

        if group is not None:
            how_many = str(max(self._given, index + 1))
            about = {"the method": self.method.name, "the number of param groups": how_many}
            check_agreement(about | facts(options, params), group)
        check_meshes(self._parameters(), self._names())
        found = {}
        for p in params:
            mesh = mesh_of(p) if is_sharded(p) else None
            key = group if mesh is None else mesh
            if key is None or (mesh is not None and mesh.size() == 1):
                continue
            if key not in self._places:
                self._places[key] = Place(group) if mesh is None else Place.of_mesh(mesh)
            found[p] = self._places[key]
        return found

    def _names(self) -> dict[Tensor, str]:
        """Names of the parameters, where the optimizer was given them."""
        return {
            p: name
            for group in self.param_groups
            for p, name in zip(group["params"], group.get("param_names", ()), strict=False)
        }

    # ---------------------------------------------------------------- the step

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Take one step; a closure that evaluates the loss anew is called first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        tasks = self._tasks()
        shared = [task for task in tasks if task.bucket.exchange is not None]
        checking = [task for task in tasks if task.checks]
        updates: list[Update] = []  # of parameters whose blocks are grafted together
        # 0. Gradients that other ranks work on start their way.
        for task in shared:
            task.exchange.start()
        # 1. Gradients to statistics. Where no basis can change before the update, all the rest too.
        by_bucket = {task.bucket: task for task in tasks}
        for wave in self._waves:
            updates += advance(wave, by_bucket)
            post(shared)
        # 2. Criteria, one copy to the host, and new bases where they are due.
        failures, skipped = refresh_(checking, tasks) if checking else ([], [])
        # 3. The rest of the step for those that waited for it.
        for task in checking:
            if task.waits:
                updates += finish(task)
        graft_parameters(tasks, updates, self._parameters())
        # 4. Updates that other ranks worked on arrive.
        post(shared, everything=True)
        for task in shared:
            task.exchange.finish(task.options.lr * task.options.weight_decay)
        if skipped and not self._warned:
            self._warned = True
            bad = ", ".join(called(p, self._names()) for p in skipped)
            warnings.warn(
                f"the gradient of {bad} had NaN or Inf; such blocks stand still for the step. "
                "basis_report() goes on counting them, without another warning",
                stacklevel=2,
            )
        if failures := self._to_report(failures, shared):
            raise RuntimeError(
                "no basis could be computed for "
                + ", ".join(
                    f"factor {f.mode} of {called(f.parameter, self._names())} ({f.in_a_row} times "
                    "in a row)"
                    for f in failures
                )
                + ", also in float64 and with damping; the old one was kept. Look at these "
                "gradients, or raise max_failures"
            )
        return loss

    def _tasks(self) -> list[Task]:
        """Read options and gradients, refuse what is wrong, then start the clocks."""
        options = [Options.of(group, self.method) for group in self.param_groups]
        for o, layout in zip(options, self._layouts, strict=True):
            _check_layout(o, layout)
        if self._shared:
            from .layout import lay_out_gradients

            lay_out_gradients(list(self._shared))
        self._check_gradients(options)
        verdicts = self._verdicts(options)
        tasks = []
        for bucket in self._buckets:
            # Whether other ranks have a gradient is not known here: their message says it.
            away = bucket.exchange is not None
            present = [away or block.parameter.grad is not None for block in bucket.blocks]
            if not any(present) and not away:
                continue
            o = options[bucket.group]
            clock = [t + now for t, now in zip(bucket.clock, present, strict=True)]
            due = [s for s, now in enumerate(present) if now and clock[s] % o.frequency == 0]
            checks = {slot: o.threshold(clock[slot]) for slot in due if bucket.modes}
            task = Task(bucket, o, present, clock, checks)
            if verdicts and any(block.parameter in verdicts for block in bucket.blocks):
                fine = torch.zeros((), dtype=torch.int32, device=bucket.stacks.step.device)
                said = [verdicts.get(block.parameter, fine) for block in bucket.blocks]
                task.verdicts = torch.stack(said)
            tasks.append(task)
        for task in tasks:
            task.bucket.clock = task.clock
        self._calls += 1
        return tasks

    def _to_report(self, failures: Sequence[Failure], shared: Sequence[Task]) -> list[Failure]:
        """What to raise now: at the steps of checks, ranks tell each other of shared blocks.

        Gradients that were skipped delay the checks of their blocks, which only the owner knows; so
        all ranks count calls, and what failed in between waits.
        """
        found: list[Failure] = []
        for failure in failures:
            place = self._shared.get(failure.parameter)
            (found if place is None else self._unreported[place]).append(failure)
        due = [task for task in shared if self._calls % task.options.frequency == 0]
        for place in dict.fromkeys(task.exchange.place for task in due):
            from .layout import everyones

            params = [p for p, where in self._shared.items() if where is place]
            found += everyones(place, params, self._unreported.pop(place, []))
        return found

    def _verdicts(self, options: Sequence[Options]) -> dict[Tensor, Tensor]:
        """Whether the shards of element-wise parameters can move; see `layout.vote`."""
        verdicts: dict[Tensor, Tensor] = {}
        for place, entries in self._voters.items():
            params = [p for index, p in entries if options[index].nonfinite == "skip"]
            if params:
                from .layout import vote

                verdicts |= zip(params, vote(place, params).unbind(0), strict=True)
        return verdicts

    def _check_gradients(self, options: Sequence[Options]) -> None:
        """Refuse gradients that cannot be used, before anything has changed."""
        watched: dict[Place | None, list[Tensor]] = defaultdict(list)
        for group, o in zip(self.param_groups, options, strict=True):
            for p in group["params"]:
                grad = p.grad
                if o.nonfinite == "raise" and p.numel() > 0:
                    place = self._shared.get(p)
                    if grad is not None or place:
                        watched[place].append(p)
                if grad is not None and (grad.is_sparse or grad.is_complex()):
                    kind = "sparse" if grad.is_sparse else "complex"
                    raise RuntimeError(
                        f"the gradient of {called(p, self._names())} is {kind}; gradients must be "
                        "dense and real: use sparse=False in the embedding, or another optimizer "
                        "for this parameter"
                    )
        bad = []
        for place, params in watched.items():
            if place is None:
                grads = [local(p.grad) for p in params if p.grad is not None]
                norms = torch._foreach_norm(grads, float("inf"))
                wrong = (~torch.stack([norm.float().cpu() for norm in norms]).isfinite()).tolist()
            else:  # all ranks raise, or none
                from .layout import vote

                wrong = (vote(place, params, float("inf")) == 1).tolist()
            bad += [called(p, self._names()) for p, w in zip(params, wrong, strict=True) if w]
        if bad:
            raise FloatingPointError(
                f"the gradient of {', '.join(bad)} has NaN or Inf; nothing was changed. Find the "
                "cause, or set nonfinite='skip' to leave such blocks out of the step"
            )

    # ---------------------------------------------------------------- reports

    @property
    def basis_computations(self) -> int:
        """How many bases have been computed so far, over all factors."""
        return sum(sum(bucket.books.computations) for bucket in self._buckets)

    def basis_report(self) -> list[FactorReport]:
        """Per parameter, block and factor: checks, basis computations, last criterion, history."""
        place = {p: n for n, p in enumerate(p for g in self.param_groups for p in g["params"])}
        names = self._names()
        found = [pair for bucket in self._buckets for pair in factor_reports(bucket, names)]
        found.sort(key=lambda pair: (place[pair[0]], pair[1].block, pair[1].mode))
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
        for group, layout in zip(groups, self._layouts, strict=True):
            _check_layout(Options.of(group, self.method), layout)
        state, adam = read_state(state_dict, self._parameters(), self._buckets, self._names())
        self.param_groups = groups
        (fill_from_adam_ if adam else fill_)(self._buckets, state)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def __getstate__(self) -> dict[str, Any]:
        """For deepcopy and pickle: each parameter with values of its own, not views of stacks."""
        if self._places:
            raise TypeError(
                "an optimizer that shares its work over ranks cannot be copied or pickled; build "
                "another one and give it this one's state_dict()"
            )
        state = {p: {n: v.clone() for n, v in values.items()} for p, values in self.state.items()}
        history = [bucket.history for bucket in self._buckets]
        own = {"defaults": self.defaults, "param_groups": self.param_groups}
        return {**own, "state": state, "history": history}

    def __setstate__(self, state: dict[str, Any]) -> None:
        values, history = state["state"], state["history"]
        own = {name: state[name] for name in ("defaults", "param_groups")}
        super().__setstate__({**own, "state": defaultdict(dict)})
        self._buckets, self._waves, self._layouts = [], [], []
        self._places, self._shared, self._voters = {}, {}, {}
        self._warned = False
        self._calls, self._unreported = 0, defaultdict(list)
        self._given = len(self.param_groups)
        for index in range(len(self.param_groups)):
            self._build(index)
        fill_(self._buckets, values)
        for bucket, remembered in zip(self._buckets, history, strict=True):
            bucket.history = remembered


# -------------------------------------------------------------------- what is refused


def _assign(members: Mapping[tuple[Any, ...], list[Block]]) -> dict[tuple[Any, ...], list[int]]:
    """Owners of the blocks that are shared, balanced over all of a group's buckets."""
    by_place: dict[Any, list[tuple[Any, ...]]] = defaultdict(list)
    for key, blocks in members.items():
        if key[-1] is not None:
            by_place[key[-1]] += [key] * len(blocks)
    owners: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for place, keys in by_place.items():
        for key, rank in zip(keys, place.assign([key[:2] for key in keys]), strict=True):
            owners[key].append(rank)
    return owners


def _check_leaves(params: Tensor | Sequence[Any]) -> None:
    for entry in [params] if isinstance(params, Tensor) else params:
        p = entry[1] if isinstance(entry, tuple) else entry
        if isinstance(p, Tensor) and not (p.is_leaf or p.retains_grad):
            raise ValueError(
                f"a tensor of shape {tuple(p.shape)} is the result of {p.grad_fn}; parameters must "
                "be leaf tensors: pass the tensors that it was computed from, or detach() it"
            )


def _check_layout(o: Options, layout: Mapping[str, Any]) -> None:
    changed = [key for key in layout if o.layout[key] != layout[key]]
    if changed:
        key = changed[0]
        raise ValueError(
            f"{key} is {o.layout[key]!r} now but was {layout[key]!r} when the state was laid out; "
            "the shapes of the state depend on it: set it back, or build a new optimizer"
        )
