"""A callback for Lightning."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from ..optimizer import EigenbasisOptimizer
from ..report import BasisReport


class LogBases(Callback):
    """Send the report of the bases to every logger of the Trainer, at regular intervals.

    Args:
        every: the number of optimizer steps between two reports.
    """

    def __init__(self, every: int = 100) -> None:
        self.every = every
        self.last = 0  # optimizer steps after the last batch

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,  # noqa: ANN401 - as Lightning declares them
        batch: Any,  # noqa: ANN401
        batch_idx: int,
    ) -> None:
        """Lightning calls this after every batch; several may make one step of the optimizer."""
        before, self.last = self.last, trainer.global_step
        if self.last in (0, before) or self.last % self.every:
            return
        report = BasisReport(
            row
            for optimizer in trainer.optimizers
            if isinstance(optimizer, EigenbasisOptimizer)
            for row in optimizer.basis_report()
        )
        for logger in trainer.loggers:
            logger.log_metrics(report.scalars(), step=trainer.global_step)
