"""Workloads that predict the next token of a text."""

from dataclasses import replace
from functools import partial

from eshampoo.lab import objectives
from eshampoo.lab.data import text
from eshampoo.lab.models.llama import Llama
from eshampoo.lab.workloads import Setting, Workload, options

language_model = partial(
    Workload,
    loss=objectives.cross_entropy,
    sampled=objectives.sampled_cross_entropy,
    metric=objectives.validation_loss,
    metric_name="validation loss",
    trivial=objectives.unigram_loss,
    higher_is_better=False,
)

TEXT_LLAMA = language_model(
    name="text-llama",
    title="Llama 3 architecture on text",
    origin=text.ORIGIN,
    locate=text.locate_text,
    settings={
        "tiny": Setting(
            model=partial(Llama, width=16, depth=1, heads=2, key_heads=1, hidden=32, length=16),
            data=partial(text.load_text, vocabulary=300, length=16),
            steps=10,
            batch=4,
            options=options(3e-3, 0.1, 0.95),
        ),
        "small": Setting(
            model=partial(Llama, width=128, depth=4, heads=4, key_heads=2, hidden=352, length=128),
            data=partial(text.load_text, vocabulary=2048, length=128),
            steps=600,
            batch=16,
            options=options(3e-3, 0.1, 0.95),
            evaluations=2,
        ),
        # the paper gives 324 million parameters and no other dimension of its model
        "paper": Setting(
            model=partial(
                Llama, width=1024, depth=22, heads=16, key_heads=8, hidden=2784, length=2048
            ),
            data=partial(text.load_text, vocabulary=32_768, length=2048),
            steps=12_500,
            batch=128,
            options=options(6e-4, 0.1, 0.95),
        ),
    },
)

TEXT_LLAMA_12M = replace(
    TEXT_LLAMA,
    name="text-llama-12m",
    title="Llama 3 architecture with 12 million parameters",
    settings={
        **TEXT_LLAMA.settings,
        "small": Setting(
            model=partial(Llama, width=320, depth=8, heads=5, key_heads=5, hidden=864, length=128),
            data=partial(text.load_text, vocabulary=4096, length=128),
            steps=3000,
            batch=16,
            options=options(1e-3, 0.1, 0.95),
            evaluations=2,
            threads=1,
        ),
    },
)

TEXT_CHAR = language_model(
    name="text-char",
    title="Llama 3 architecture on characters",
    origin="Python's own documentation, or Tiny Shakespeare, any text file (--data)",
    locate=text.locate_characters,
    settings={
        "tiny": Setting(
            model=partial(Llama, width=16, depth=1, heads=2, key_heads=2, hidden=32, length=16),
            data=partial(text.load_characters, length=16),
            steps=10,
            batch=4,
            options=options(3e-3, 0.1, 0.99),
        ),
        # the size of the small GPTs that people train on a CPU, which reach about 1.88
        "small": Setting(
            model=partial(Llama, width=128, depth=4, heads=4, key_heads=4, hidden=352, length=64),
            data=partial(text.load_characters, length=64),
            steps=2000,
            batch=12,
            options=options(3e-3, 0.1, 0.99),
            threads=1,
        ),
        "paper": Setting(
            model=partial(Llama, width=384, depth=6, heads=6, key_heads=6, hidden=1024, length=256),
            data=partial(text.load_characters, length=256),
            steps=5000,
            batch=64,
            options=options(1e-3, 0.1, 0.99),
        ),
    },
)
