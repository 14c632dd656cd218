"""A small stand-in for the AlgoPerf benchmark, which is not in the package index.

It has what a submission touches: of the benchmark's `spec` the names that it uses, a workload with
the benchmark's interface (the tiny vision transformer on digits), and a runner that calls the five
functions in the order and by the names of the benchmark's `submission_runner.py`, saves on rank 0
alone and restores on all ranks. Under torchrun,

    torchrun --nproc-per-node 2 tests/algoperf/stand_in.py POINT STEPS FOLDER FILE

trains point POINT of the search space for STEPS steps with checkpoints in FOLDER, and writes the
weights into FILE.
"""

import collections
import enum
import importlib.util
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from eshampoo.lab.catalogue import workload as lab_workload
from eshampoo.lab.data import batch_indices, seeded

SUBMISSION = Path(__file__).parents[2] / "algoperf"
BATCH = 32


class ForwardPassMode(enum.Enum):
    TRAIN = 0
    EVAL = 1


class LossType(enum.Enum):
    SOFTMAX_CROSS_ENTROPY = 0


NAMES = (
    "Workload", "ParameterContainer", "ParameterTypeTree", "ModelAuxiliaryState",
    "Hyperparameters", "OptimizerState", "RandomState", "UpdateReturn",
)  # fmt: skip


def submission():
    """The submission as a module, with the stand-in in place of the benchmark."""
    spec = types.ModuleType("algoperf.spec")
    vars(spec).update({"ForwardPassMode": ForwardPassMode, "LossType": LossType})
    vars(spec).update(dict.fromkeys(NAMES, Any))
    package = types.ModuleType("algoperf")
    package.spec = spec
    before = sys.modules.get("algoperf")
    sys.modules["algoperf"] = package
    try:
        found = importlib.util.spec_from_file_location("submission", SUBMISSION / "submission.py")
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
    finally:
        if before is None:
            del sys.modules["algoperf"]
        else:
            sys.modules["algoperf"] = before
    return module


def points():
    """The points of the search space as the benchmark reads them: the names are the first's."""
    space = json.loads((SUBMISSION / "tuning_search_space.json").read_text())
    made = collections.namedtuple("Hyperparameters", list(space[0]))
    return [made(**point) for point in space]


def cheap(point):
    """A point for a short run of a small model: a tenth of F, and nothing is merged into one."""
    return point._replace(max_dim=48, frequency=5 if point.frequency == 50 else point.frequency)


class Digits:
    """A workload with the benchmark's interface."""

    step_hint = 40
    loss_type = LossType.SOFTMAX_CROSS_ENTROPY
    model_params_types = None

    def __init__(self):
        self.setting = lab_workload("digits-vit").settings["tiny"]
        self.data = self.setting.data(None)
        self.seen = []  # how the submission called the model and the loss

    def init_model_fn(self, rng):
        torch.manual_seed(rng)
        # in double precision, because sums in another order are then nearly the same
        model = self.setting.model(self.data.outputs).double()
        if dist.is_initialized():
            model = nn.parallel.DistributedDataParallel(model)
        return model, None

    def queue(self, rng, start):
        """Batches without end; every rank has its part of each."""
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        step = start
        while True:
            indices = batch_indices(len(self.data), BATCH, rng, step)
            inputs, targets = self.data.batch(indices, seeded(rng, step, 1))
            part = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
            # the last examples of a batch do not count, so ranks have different numbers of them
            weights = (torch.arange(BATCH) < BATCH - 5).double()
            yield {
                "inputs": inputs[part].double(),
                "targets": targets[part],
                "weights": weights[part],
            }
            step += 1

    def model_fn(
        self,
        params,
        augmented_and_preprocessed_input_batch,
        model_state,
        mode,
        rng,
        update_batch_norm,
        dropout_rate,
    ):
        self.seen.append((mode, update_batch_norm, dropout_rate, params.training))
        return params(augmented_and_preprocessed_input_batch["inputs"]), model_state

    def loss_fn(self, label_batch, logits_batch, mask_batch=None, label_smoothing=0.0):
        each = cross_entropy(
            logits_batch, label_batch, reduction="none", label_smoothing=label_smoothing
        )
        mask = torch.ones_like(each) if mask_batch is None else mask_batch
        masked = each * mask
        return {"summed": masked.sum(), "n_valid_examples": mask.sum(), "per_example": masked}


def plain(model):
    """The model without the wrapper of DDP."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def train(hyperparameters, steps, folder=None, every=5):
    """Train as the benchmark's runner does; continue from the checkpoint in `folder` if it has one.

    Returns the model, its optimizer, and what the workload saw.
    """
    theirs, workload = submission(), Digits()
    model, model_state = workload.init_model_fn(0)
    state = theirs.init_optimizer_state(workload, model, model_state, hyperparameters, 0)
    first, path = 0, None if folder is None else folder / "checkpoint"
    if path is not None and path.exists():
        saved = torch.load(path)
        plain(model).load_state_dict(saved["model_params"])
        for key in state:
            state[key].load_state_dict(saved["optimizer_state"][key])
        first = saved["global_step"]
    queue, losses = workload.queue(0, first), []
    about = {
        "workload": workload,
        "current_params_types": workload.model_params_types,
        "hyperparameters": hyperparameters,
        "loss_type": workload.loss_type,
        "eval_results": [],
        "rng": 0,
    }
    for step in range(first, steps):
        batch = theirs.data_selection(
            workload, queue, state, model, model_state, hyperparameters, step, 0
        )
        state, model, model_state = theirs.update_params(
            current_param_container=model,
            model_state=model_state,
            batch=batch,
            optimizer_state=state,
            global_step=step,
            train_state=types.MappingProxyType({}),
            **about,
        )
        if (step + 1) % every == 0:
            state, model, model_state = theirs.prepare_for_eval(
                current_param_container=model,
                model_state=model_state,
                optimizer_state=state,
                global_step=step + 1,
                **about,
            )
            with torch.no_grad():
                logits = plain(model)(batch["inputs"])
                losses.append(workload.loss_fn(batch["targets"], logits)["summed"].item())
            if path is not None and (not dist.is_initialized() or dist.get_rank() == 0):
                saved = {key: part.state_dict() for key, part in state.items()}
                weights = plain(model).state_dict()
                torch.save(
                    {"model_params": weights, "optimizer_state": saved, "global_step": step + 1},
                    path,
                )
    return plain(model), state["optimizer"].optimizer, workload, losses


def main():
    folder, file, point, *ends = sys.argv[1:]
    torch.set_num_threads(1)
    if "LOCAL_RANK" in os.environ:
        dist.init_process_group("gloo")
    for steps in ends:
        model, *_ = train(cheap(points()[int(point)]), int(steps), Path(folder))
        if dist.is_initialized():
            dist.barrier()  # rank 0 has saved
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(model.state_dict(), file)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
