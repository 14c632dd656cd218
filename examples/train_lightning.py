"""Lightning: automatic and manual optimization, one process or DDP.

python examples/train_lightning.py
torchrun --standalone --nproc-per-node 2 examples/train_lightning.py
"""

import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from eshampoo import EShampoo
from eshampoo.integrations.lightning import LogBases

Batch = list[Tensor]


class Automatic(lightning.LightningModule):
    """Lightning calls backward() and step()."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 80), nn.GELU(), nn.Linear(80, 16))
        self.losses: list[float] = []

    def training_step(self, batch: Batch, *_: Any) -> Tensor:  # noqa: ANN401
        x, y = batch
        loss: Tensor = (self.net(x) - y).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # With DDP, this lets the ranks share work and state; otherwise each rank does all the work.
        group = dist.group.WORLD if dist.is_initialized() else None
        return EShampoo(self.named_parameters(), lr=1e-2, process_group=group)


class Manual(Automatic):
    """You call backward() and step()."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, *_: Any) -> Tensor:  # noqa: ANN401
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)  # there is one
        loss = super().training_step(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


def loader() -> DataLoader[tuple[Tensor, ...]]:
    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(0))
    y = torch.sin(x) + x.roll(1, dims=1)
    return DataLoader(TensorDataset(x, y), batch_size=32)


def make_trainer(epochs: int, folder: Path) -> lightning.Trainer:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    report = LogBases(every=10)  # sends criteria and counts to every logger
    return lightning.Trainer(
        max_epochs=epochs,
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        callbacks=[report, ModelCheckpoint(folder, "{epoch}", save_top_k=-1)],
        logger=CSVLogger(folder),
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        for kind in (Automatic, Manual):
            trainer, module = make_trainer(10, Path(folder, kind.__name__)), kind()
            # Pass ckpt_path=… to continue from a checkpoint, bit for bit.
            trainer.fit(module, loader())
            if trainer.is_global_zero:
                losses = module.losses
                print(f"{kind.__name__}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
