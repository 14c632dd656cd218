"""Small data sets in the formats as published, made on the spot."""

import csv
import gzip
import io
import json
import tarfile

import numpy as np

WNIDS = ("n02086240", "n02087394")


def imagewoof_folder(directory, per_class=12):
    """train/<wnid>/*.JPEG and val/<wnid>/*.JPEG: light and dark noise."""
    from PIL import Image

    rng = np.random.default_rng(0)
    root = directory / "imagewoof2"
    for split in ("train", "val"):
        for label, wnid in enumerate(WNIDS):
            folder = root / split / wnid
            folder.mkdir(parents=True)
            for number in range(per_class):
                low = 120 * label
                pixels = rng.integers(low, low + 100, (24, 30, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{wnid}_{number}.JPEG")
    return root


def imagewoof_tar(directory):
    """The same as a tgz."""
    root = imagewoof_folder(directory / "unpacked")
    path = directory / "imagewoof2.tgz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(root, arcname="imagewoof2")
    return path


def fastmri_folder(directory, size=40, slices=4):
    """singlecoil_train/*.h5 and singlecoil_val/*.h5 with kspace and reconstruction_esc."""
    import h5py

    rng = np.random.default_rng(0)
    y, x = np.mgrid[-1 : 1 : size * 1j, -1 : 1 : size * 1j]
    for split in ("train", "val"):
        folder = directory / f"singlecoil_{split}"
        folder.mkdir(parents=True)
        for volume in range(2):
            radius = rng.uniform(0.3, 0.9, (slices, 1, 1))
            images = (x**2 + y**2 < radius**2).astype(np.float32) + 0.1 * (x > 0)
            axes = (-2, -1)
            shifted = np.fft.ifftshift(images, axes)
            k_space = np.fft.fftshift(np.fft.fft2(shifted, norm="ortho"), axes)
            with h5py.File(folder / f"file{volume}.h5", "w") as file:
                file["kspace"] = k_space.astype(np.complex64)
                file["reconstruction_esc"] = images.astype(np.float32)
    return directory


SMILES = ("CCO", "c1ccccc1", "CC(=O)O", "CCN", "C1CCCCC1", "CC(C)O", "c1ccncc1", "CCCl", "C#N", "O")


def molecule_rows(repeats=3):
    """SMILES with two tasks: aromatic, and one that is mostly unknown."""
    for number in range(repeats):
        for smiles in SMILES:
            yield smiles, int("c1" in smiles), "" if number else int("O" in smiles)


def moleculenet_csv(directory):
    """smiles first, then one column per task, gzipped, with a row that no chemist can read."""
    path = directory / "toxcast_data.csv.gz"
    with gzip.open(path, "wt", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["smiles", "task_a", "task_b"])
        writer.writerows(molecule_rows())
        writer.writerow(["not a molecule", 1, 1])
    return path


def ogb_folder(directory):
    """mapping/mol.csv.gz (tasks, smiles, mol_id) and split/scaffold/*.csv.gz."""
    root = directory / "ogbg_molpcba"
    (root / "mapping").mkdir(parents=True)
    (root / "split" / "scaffold").mkdir(parents=True)
    rows = list(molecule_rows())
    with gzip.open(root / "mapping" / "mol.csv.gz", "wt", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["task_a", "task_b", "smiles", "mol_id"])
        writer.writerows([(a, b, smiles, f"CID{i}") for i, (smiles, a, b) in enumerate(rows)])
    for name, numbers in (("train", range(20)), ("valid", range(20, 30)), ("test", range(5))):
        with gzip.open(root / "split" / "scaffold" / f"{name}.csv.gz", "wt") as file:
            file.write("\n".join(map(str, numbers)) + "\n")
    return root


def sentences(count):
    """English of a kind."""
    rng = np.random.default_rng(0)
    words = [
        "the",
        "a",
        "dog",
        "cat",
        "sees",
        "likes",
        "old",
        "small",
        "house",
        "and",
        "then",
        "runs",
        "to",
        "from",
        "under",
    ]
    return [" ".join(rng.choice(words, 12)) + ".\n" for _ in range(count)]


def wikitext_folder(directory):
    """wiki.train.raw and wiki.valid.raw."""
    root = directory / "wikitext-2-raw"
    root.mkdir(parents=True)
    (root / "wiki.train.raw").write_text("".join(sentences(200)))
    (root / "wiki.valid.raw").write_text("".join(sentences(40)))
    return root


def c4_lines(directory, fields=("text",)):
    """One JSON document per line."""
    path = directory / "c4.jsonl"
    buffer = io.StringIO()
    for sentence in sentences(300):
        parts = [sentence] if len(fields) == 1 else [sentence[:20], sentence[20:]]
        buffer.write(json.dumps(dict(zip(fields, parts, strict=True))) + "\n")
    path.write_text(buffer.getvalue())
    return path


def text_file(directory):
    """A plain text file, gzipped."""
    path = directory / "book.txt.gz"
    path.write_bytes(gzip.compress("".join(sentences(300)).encode()))
    return path


MAKERS = {
    "digits-vit": lambda directory: None,
    "imagewoof-vit": imagewoof_tar,
    "imagewoof-vit-bare": imagewoof_folder,
    "imagewoof-convnext": imagewoof_folder,
    "mri-unet": fastmri_folder,
    "molecules-gnn": moleculenet_csv,
    "text-llama": c4_lines,
    "text-char": text_file,
    "pinn-poisson": lambda directory: None,
    "pinn-convection": lambda directory: None,
}
