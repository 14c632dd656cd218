"""A callback for the Trainer of transformers."""

from typing import Any

import transformers
from torch.optim import Optimizer

from ..optimizer import EigenbasisOptimizer


class LogBases(transformers.TrainerCallback):
    """Log the report of the bases whenever the Trainer logs the loss.

    Args:
        trainer: the Trainer that you add the callback to. The callback needs it, because a
            Trainer does not tell its callbacks how to log.
    """

    def __init__(self, trainer: transformers.Trainer) -> None:
        self.trainer = trainer

    def on_log(
        self,
        args: transformers.TrainingArguments,
        state: transformers.TrainerState,
        control: transformers.TrainerControl,
        **kwargs: Any,  # noqa: ANN401 - the Trainer passes them
    ) -> None:
        """The Trainer calls this when it logs."""
        if "loss" not in kwargs["logs"]:  # an evaluation, the summary, or the report itself
            return
        # Accelerate wraps the optimizer while it trains.
        optimizer: Optimizer = getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"])
        if isinstance(optimizer, EigenbasisOptimizer):
            self.trainer.log(optimizer.basis_report().scalars())
