"""The one training loop: deterministic, resumable, and honest about where the time goes."""

import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer

from eshampoo.lab.catalogue import setting, workload
from eshampoo.lab.data import Batch, Dataset, batch_indices, seeded
from eshampoo.lab.errors import UserError
from eshampoo.lab.files import make_directory
from eshampoo.lab.models import parameter_kinds
from eshampoo.lab.optimizers import build_optimizer, set_scheduled_
from eshampoo.lab.run.basis import basis_record, computations, factors_record
from eshampoo.lab.run.checkpoint import (
    checkpoints,
    discard_checkpoints,
    read_checkpoint,
    save_checkpoint,
)
from eshampoo.lab.run.device import beside, device_record, placed, wait
from eshampoo.lab.run.environment import environment
from eshampoo.lab.run.runlog import (
    CPU_TIMES,
    FILE_NAME,
    TIMES,
    RunLog,
    read_log,
    read_records,
    refuse_another,
    refuse_other_data,
)
from eshampoo.lab.run.runs import Run
from eshampoo.lab.workloads import Setting, Workload
from eshampoo.optimizer import EigenbasisOptimizer

BASIS_SAMPLES = 50  # how often in a run to log the criteria of all factors
FINAL_SHARE = 0.05  # the final loss is the mean over this last share of the steps


@dataclass(frozen=True)
class Progress:
    """What an observer of a run learns after a step."""

    step: int
    loss: float
    computations: int
    seconds: float  # since the start or resumption
    speed: float  # steps per second since the start or resumption


@dataclass
class _State:
    """A run under way."""

    run: Run
    workload: Workload
    setting: Setting
    dataset: Dataset
    model: nn.Module
    optimizer: Optimizer
    log: RunLog
    evaluations: int  # of the metric
    step: int = 0
    logging: float = 0.0  # seconds spent on the log
    diverged: bool = False


def train(
    run: Run,
    dataset: Dataset,
    out: Path,
    *,
    command: str = "",
    resume: bool = False,
    checkpoint_every: int = 200,
    device: str = "cpu",
    watch: Callable[[Progress], None] = lambda progress: None,
    stopped: Callable[[], bool] = lambda: False,
) -> bool:
    """Train ``run`` into ``out``; return True if it has finished, False if it was stopped.

    A stopped or killed run continues with ``resume`` to the same curve, bit for bit.
    """
    state = _begin(run, dataset, out, command, device)
    make_directory(out)  # only now, so that a refused run leaves nothing behind
    if resume:
        _resume_(state, out)
    else:
        discard_checkpoints(out)
    started, first = time.perf_counter(), state.step
    while state.step < run.steps and not state.diverged:
        loss = _step_(state)
        seconds = time.perf_counter() - started
        speed = (state.step - first) / seconds
        watch(Progress(state.step, loss, computations(state.optimizer), seconds, speed))
        if state.step == run.steps or state.diverged:
            break
        if stopped() or state.step % checkpoint_every == 0:
            _save(state, out)
        if stopped():
            return False
    _finish(state)
    return True


def _begin(run: Run, dataset: Dataset, out: Path, command: str, device: str) -> _State:
    """Make model, optimizer and log of a run at step 0."""
    row = workload(run.workload)
    chosen = setting(run)
    if run.options.get("statistics") == "observe" and row.sampled is None:
        raise UserError(
            f"{row.name} has no classes to sample labels from; leave statistics at 'step', or take"
            " a workload that classifies"
        )
    if len(dataset) < chosen.batch:
        raise UserError(
            f"{len(dataset)} training examples are fewer than a batch of {chosen.batch}; use more"
            " data or a smaller --scale"
        )
    torch.manual_seed(run.seed)
    model = chosen.model(dataset.outputs)
    model = model if chosen.start is None else chosen.start(model, dataset)
    model = placed(model, device)  # the same start on every device
    optimizer = build_optimizer(run.optimizer, model, run.options)
    kinds = parameter_kinds(model)
    log = RunLog(out)
    log.add(
        {
            "kind": "run",
            "run": run.record(),
            "setting": chosen.record(),
            "examples": len(dataset),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "metric": row.metric_name,
            "higher_is_better": row.higher_is_better,
            "trivial": row.trivial(dataset),
            "command": command,
            "environment": {**environment(), **device_record(model)},
        }
    )
    factors = factors_record(optimizer, kinds)
    if factors is not None:
        log.add(factors)
    return _State(
        run, row, chosen, dataset, model, optimizer, log, run.evaluations or chosen.evaluations
    )


def _step_(state: _State) -> float:
    """Take one step (batch, forward and backward, update) and log it."""
    run, model, optimizer = state.run, state.model, state.optimizer
    _apply_schedules_(state)
    begin, begin_cpu = time.perf_counter(), time.process_time()
    indices = batch_indices(len(state.dataset), state.setting.batch, run.seed, state.step)
    batch = beside(state.dataset.batch(indices, seeded(run.seed, state.step, 1)), model)
    loaded = time.perf_counter()
    model.train()
    observing, observing_cpu = _observe_(state, batch)

    def differentiate() -> float:
        loss = state.workload.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if state.setting.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), state.setting.clip)
        return loss.item()

    loss = differentiate()
    differentiated, differentiated_cpu = time.perf_counter(), time.process_time()
    # A line search asks for the loss again, and that is part of the optimizer's time.
    optimizer.step(differentiate if isinstance(optimizer, LBFGS) else None)
    wait(model)
    updated, updated_cpu = time.perf_counter(), time.process_time()
    state.step += 1
    state.diverged = not math.isfinite(loss)
    state.log.add(
        {
            "kind": "step",
            "step": state.step,
            "loss": loss,
            "data": round(loaded - begin, 6),
            "forward_backward": round(differentiated - loaded - observing, 6),
            "optimizer": round(updated - differentiated + observing, 6),
            "cpu": round(updated_cpu - begin_cpu, 6),
            "cpu_optimizer": round(updated_cpu - differentiated_cpu + observing_cpu, 6),
            "computations": computations(optimizer),
        }
    )
    last = state.step == run.steps or state.diverged
    if last or state.step % max(1, run.steps // BASIS_SAMPLES) == 0:
        record = basis_record(optimizer, state.step)
        if record is not None:
            state.log.add(record)
    state.logging += time.perf_counter() - updated
    _evaluate_(state)
    return loss


def _observe_(state: _State, batch: Batch) -> tuple[float, float]:
    """With statistics="observe", let the optimizer observe gradients of sampled labels.

    Return its wall and CPU seconds, without those of the forward and backward passes.
    """
    if state.run.options.get("statistics") != "observe":
        return 0.0, 0.0
    assert isinstance(state.optimizer, EigenbasisOptimizer)
    assert state.workload.sampled is not None
    loss = state.workload.sampled(state.model, batch, seeded(state.run.seed, state.step, 2))
    state.optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    begin, begin_cpu = time.perf_counter(), time.process_time()
    state.optimizer.observe()
    return time.perf_counter() - begin, time.process_time() - begin_cpu


def _apply_schedules_(state: _State) -> None:
    """Set the learning rate (linear warm-up, cosine to zero) and scheduled options of the step."""
    if isinstance(state.optimizer, LBFGS):
        return  # a line search has no schedule
    steps, warmup = state.run.steps, max(1, round(state.setting.warmup * state.run.steps))
    done = state.step + 1
    factor = done / warmup
    if done > warmup:
        factor = 0.5 + 0.5 * math.cos(math.pi * (done - warmup) / max(1, steps - warmup + 1))
    for group in state.optimizer.param_groups:
        # the group's rate is the option, or the optimizer's own default
        group["lr"] = factor * group.setdefault("initial_lr", group["lr"])
    set_scheduled_(state.optimizer, state.run.options, state.step / steps)


def _evaluate_(state: _State) -> None:
    """Log the metric on the validation set when it is due."""
    every = max(1, state.run.steps // state.evaluations)
    if state.step % every and state.step != state.run.steps:
        return
    generator = torch.get_rng_state()
    state.model.eval()
    with torch.no_grad():
        batches = (beside(batch, state.model) for batch in state.dataset.validation())
        metric = state.workload.metric(state.model, batches)
    torch.set_rng_state(generator)
    state.log.add({"kind": "evaluation", "step": state.step, "metric": metric})


def _save(state: _State, out: Path) -> None:
    """Write the log, then the checkpoint, so that the log is never behind the checkpoint."""
    state.log.save()
    save_checkpoint(
        out,
        state.step,
        {
            "model": state.model.state_dict(),
            "optimizer": state.optimizer.state_dict(),
            "logging": state.logging,
        },
    )


def _resume_(state: _State, out: Path) -> None:
    """Continue from the newest checkpoint, and forget what was logged after it."""
    path = out / FILE_NAME
    if not path.exists():
        return
    before = read_log(path)
    refuse_another(out, before.header["run"], state.run)
    refuse_other_data(out, before.header["examples"], len(state.dataset))
    found = checkpoints(out)
    if not found:
        return
    checkpoint = read_checkpoint(found[0])
    # the last bits of sums depend on the number of threads, so it must not change
    torch.set_num_threads(before.header["environment"]["threads"])
    torch.set_rng_state(checkpoint["generator"])
    state.model.load_state_dict(checkpoint["model"])
    state.optimizer.load_state_dict(checkpoint["optimizer"])
    state.logging, state.step = checkpoint["logging"], checkpoint["step"]
    kept = [r for r in read_records(path) if r["kind"] != "end" and r.get("step", 0) <= state.step]
    state.log = RunLog(out, kept)


def _finish(state: _State) -> None:
    """Log the results of the run, and write the log for the last time."""
    steps = [json.loads(line) for line in state.log.lines if line.startswith('{"kind":"step"')]
    seconds, cpu = (
        {name: sum(record[name] for record in steps) for name in names}
        for names in (TIMES, CPU_TIMES)
    )
    last = steps[-max(1, round(FINAL_SHARE * state.run.steps)) :]
    state.log.add(
        {
            "kind": "end",
            "step": state.step,
            "diverged": state.diverged,
            "final_loss": math.nan
            if state.diverged
            else sum(record["loss"] for record in last) / len(last),
            "seconds": sum(seconds.values()),
            "optimizer_share": seconds["optimizer"] / sum(seconds.values()),
            "cpu_seconds": cpu["cpu"],
            "cpu_optimizer_share": cpu["cpu_optimizer"] / cpu["cpu"],
            "logging_share": state.logging / sum(seconds.values()),
            "computations": computations(state.optimizer),
        }
    )
    state.log.save()


@contextmanager
def stop_on_signal() -> Iterator[Callable[[], bool]]:
    """After Ctrl-C or SIGTERM, let the current step finish, so that the caller can save."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
