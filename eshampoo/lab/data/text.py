"""Text as tokens: WikiText, C4's JSON lines, any text file, or what ships with Python."""

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eshampoo.lab.data import Batch
from eshampoo.lab.data.cache import cached
from eshampoo.lab.errors import UserError

ORIGIN = "Python's own documentation, or WikiText-2 raw, C4 as JSON lines, a .txt file (--data)"
VALIDATION_WINDOWS = 512  # this many windows give a loss to two decimals
END = "<|end_of_text|>"


@dataclass(frozen=True)
class TextData:
    """A stream of tokens cut into windows of ``length``; the target is the next token."""

    train: Tensor  # [tokens]
    test: Tensor
    length: int
    outputs: int  # size of the vocabulary

    def __len__(self) -> int:
        return (len(self.train) - 1) // self.length

    def batch(self, indices: Tensor, generator: torch.Generator) -> Batch:
        return self.windows(self.train, indices)

    def validation(self) -> Iterator[Batch]:
        count = min(VALIDATION_WINDOWS, (len(self.test) - 1) // self.length)
        for part in torch.split(torch.arange(count), 32):
            yield self.windows(self.test, part)

    def windows(self, tokens: Tensor, indices: Tensor) -> Batch:
        """Return windows by their numbers, and the same windows one token later."""
        positions = indices[:, None] * self.length + torch.arange(self.length)
        return tokens[positions], tokens[positions + 1]


def locate_text(path: Path | None) -> Path | None:
    """Find the corpus at ``path`` or inside it; None stands for the one that ships with Python."""
    if path is None:
        return None
    if path.is_file() or (path.is_dir() and wiki_files(path)):
        return path
    if path.is_dir():
        for folder in sorted(path.glob("wikitext*")):
            if wiki_files(folder):
                return folder
        for pattern in ("*.jsonl*", "*.json.gz", "*.txt"):
            for found in sorted(path.glob(pattern)):
                return found
    raise UserError(f"no text at {path}: give {ORIGIN}, or no --data at all")


def wiki_files(folder: Path) -> dict[str, Path]:
    """Find the training and validation files of WikiText (wiki.train.raw), compressed or not."""
    found: dict[str, Path] = {}
    for split in ("train", "valid"):
        for pattern in (f"wiki.{split}.*", f"{split}.raw*", f"{split}.txt*"):
            for file in sorted(folder.glob(pattern)):
                found.setdefault(split, file)
    return found if len(found) == 2 else {}


def load_text(path: Path | None, *, vocabulary: int, length: int) -> TextData:
    """Load a corpus as tokens, with a BPE tokenizer trained on its training part."""
    source = locate_text(path)
    train, test = corpus(source)
    digest = hashlib.sha256("\0".join([*train, "", *test]).encode()).hexdigest()[:16]
    arrays = cached(f"text-{vocabulary}-{digest}", lambda: tokenised(train, test, vocabulary))
    check_lengths(arrays["train"], arrays["test"], length, "tokens")
    return TextData(arrays["train"], arrays["test"], length, int(arrays["vocabulary"]))


def check_lengths(train: Tensor, test: Tensor, length: int, unit: str) -> None:
    """Refuse a text that is shorter than one window."""
    for part, stream in (("training", train), ("validation", test)):
        if len(stream) <= length:
            raise UserError(
                f"the {part} text has {len(stream)} {unit}, not more than the window of {length};"
                " give more text or a smaller --scale"
            )


def load_characters(path: Path | None, *, length: int) -> TextData:
    """Load a corpus as characters; those that the training part lacks share the last number."""
    source = locate_characters(path)
    train, test = ("\n".join(documents) for documents in corpus(source))
    alphabet = sorted({*train})
    numbers = {character: number for number, character in enumerate(alphabet)}
    streams = [
        torch.tensor([numbers.get(character, len(alphabet)) for character in part])
        for part in (train, test)
    ]
    check_lengths(streams[0], streams[1], length, "characters")
    return TextData(streams[0], streams[1], length, len(alphabet) + 1)


def locate_c4(path: Path | None) -> Path | None:
    """Find C4 as JSON lines in a folder, or any other text as ``locate_text`` does."""
    if path is not None and path.is_dir():
        for found in sorted(path.glob("*c4*.json*")):
            return found
    return locate_text(path)


def locate_characters(path: Path | None) -> Path | None:
    """Find Tiny Shakespeare in a folder, or any other text as ``locate_text`` does."""
    if path is not None and path.is_dir():
        for found in sorted(path.glob("*shakespeare*.txt*")):
            return found
    return locate_text(path)


def corpus(source: Path | None) -> tuple[list[str], list[str]]:
    """Return the documents for training and those for validation."""
    if source is None:
        return split(python_documentation())
    if source.is_dir():
        files = wiki_files(source)
        return [read(files["train"])], [read(files["valid"])]
    if ".json" in source.name:
        return split(json_documents(source))
    text = read(source)
    cut = len(text) * 9 // 10
    return [text[:cut]], [text[cut:]]


def split(documents: list[str]) -> tuple[list[str], list[str]]:
    """Keep every tenth document for validation."""
    return [d for i, d in enumerate(documents) if i % 10], documents[::10]


def read(path: Path) -> str:
    """Read a text file, compressed or not."""
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
        if not text:
            raise EOFError("it is empty")
        return text
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not readable text: {error}; give {ORIGIN}") from error


def json_documents(path: Path) -> list[str]:
    """Read one document per line: its ``text``, or ``prefix`` and ``gold_completion`` joined."""
    documents = []
    # texts may hold other line breaks, which splitlines() would cut at
    for number, line in enumerate(read(path).removesuffix("\n").split("\n"), 1):
        try:
            record = json.loads(line)
            fields = ("text",) if "text" in record else ("prefix", "gold_completion")
            documents.append("".join(record[field] for field in fields))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path}, line {number}: not JSON with a 'text' field ({error}); give {ORIGIN}"
            ) from error
    return documents


def python_documentation() -> list[str]:
    """Return the language reference behind Python's ``help()``, about 700 kB of English."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def tokenised(train: list[str], test: list[str], vocabulary: int) -> dict[str, Tensor]:
    """Return the tokens of both parts, with an end token between documents."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # the tokenizer works on lines in parallel; a corpus in one string would be a single task
    tokenizer.train_from_iterator((line for text in train for line in lines(text)), trainer)
    streams = {}
    for name, documents in (("train", train), ("test", test)):
        stream: list[int] = []
        for document in documents:
            for encoding in tokenizer.encode_batch(lines(document)):
                stream += encoding.ids
            stream += tokenizer.encode(END).ids
        streams[name] = torch.tensor(stream)
    return {**streams, "vocabulary": torch.tensor(tokenizer.get_vocab_size())}


def lines(text: str) -> list[str]:
    """Split a text into lines that keep their line breaks."""
    return text.splitlines(keepends=True)
