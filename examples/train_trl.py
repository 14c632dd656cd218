"""Fine-tuning with TRL: supervised, and with rewards (GRPO).

    python examples/train_trl.py

The model is a tiny Llama with random weights, and the words are letters: nothing is downloaded.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import (  # pyright: ignore[reportMissingImports]
    GRPOConfig,
    GRPOTrainer,
    SFTConfig,
    SFTTrainer,
)

from eshampoo import EShampoo
from eshampoo.integrations.transformers import LogBases

LETTERS = "abcdefghij"
WORDS = {word: number for number, word in enumerate(["<pad>", "<end>", *LETTERS])}


def small_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel(WORDS, unk_token="<pad>"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<end>", padding_side="left"
    )


def shared(folder: Path, steps: int) -> dict[str, Any]:
    """Arguments of both trainers."""
    return {
        "output_dir": str(folder),
        "max_steps": steps,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
        "logging_steps": steps // 4,
        "report_to": [],
        "disable_tqdm": True,
        "bf16": False,
        "use_cpu": not torch.cuda.is_available(),
    }


def supervised(folder: Path) -> list[float]:
    """Learn to count in letters; the losses."""
    lines = [" ".join(LETTERS[(start + i) % 10] for i in range(12)) for start in range(10)]
    model = small_model()
    trainer = SFTTrainer(
        model,
        args=SFTConfig(**shared(folder, 40), max_length=16),
        train_dataset=Dataset.from_dict({"text": lines * 8}),
        processing_class=tokenizer(),
        optimizers=(EShampoo(model.named_parameters(), lr=1e-2), None),
    )
    trainer.add_callback(LogBases(trainer))
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def count_of_a(completions: list[str], **_: Any) -> list[float]:  # noqa: ANN401
    return [float(text.count("a")) for text in completions]


def with_rewards(folder: Path) -> list[float]:
    """Learn to say "a"; the mean rewards."""
    model = small_model()
    trainer = GRPOTrainer(
        model,
        count_of_a,
        args=GRPOConfig(**shared(folder, 24), num_generations=4, max_completion_length=8),
        train_dataset=Dataset.from_dict({"prompt": ["a b c", "d e"] * 64}),
        processing_class=tokenizer(),
        optimizers=(EShampoo(model.named_parameters(), lr=1e-2), None),
    )
    trainer.train()
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        losses, rewards = supervised(Path(folder)), with_rewards(Path(folder))
    print(f"SFT: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    print(f"GRPO: reward {rewards[0]:.2f} -> {rewards[-1]:.2f}")
    assert rewards[-1] > 1.5 * rewards[0]


if __name__ == "__main__":
    main()
