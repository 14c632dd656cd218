"""EShampoo as a submission to AlgoPerf's external tuning track: the five functions it asks for.

The benchmark starts one process, or one per GPU with `torch.distributed`; then work and state of
the optimizer are shared by all of them. Signatures are those of the benchmark's `spec.py`.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from algoperf import spec  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
from eshampoo import EShampoo

HUGE = 1_000_000  # parameters with such a dimension, tables of embeddings, go to Adam

BATCH_SIZES = {
    "cifar": 128,
    "criteo1tb": 262_144,
    "fastmri": 32,
    "imagenet_resnet": 1024,
    "imagenet_resnet_gelu": 512,
    "imagenet_resnet_silu": 512,
    "imagenet_vit": 1024,
    "imagenet_vit_glu": 512,
    "librispeech_conformer": 256,
    "librispeech_deepspeech": 256,
    "mnist": 16,
    "ogbg": 512,
    "wmt": 128,
}


class Savable:
    """An optimizer whose state rank 0 can save alone, as the benchmark does.

    Where ranks share the state, all of them gather it before an evaluation; it is let go with the
    next step.
    """

    def __init__(self, optimizer: EShampoo, shared: bool) -> None:
        self.optimizer = optimizer
        self.shared = shared
        self.gathered: dict[str, Any] | None = None

    def gather(self) -> None:
        """Bring the state together, on all ranks at once; rank 0 keeps it."""
        if self.shared:
            state = self.optimizer.state_dict()
            self.gathered = state if dist.get_rank() == 0 else None

    def step(self) -> None:
        """Take a step."""
        self.gathered = None
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as it was gathered if it is shared."""
        if not self.shared:
            return self.optimizer.state_dict()
        if self.gathered is None:
            raise RuntimeError(
                "the state is shared by all ranks and was not gathered since the last step; call "
                "prepare_for_eval on all of them, and save on rank 0"
            )
        return self.gathered

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state, on all ranks."""
        self.optimizer.load_state_dict(state)


def get_batch_size(workload_name: str) -> int:
    """Return the global batch size: that with which the benchmark's targets were set."""
    if workload_name not in BATCH_SIZES:
        known = ", ".join(BATCH_SIZES)
        raise ValueError(f"no batch size for the workload {workload_name!r}; known are: {known}")
    return BATCH_SIZES[workload_name]


def learning_rate(step: int, steps: float, hyperparameters: spec.Hyperparameters) -> float:
    """Return the rate of a step, counted from 0: linear warm-up, then a cosine to zero."""
    warmup = max(1, int(hyperparameters.warmup_factor * steps))
    share = (step + 1) / warmup
    if step >= warmup:
        done = min(1.0, (step - warmup) / max(1.0, steps - warmup))
        share = 0.5 + 0.5 * math.cos(math.pi * done)
    return float(share * hyperparameters.learning_rate)


def init_optimizer_state(
    workload: spec.Workload,
    model_params: spec.ParameterContainer,
    model_state: spec.ModelAuxiliaryState,
    hyperparameters: spec.Hyperparameters,
    rng: spec.RandomState,
) -> spec.OptimizerState:
    """Build EShampoo over all parameters of the model."""
    ordinary: list[tuple[str, Tensor]] = []
    huge: list[tuple[str, Tensor]] = []
    for name, p in model_params.named_parameters():
        (huge if max(p.shape, default=0) >= HUGE else ordinary).append((name, p))
    groups: list[dict[str, Any]] = [{"params": ordinary}] if ordinary else []
    if huge:
        groups.append({"params": huge, "matrices": "adam", "vectors": "adam"})
    h, shared = hyperparameters, dist.is_available() and dist.is_initialized()
    optimizer = EShampoo(
        groups,
        lr=h.learning_rate,
        betas=(1 - h.one_minus_beta1, 1 - h.one_minus_beta2),
        eps=h.epsilon,
        weight_decay=h.weight_decay,
        nesterov=h.nesterov,
        max_dim=h.max_dim,
        merge_dims=h.merge_dims,
        vectors=h.vectors,
        frequency=h.frequency,
        tau=h.tau,
        budget=h.budget,
        rms=h.rms,
        process_group=dist.group.WORLD if shared else None,
    )
    return {"optimizer": Savable(optimizer, shared)}


def mean_loss(losses: dict[str, Tensor], shared: bool) -> Tensor:
    """Return the loss whose gradient, averaged by DDP, is that of the mean over all ranks."""
    summed, count = losses["summed"], torch.as_tensor(losses["n_valid_examples"])
    count = count.to(summed, copy=True)
    if not shared:
        return summed / count
    dist.all_reduce(count)
    return summed * dist.get_world_size() / count


def update_params(
    workload: spec.Workload,
    current_param_container: spec.ParameterContainer,
    current_params_types: spec.ParameterTypeTree,
    model_state: spec.ModelAuxiliaryState,
    hyperparameters: spec.Hyperparameters,
    batch: dict[str, Tensor],
    loss_type: spec.LossType,
    optimizer_state: spec.OptimizerState,
    eval_results: list[tuple[int, float]],
    global_step: int,
    rng: spec.RandomState,
    train_state: dict[str, Any] | None = None,
) -> spec.UpdateReturn:
    """Take one step."""
    savable: Savable = optimizer_state["optimizer"]
    model: nn.Module = current_param_container
    steps = hyperparameters.step_hint_factor * workload.step_hint
    for group in savable.optimizer.param_groups:
        group["lr"] = learning_rate(global_step, steps, hyperparameters)
    model.train()
    savable.optimizer.zero_grad()
    logits, model_state = workload.model_fn(
        params=model,
        augmented_and_preprocessed_input_batch=batch,
        model_state=model_state,
        mode=spec.ForwardPassMode.TRAIN,
        rng=rng,
        update_batch_norm=True,
        dropout_rate=hyperparameters.dropout_rate,
    )
    losses = workload.loss_fn(
        label_batch=batch["targets"],
        logits_batch=logits,
        mask_batch=batch.get("weights"),
        label_smoothing=hyperparameters.label_smoothing,
    )
    mean_loss(losses, savable.shared).backward()  # type: ignore[no-untyped-call]
    savable.step()
    return optimizer_state, model, model_state


def prepare_for_eval(
    workload: spec.Workload,
    current_param_container: spec.ParameterContainer,
    current_params_types: spec.ParameterTypeTree,
    model_state: spec.ModelAuxiliaryState,
    hyperparameters: spec.Hyperparameters,
    loss_type: spec.LossType,
    optimizer_state: spec.OptimizerState,
    eval_results: list[tuple[int, float]],
    global_step: int,
    rng: spec.RandomState,
) -> spec.UpdateReturn:
    """Gather the state, which rank 0 saves alone after the evaluation; the model is as it is."""
    optimizer_state["optimizer"].gather()
    return optimizer_state, current_param_container, model_state


def data_selection(
    workload: spec.Workload,
    input_queue: Iterator[dict[str, Any]],
    optimizer_state: spec.OptimizerState,
    current_param_container: spec.ParameterContainer,
    model_state: spec.ModelAuxiliaryState,
    hyperparameters: spec.Hyperparameters,
    global_step: int,
    rng: spec.RandomState,
) -> dict[str, Tensor]:
    """Return the next batch."""
    return next(input_queue)
