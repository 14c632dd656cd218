"""Magnetic-resonance slices with undersampled k-space: fastMRI's HDF5, or magnitude images."""

from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from eshampoo.lab.data import Batch, seeded
from eshampoo.lab.errors import UserError, missing_data

ORIGIN = (
    "fastMRI (fastmri.med.nyu.edu: folders singlecoil_train and singlecoil_val, or multicoil) or a"
    " .npz with images [N, H, W] and is_test [N]"
)
ACCELERATION = 4
CENTRE = 0.08  # share of the columns in the middle that are always measured


def inverse_transform(k_space: Tensor) -> Tensor:
    """Return the image of centred k-space by an orthonormal Fourier transform."""
    shifted = torch.fft.ifftshift(k_space, dim=(-2, -1))
    image: Tensor = torch.fft.fftshift(torch.fft.ifft2(shifted, norm="ortho"), dim=(-2, -1))
    return image


def transform(image: Tensor) -> Tensor:
    """Return the centred k-space of an image by an orthonormal Fourier transform."""
    shifted = torch.fft.ifftshift(image, dim=(-2, -1))
    k_space: Tensor = torch.fft.fftshift(torch.fft.fft2(shifted, norm="ortho"), dim=(-2, -1))
    return k_space


def column_mask(columns: int, generator: torch.Generator) -> Tensor:
    """Draw fastMRI's random mask: the centre, and other columns so that a quarter is measured."""
    low = round(columns * CENTRE)
    chance = (columns / ACCELERATION - low) / (columns - low)
    mask = torch.rand(columns, generator=generator) < chance
    start = (columns - low + 1) // 2
    mask[start : start + low] = True
    return mask


def centre_crop(image: Tensor, size: int) -> Tensor:
    """Return the middle of an image, at most ``size`` on each side."""
    height, width = (min(size, side) for side in image.shape[-2:])
    top, left = (image.shape[-2] - height) // 2, (image.shape[-1] - width) // 2
    return image[..., top : top + height, left : left + width]


class Slices(Protocol):
    """Fully sampled k-space and the image to reconstruct, by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class MagnitudeSlices:
    """Images in memory; a Fourier transform simulates their k-space."""

    images: Tensor  # [N, H, W] uint8

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index].float() / 255
        return transform(image), image


@dataclass(frozen=True)
class FileSlices:
    """Slices of fastMRI volumes, read from their files when needed."""

    where: tuple[tuple[Path, int], ...]

    def __len__(self) -> int:
        return len(self.where)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        import h5py  # type: ignore[import-untyped]

        path, number = self.where[index]
        try:
            with h5py.File(path) as opened:
                file: Any = opened
                k_space = torch.from_numpy(np.asarray(file["kspace"][number]))
                target = torch.from_numpy(np.asarray(file[reconstruction(opened)][number]))
                return k_space, target.float()
        except (OSError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise damaged(path, error) from error


@dataclass(frozen=True)
class MriData:
    """Batches of (zero-filled image, target, mean, deviation, peak), normalised per slice."""

    train: Slices
    test: Slices
    size: int
    outputs: int = 1

    def __len__(self) -> int:
        return len(self.train)

    def batch(self, indices: Tensor, generator: torch.Generator) -> Batch:
        return self.collated([self.example(self.train, int(i), generator) for i in indices])

    def validation(self) -> Iterator[Batch]:
        # small batches stay in the cache: eight slices take a fifth less time than 32
        for start in range(0, len(self.test), 8):
            numbers = range(start, min(start + 8, len(self.test)))
            # a slice of the validation set always has the same mask
            yield self.collated([self.example(self.test, i, seeded(i)) for i in numbers])

    def example(self, slices: Slices, index: int, generator: torch.Generator) -> Batch:
        """Return one slice, with columns of k-space removed."""
        k_space, target = slices[index]
        masked = k_space * column_mask(k_space.shape[-1], generator)
        image = inverse_transform(masked).abs()
        if image.ndim == 3:
            image = image.square().sum(0).sqrt()  # root of the sum of squares over the coils
        image, target = centre_crop(image, self.size), centre_crop(target, self.size)
        mean, std = image.mean(), image.std() + 1e-11
        return (image - mean) / std, (target - mean) / std, mean, std, target.max()

    @staticmethod
    def collated(examples: list[Batch]) -> Batch:
        """Stack examples, with a channel added to their images."""
        image, target, mean, std, peak = (torch.stack(part) for part in zip(*examples, strict=True))
        return image[:, None], target[:, None], mean, std, peak


def locate_mri(path: Path | None) -> Path:
    """Find the .npz or the folder of fastMRI at ``path``, or the first one inside it."""
    if path is not None and path.suffix == ".npz" and path.is_file():
        return path
    if path is not None and path.is_dir():
        if list(path.glob("*_train/*.h5")) and list(path.glob("*_val/*.h5")):
            return path
        for found in sorted(path.glob("*mri*.npz")):
            return found
    raise missing_data("MRI data", path, f"{ORIGIN} and give it")


def load_mri(path: Path | None, *, size: int) -> MriData:
    """Load magnetic-resonance slices, cropped to ``size`` px."""
    source = locate_mri(path)
    if source.suffix == ".npz":
        images, held_out = read_magnitudes(source)
        return MriData(MagnitudeSlices(images[~held_out]), MagnitudeSlices(images[held_out]), size)
    return MriData(volume_slices(source, "train"), volume_slices(source, "val"), size)


def read_magnitudes(source: Path) -> tuple[Tensor, Tensor]:
    """Read the images of an .npz, and which of them are held out."""
    try:
        with open(source, "rb") as file, np.load(file) as arrays:
            images, test = torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["is_test"])
        if images.ndim != 3 or test.shape != images.shape[:1]:
            raise ValueError(f"images {[*images.shape]} and is_test {[*test.shape]}")
        if not 0 < int(test.bool().sum()) < len(test):
            raise ValueError("nothing to train on or nothing held out")
    except Exception as error:  # a damaged archive can fail in many ways
        raise UserError(f"{source} is damaged or foreign: {error}; give {ORIGIN}") from error
    return images, test.bool()


def volume_slices(source: Path, split: str) -> FileSlices:
    """List all slices of the volumes of a split."""
    import h5py

    where: list[tuple[Path, int]] = []
    for path in sorted(source.glob(f"*_{split}/*.h5")):
        try:
            with h5py.File(path) as opened:
                file: Any = opened
                where += [(path, number) for number in range(len(file["kspace"]))]
        except (OSError, KeyError, TypeError) as error:
            raise damaged(path, error) from error
    return FileSlices(tuple(where))


def reconstruction(file: Container[str]) -> str:
    """Name the target of a volume: that of one coil, or that of many."""
    return "reconstruction_esc" if "reconstruction_esc" in file else "reconstruction_rss"


def damaged(path: Path, reason: object) -> UserError:
    """Return the error for a volume that cannot be used."""
    return UserError(f"{path} is not a fastMRI volume: {reason}; get it again")
