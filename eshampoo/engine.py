"""The `torch.optim.Optimizer` shell: buckets, `step()`, and the state that goes in and out."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from . import phases
from .blocks import Block, called, cut
from .bucket import Bucket, named_views
from .checkpoint import packed, read_groups, read_values
from .methods import Method
from .options import Options
from .refresh import Task, refresh_
from .report import FactorReport, factor_reports

ProcessGroup = torch.distributed.ProcessGroup

OPTIMAL_LIMIT = 4096
"""Largest block for correction="optimal", which keeps a matrix of that size squared."""


@dataclass
class Update:
    """Directions of some blocks of a bucket, and the squared norms that grafting compares."""

    task: Task
    start: int
    stop: int
    U: Tensor  # [n, …]
    moving: Tensor  # [n]
    norms: Tensor  # [2, n]: ‖U_graft‖², ‖U‖²

    @property
    def blocks(self) -> list[Block]:
        return self.task.bucket.blocks[self.start : self.stop]

    def owners(self, numbers: Mapping[Tensor, int]) -> Tensor:
        """The number of each block's parameter."""
        return torch.tensor([numbers[b.parameter] for b in self.blocks], device=self.U.device)

    def apply_(self, norms: Tensor) -> None:
        """U ← U ‖U_graft‖ / ‖U‖ with the given norms (Eq. grafting), then the parameters move."""
        ratio = torch.where(norms[1] > 0, norms[0] / norms[1], torch.zeros_like(norms[0])).sqrt()
        self.U.mul_(phases.per_block(ratio, self.U))
        bucket, o = self.task.bucket, self.task.options
        bucket.apply_(self.U, self.moving, self.start, self.stop, self.task.present, o)


class EigenbasisOptimizer(Optimizer):
    """One step of any method of the table, for all parameters at once.

    Abstract: the user's classes are in `optimizers.py` and only add signatures.
    """

    method: ClassVar[Method]

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        self._buckets: list[Bucket] = []
        self._layouts: list[dict[str, Any]] = []
        self._warned = False
        super().__init__(params, {**defaults, "method": self.method.name})

    # ---------------------------------------------------------------- parameters and layout

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, at any time; nothing changes if it is refused."""
        before = len(self.param_groups)
        if not isinstance(param_group["params"], Tensor | set):
            param_group = {**param_group, "params": list(param_group["params"])}
            _check_leaves(param_group["params"])
        super().add_param_group(param_group)
        try:
            self._build(before)
        except BaseException:
            del self.param_groups[before:]
            raise

    def _build(self, number: int) -> None:
        """Create the buckets and the state of one group, eagerly, so that checkpoints see it."""
        group = self.param_groups[number]
        options = Options.of(group, self.method)
        members: dict[tuple[Any, ...], list[Block]] = defaultdict(list)
        for p in dict.fromkeys(group["params"]):
            if not p.is_floating_point():
                raise TypeError(
                    f"{called(p, self._names())} has dtype {p.dtype}; parameters must be real "
                    "floating-point tensors: leave it out or view it as real"
                )
            if p.numel() == 0:
                continue
            plan = cut(p.shape, options, self.method)
            dtype = torch.promote_types(p.dtype, torch.float32)
            for index, region in enumerate(plan.regions):
                block = Block(p, index, len(plan.regions), plan.merged, region)
                members[block.shape, plan.modes, dtype, p.device].append(block)
        for (shape, modes, *_), blocks in members.items():
            size = torch.Size(shape).numel()
            if (
                options.correction == "optimal"
                and modes
                and len(shape) > 1
                and size > OPTIMAL_LIMIT
            ):
                raise ValueError(
                    f"correction='optimal' keeps a full matrix per block and takes blocks of at "
                    f"most {OPTIMAL_LIMIT} elements; {called(blocks[0].parameter, self._names())} "
                    f"has one of shape {shape}. Lower max_dim, or use 'basis_aware'"
                )
        buckets = [
            Bucket(
                number,
                blocks,
                modes,
                self.method,
                options,
                torch.empty(0, dtype=dtype, device=device),
            )
            for (_, modes, dtype, device), blocks in members.items()
        ]
        self._buckets += buckets
        self._layouts.append(options.layout)
        self.state.update(named_views(buckets))

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
        checking = [task for task in tasks if task.checks]
        updates: list[Update] = []  # of parameters whose blocks are grafted together
        # 1. Gradients to statistics. Where no basis can change before the update, all the rest too.
        for task in tasks:
            if task.checks and not self.method.delayed:
                _observe(task)
            else:
                updates += _advance(task)
        # 2. Criteria, one copy to the host, and new bases where they are due.
        failures = refresh_(checking) if checking else []
        # 3. The rest of the step for those that waited for it.
        if not self.method.delayed:
            for task in checking:
                updates += _finish(task)
        _graft_parameters(updates)
        if failures:
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
        self._check_gradients(options)
        tasks = []
        for bucket in self._buckets:
            present = [block.parameter.grad is not None for block in bucket.blocks]
            if not any(present):
                continue
            o, checks = options[bucket.group], []
            for slot, has_gradient in enumerate(present):
                if has_gradient:
                    bucket.clock[slot] += 1
                    if bucket.modes and bucket.clock[slot] % o.frequency == 0:
                        checks.append(slot)
            tasks.append(Task(bucket, o, present, checks))
        return tasks

    def _check_gradients(self, options: Sequence[Options]) -> None:
        """Refuse gradients that cannot be used, before anything has changed."""
        watched: list[tuple[Tensor, Tensor]] = []
        for group, o in zip(self.param_groups, options, strict=True):
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.is_sparse or p.grad.is_complex():
                    kind = "sparse" if p.grad.is_sparse else "complex"
                    raise RuntimeError(
                        f"the gradient of {called(p, self._names())} is {kind}; gradients must be "
                        "dense and real: use sparse=False in the embedding, or another optimizer "
                        "for this parameter"
                    )
                if o.nonfinite == "raise" and p.numel() > 0:
                    watched.append((p, p.grad))
        if not watched:
            return
        norms = torch._foreach_norm([grad for _, grad in watched], float("inf"))
        finite = torch.stack([norm.float().cpu() for norm in norms]).isfinite().tolist()
        bad = [
            called(p, self._names()) for (p, _), ok in zip(watched, finite, strict=True) if not ok
        ]
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
        """The state as plain tensors and numbers, safe for `torch.load(weights_only=True)`."""
        return packed(super().state_dict())

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
        params = [p for group in self.param_groups for p in group["params"]]
        values = read_values(state_dict, params, self.state, self._buckets, self._names())
        self.param_groups = groups
        self._fill(values)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _fill(self, values: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
        """Write values into the views, and set the clocks by them."""
        for p, named in values.items():
            for name, value in named.items():
                self.state[p][name].copy_(value)
        for bucket in self._buckets:
            bucket.clock = [int(t) for t in bucket.stacks.step.tolist()]
            bucket.history.clear()

    def __getstate__(self) -> dict[str, Any]:
        """For deepcopy and pickle: each parameter with values of its own, not views of stacks."""
        state = {p: {n: v.clone() for n, v in values.items()} for p, values in self.state.items()}
        return {"defaults": self.defaults, "param_groups": self.param_groups, "state": state}

    def __setstate__(self, state: dict[str, Any]) -> None:
        values = state["state"]
        super().__setstate__({**state, "state": defaultdict(dict)})
        self._buckets, self._layouts, self._warned = [], [], False
        for number in range(len(self.param_groups)):
            self._build(number)
        self._fill(values)


# -------------------------------------------------------------------- a bucket's step


def _parts(task: Task) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Gradient and `live` of each part of a bucket in which any block has a gradient."""
    bucket, o = task.bucket, task.options
    for start, stop in bucket.parts():
        here = task.present[start:stop]
        if any(here):
            G = bucket.gather(start, stop, task.present)
            if o.maximize:
                G.neg_()
            present = torch.tensor(here, device=G.device)
            yield start, stop, G, phases.admit_(bucket.stacks.narrow(start, stop), G, present, o)


def _observe(task: Task) -> None:
    """First half of a step at which bases may change: G̃ is kept until they are known."""
    bucket = task.bucket
    task.grad = torch.zeros_like(bucket.stacks.exp_avg)
    task.live = torch.zeros_like(bucket.stacks.step, dtype=torch.bool)
    for start, stop, G, live in _parts(task):
        s = bucket.stacks.narrow(start, stop)
        task.grad[start:stop] = phases.observe_(s, G, live, task.options, bucket.method)
        task.live[start:stop] = live


def _finish(task: Task) -> Iterator[Update]:
    """Second half of a step at which bases may change."""
    assert task.grad is not None
    assert task.live is not None
    for start, stop in task.bucket.parts():
        if any(task.present[start:stop]):
            yield from _update(task, start, stop, task.grad[start:stop], task.live[start:stop])
    task.grad = task.live = None


def _advance(task: Task) -> Iterator[Update]:
    """The whole step of a bucket, with the bases that it has."""
    bucket = task.bucket
    for start, stop, G, live in _parts(task):
        s = bucket.stacks.narrow(start, stop)
        G = phases.observe_(s, G, live, task.options, bucket.method)
        yield from _update(task, start, stop, G, live)


def _update(task: Task, start: int, stop: int, G: Tensor, live: Tensor) -> Iterator[Update]:
    """Momentum, scale, direction and parameters; what must wait for other blocks is yielded."""
    bucket, o, method = task.bucket, task.options, task.bucket.method
    s = bucket.stacks.narrow(start, stop)
    moving = live & (s.step >= 1)  # a delayed method only observes its first gradient
    phases.accumulate_(s, G, moving, o, method)
    U = phases.direction(s, G, o, method)
    if method.rotated or o.graft is None:
        bucket.apply_(U, moving, start, stop, task.present, o)
        return
    graft = phases.graft_direction(s, G, o)
    norms = torch.stack([phases.squared_norms(graft), phases.squared_norms(U)])
    checked = [bucket.checked(slot) for slot in range(start, stop)]
    if not all(checked):  # without a basis yet, the grafting method takes the step alone
        ready = torch.tensor(checked, device=U.device)
        U = torch.where(phases.per_block(ready, U), U, graft)
        norms = torch.where(ready, norms, norms[0])
    update = Update(task, start, stop, U, moving, norms)
    if o.graft_scope == "parameter" and any(block.total > 1 for block in update.blocks):
        yield update
    else:
        update.apply_(norms)


def _graft_parameters(updates: Sequence[Update]) -> None:
    """Graft with the norms of whole parameters, summed over their blocks."""
    numbers: dict[Tensor, int] = {}
    totals: dict[tuple[torch.device, torch.dtype], Tensor] = {}
    for update in updates:
        for block in update.blocks:
            numbers.setdefault(block.parameter, len(numbers))
    for update in updates:
        norms = update.norms
        place = (norms.device, norms.dtype)
        total = totals.setdefault(place, norms.new_zeros(2, len(numbers)))
        total.index_add_(1, update.owners(numbers), norms)
    for update in updates:
        total = totals[update.norms.device, update.norms.dtype]
        update.apply_(total[:, update.owners(numbers)])


# -------------------------------------------------------------------- what is refused


def _check_leaves(params: Sequence[Any]) -> None:
    for entry in params:
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
