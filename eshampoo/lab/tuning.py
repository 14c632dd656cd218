"""Workloads that fine-tune: a small Llama knows one text, and goes on with another.

The first training belongs to the data. It is the same for every run, made once, and cached.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from eshampoo.lab import objectives
from eshampoo.lab.data import Dataset, batch_indices, seeded, text
from eshampoo.lab.data.cache import cached
from eshampoo.lab.language import language_model
from eshampoo.lab.models.llama import Llama
from eshampoo.lab.models.lora import adapt_
from eshampoo.lab.workloads import Setting, Start, Workload, options

BYTES = 256  # the vocabulary that all texts share
PEAK = 3e-3  # the learning rate of the first training
Shape = Mapping[str, int]


@dataclass(frozen=True)
class TunedText(text.TextData):
    """The bytes of a text, and the weights of a model that knows another one."""

    weights: Mapping[str, Tensor]


def load_tuned(path: Path | None, *, shape: Shape, steps: int, batch: int) -> TunedText:
    """Load the text to tune on; learn the first half of the other one, unless that is cached."""
    train, test = (as_bytes(part) for part in text.corpus(text.locate_characters(path)))
    known = as_bytes(text.corpus(text.locate_text(path))[0])
    known = known[: len(known) // 2]
    for part in (train, known):
        text.check_lengths(part, test, shape["length"], "bytes")
    mark = hashlib.sha256(known.numpy().tobytes())
    mark.update(repr((sorted(shape.items()), steps, batch)).encode())
    key = f"pretrained-{mark.hexdigest()[:16]}"
    weights = cached(key, lambda: pretrained(known.long(), shape, steps, batch))
    return TunedText(train.long(), test.long(), shape["length"], BYTES, weights)


def as_bytes(documents: list[str]) -> Tensor:
    """Return the bytes of documents, one after another."""
    return torch.frombuffer(bytearray("\n".join(documents).encode()), dtype=torch.uint8)


def pretrained(tokens: Tensor, shape: Shape, steps: int, batch: int) -> dict[str, Tensor]:
    """Train a Llama with AdamW from seed 0, and return its weights."""
    data = text.TextData(tokens, tokens, shape["length"], BYTES)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Llama(BYTES, **shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.99), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, PEAK, total_steps=steps, pct_start=0.05, cycle_momentum=False
    )
    for step in range(steps):
        windows = data.batch(batch_indices(len(data), batch, 0, step), seeded(0, step))
        loss = objectives.cross_entropy(model, windows)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    return dict(model.state_dict())


def with_weights(model: nn.Module, dataset: Dataset) -> nn.Module:
    """Start from the weights that came with the text; all of them are tuned."""
    assert isinstance(dataset, TunedText)
    model.load_state_dict(dataset.weights)
    return model


def with_adapters(model: nn.Module, dataset: Dataset, *, rank: int) -> nn.Module:
    """Start from the same weights, frozen, with low-rank adapters in all blocks."""
    with_weights(model, dataset)
    assert isinstance(model, Llama)
    adapt_(model, model.blocks, rank)
    return model


TINY: Shape = {"width": 16, "depth": 1, "heads": 2, "key_heads": 2, "hidden": 32, "length": 16}
SMALL: Shape = {"width": 128, "depth": 4, "heads": 4, "key_heads": 4, "hidden": 352, "length": 64}
LARGE: Shape = {"width": 384, "depth": 6, "heads": 6, "key_heads": 6, "hidden": 1024, "length": 256}


def tuned(name: str, title: str, start: Start, lr: float) -> Workload:
    """Return a workload that tunes a Llama of three sizes."""

    def setting(shape: Shape, before: int, steps: int, batch: int) -> Setting:
        return Setting(
            model=partial(Llama, **shape),
            data=partial(load_tuned, shape=shape, steps=before, batch=batch),
            steps=steps,
            batch=batch,
            options=options(lr, 0.1, 0.95),
            threads=1,
            start=start,
        )

    return language_model(
        name=name,
        title=title,
        origin="a folder with WikiText-2 and Tiny Shakespeare (--data), or Python's documentation",
        locate=text.locate_characters,
        settings={
            "tiny": setting(TINY, 5, 10, 4),
            "small": setting(SMALL, 500, 300, 12),
            "paper": setting(LARGE, 5000, 1000, 64),
        },
    )


TEXT_TUNE = tuned("text-tune", "fine-tuning of all weights", partial(with_weights), 1e-3)
TEXT_LORA = tuned("text-lora", "fine-tuning by LoRA", partial(with_adapters, rank=8), 3e-3)
