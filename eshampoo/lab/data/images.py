"""Images with class labels: Imagewoof as fastai publishes it, and scikit-learn's digits."""

import io
import lzma
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from eshampoo.lab.data import Batch, seeded
from eshampoo.lab.data.cache import cached, fingerprint
from eshampoo.lab.errors import UserError, missing_data

ORIGIN = "Imagewoof (github.com/fastai/imagenette: imagewoof2.tgz or its -160/-320 editions)"
SUFFIXES = (".jpeg", ".jpg", ".png")
MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


@dataclass(frozen=True)
class ImageData:
    """Images in memory as bytes; a training batch is cropped at random and flipped."""

    train: Tensor  # [N, C, stored, stored] uint8
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    size: int
    outputs: int
    flip: bool
    mean: Tensor
    std: Tensor

    def __len__(self) -> int:
        return len(self.train)

    def batch(self, indices: Tensor, generator: torch.Generator) -> Batch:
        count, margin = len(indices), self.train.shape[-1] - self.size + 1
        window = torch.arange(self.size)
        top = torch.randint(margin, (count, 1), generator=generator)
        left = torch.randint(margin, (count, 1), generator=generator)
        if self.flip:
            mirrored = torch.rand(count, 1, generator=generator) < 0.5
            columns = torch.where(mirrored, left + window.flip(0), left + window)
        else:
            columns = left + window
        rows = (top + window)[:, :, None]
        # indexing by tensors on both sides of a slice puts the sliced channels last
        crops = self.train[indices[:, None, None], :, rows, columns[:, None, :]]
        return self.normalised(crops.permute(0, 3, 1, 2)), self.train_labels[indices]

    def validation(self) -> Iterator[Batch]:
        start = (self.test.shape[-1] - self.size) // 2
        centre = slice(start, start + self.size)
        for part in torch.split(torch.arange(len(self.test)), 500):
            yield self.normalised(self.test[part][:, :, centre, centre]), self.test_labels[part]

    def normalised(self, images: Tensor) -> Tensor:
        """Return bytes as floats of mean 0 and deviation 1 per channel."""
        return ((images.float() / 255 - self.mean) / self.std).contiguous()


def locate_imagewoof(path: Path | None) -> Path:
    """Find the tar, tgz or folder at ``path``, or the first one inside it."""
    if path is not None:
        for found in [path, *sorted(path.glob("imagewoof*"))] if path.is_dir() else [path]:
            if found.is_file() and ".t" in found.name:
                return found
            if (found / "train").is_dir() and (found / "val").is_dir():
                return found
    source = f"{ORIGIN} and give the tar, or the folder with train/ and val/,"
    raise missing_data("Imagewoof", path, source)


def load_imagewoof(path: Path | None, *, size: int, stored: int) -> ImageData:
    """Load Imagewoof as squares of ``stored`` px, for random crops of ``size`` px."""
    source = locate_imagewoof(path)
    arrays = cached(f"imagewoof-{stored}-{fingerprint(source)}", lambda: decode(source, stored))
    return ImageData(
        train=arrays["train"],
        train_labels=arrays["train_labels"],
        test=arrays["val"],
        test_labels=arrays["val_labels"],
        size=size,
        outputs=int(arrays["train_labels"].max()) + 1,
        flip=True,
        mean=MEAN,
        std=STD,
    )


def members(source: Path) -> Iterator[tuple[str, bytes]]:
    """Go through the images of a folder or tar as (``split/class/file``, content)."""
    if source.is_dir():
        for file in sorted(source.rglob("*")):
            if is_image(file.name) and file.is_file():
                yield "/".join(file.parts[-3:]), file.read_bytes()
        return
    try:
        with tarfile.open(source) as archive:
            for member in archive:
                *folders, name = member.name.split("/")
                content = archive.extractfile(member) if member.isfile() else None
                if content is not None and is_image(name):
                    yield "/".join([*folders[-2:], name]), content.read()
    except (tarfile.TarError, OSError, EOFError, zlib.error, lzma.LZMAError, ValueError) as error:
        raise UserError(f"{source} is not a readable tar: {error}; get {ORIGIN} again") from error


def is_image(name: str) -> bool:
    """Recognise images by their names; macOS keeps files with a leading dot beside them."""
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


def decode(source: Path, stored: int) -> dict[str, Tensor]:
    """Decode, resize and crop every image; classes are numbered by their sorted folder names."""
    images: dict[str, list[np.ndarray]] = {"train": [], "val": []}
    folders: dict[str, list[str]] = {"train": [], "val": []}
    for name, content in members(source):
        split, *within = name.split("/")
        if split in images and len(within) == 2:
            try:
                images[split].append(square(content, stored))
            except Exception as error:  # decoders can fail in many ways
                raise UserError(
                    f"{source}: {name} is not a readable image: {error}; get {ORIGIN} again"
                ) from error
            folders[split].append(within[0])
    for split in images:
        if not images[split]:
            raise UserError(f"{source} has no images in {split}/<class>/; get {ORIGIN} again")
    classes = {folder: index for index, folder in enumerate(sorted(set(folders["train"])))}
    if unknown := set(folders["val"]) - classes.keys():
        raise UserError(f"{source}: train/ has no class {min(unknown)!r} of val/; get {ORIGIN}")
    arrays = {}
    for split in images:
        arrays[split] = torch.from_numpy(np.stack(images[split])).permute(0, 3, 1, 2).contiguous()
        arrays[f"{split}_labels"] = torch.tensor([classes[folder] for folder in folders[split]])
    return arrays


def square(content: bytes, size: int) -> np.ndarray:
    """Return the centre square of an image, with its shorter side at ``size`` px, as RGB bytes."""
    from PIL import Image

    with Image.open(io.BytesIO(content)) as opened:
        # the JPEG decoder halves the resolution for free, and stays above the wanted size
        opened.draft("RGB", (size, size))
        image = opened.convert("RGB")
    width, height = image.size
    short = min(width, height)
    left, top = (width - short) // 2, (height - short) // 2
    box = (left, top, left + short, top + short)
    return np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, box=box))


def load_digits(path: Path | None) -> ImageData:
    """Load scikit-learn's 1,797 digits (8×8, inside the package), with one in five held out."""
    from sklearn import datasets  # type: ignore[import-untyped]

    pixels, labels = datasets.load_digits(return_X_y=True)
    images = torch.from_numpy(pixels * (255 / 16)).round().to(torch.uint8).view(-1, 1, 8, 8)
    targets = torch.from_numpy(labels).long()
    order = torch.randperm(len(images), generator=seeded(0))
    test, train = order[: len(order) // 5], order[len(order) // 5 :]
    return ImageData(
        train=images[train],
        train_labels=targets[train],
        test=images[test],
        test_labels=targets[test],
        size=8,
        outputs=10,
        flip=False,
        mean=torch.tensor(0.3),
        std=torch.tensor(0.35),
    )


def locate_digits(path: Path | None) -> None:
    """Find nothing, because the digits come with scikit-learn."""
