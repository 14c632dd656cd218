"""The Trainer of transformers: you build the optimizer, or the Trainer does.

    python examples/train_trainer.py

The model is a tiny GPT-2 with random weights, so nothing is downloaded.
"""

import tempfile
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from eshampoo import EShampoo, name_parameters
from eshampoo.integrations.transformers import LogBases

TOKENS = 32


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count upwards from a random start."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (7 * index + torch.arange(16)) % TOKENS
        return {"input_ids": tokens, "labels": tokens}


def small_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=TOKENS, n_positions=16, n_embd=32, n_layer=1, n_head=2)
    )


def arguments(folder: Path, steps: int) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=32,
        learning_rate=1e-2,
        weight_decay=0.01,
        save_steps=steps // 2,
        logging_steps=steps // 2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )


def with_an_optimizer(folder: Path, steps: int) -> Trainer:
    """You build the optimizer; the Trainer makes the schedule."""
    model = small_model()
    optimizer = EShampoo(model.named_parameters(), lr=1e-2)
    trainer = Trainer(
        model=model,
        args=arguments(folder, steps),
        train_dataset=Counting(),
        optimizers=(optimizer, None),
    )
    trainer.add_callback(LogBases(trainer))  # logs criteria and counts beside the loss
    return trainer


def with_a_class(folder: Path, steps: int) -> Trainer:
    """The Trainer builds the optimizer, with its two groups: with and without weight decay."""
    model, args = small_model(), arguments(folder, steps)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=Counting(),
        # The Trainer does not add args.learning_rate to the dictionary, so give lr yourself.
        optimizer_cls_and_kwargs=(EShampoo, {"lr": args.learning_rate}),
    )
    # The groups hold bare parameters. This line gives them names for basis_report().
    name_parameters(trainer.create_optimizer(), model)
    return trainer


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for make in (with_an_optimizer, with_a_class):
            trainer = make(Path(folder, make.__name__), 40)
            trainer.train()
            losses = [
                float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry
            ]
            print(f"{make.__name__}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
