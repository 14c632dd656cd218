"""Data that are damaged or foreign get one line; what is loaded is what was published."""

import gzip
import io
import random
import shutil
import tarfile
from functools import partial

import made_data
import numpy as np
import pytest
import torch

from eshampoo.lab.cli import main
from eshampoo.lab.data import images, molecules, mri, text
from eshampoo.lab.errors import UserError


def plain_tar(directory):
    """Imagewoof as a tar without compression."""
    path = directory / "imagewoof2.tar"
    with tarfile.open(path, "w") as archive:
        archive.add(made_data.imagewoof_folder(directory / "unpacked", 2), arcname="imagewoof2")
    return path


def small_tgz(directory):
    path = directory / "imagewoof2.tgz"
    path.write_bytes(gzip.compress(plain_tar(directory).read_bytes()))
    return path


def magnitudes(directory):
    """MRI as one .npz."""
    path = directory / "brain_mri.npz"
    pixels = np.random.default_rng(0).integers(0, 255, (6, 16, 16), dtype=np.uint8)
    np.savez_compressed(path, images=pixels, is_test=np.arange(6) > 3)
    return path


LOADERS = {
    "tgz": (small_tgz, lambda path: images.load_imagewoof(path, size=16, stored=18)),
    "npz": (magnitudes, lambda path: mri.load_mri(path, size=16)),
    "csv.gz": (made_data.moleculenet_csv, molecules.load_molecules),
    "txt.gz": (made_data.text_file, lambda path: text.load_text(path, vocabulary=300, length=8)),
}


def content_of(data):
    """Everything that a data set holds, as bytes."""
    found = []
    for value in vars(data).values():
        value = value.images if isinstance(value, mri.MagnitudeSlices) else value
        found.append(value.numpy().tobytes() if isinstance(value, torch.Tensor) else value)
    return found


@pytest.mark.parametrize(("make", "load"), LOADERS.values(), ids=LOADERS)
def test_a_truncated_archive_is_refused(make, load, tmp_path):
    path = make(tmp_path)
    whole = path.read_bytes()
    load(path)
    for share in (0, 0.01, 0.3, 0.6, 0.9, 0.99):
        path.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(UserError, match=path.name):
            load(path)


@pytest.mark.parametrize(("make", "load"), LOADERS.values(), ids=LOADERS)
def test_a_flipped_bit_in_an_archive_is_refused_or_changes_nothing(make, load, tmp_path):
    """A bit of a date or a name may flip; none that is content."""
    path = make(tmp_path)
    whole, expected = path.read_bytes(), content_of(load(path))
    refused = 0
    for bit in random.Random(0).sample(range(8 * len(whole)), 12):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        try:
            found = load(path)
        except UserError:
            refused += 1
        else:
            assert content_of(found) == expected
    assert refused > 6


def test_a_flipped_bit_in_the_cache_is_noticed(tmp_path):
    source = made_data.imagewoof_folder(tmp_path, 2)
    expected = images.load_imagewoof(source, size=16, stored=18)
    (stored,) = (tmp_path / "cache").glob("*.pt")
    content = bytearray(stored.read_bytes())
    content[content.index(expected.train.numpy().tobytes())] ^= 1
    stored.write_bytes(content)
    assert torch.equal(images.load_imagewoof(source, size=16, stored=18).train, expected.train)


def test_a_damaged_header_does_not_end_an_archive(tmp_path):
    """The reader of tar files takes it for the end, and would train on what came before."""
    path = plain_tar(tmp_path)
    content = bytearray(path.read_bytes())
    with tarfile.open(path) as archive:
        *_, last = archive
    content[last.offset + 10] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"imagewoof2\.tar is not a readable tar: a header"):
        images.load_imagewoof(path, size=16, stored=18)
    path.write_bytes(content[: last.offset])
    with pytest.raises(UserError, match=r"imagewoof2\.tar is not a readable tar: it ends"):
        images.load_imagewoof(path, size=16, stored=18)


@pytest.mark.parametrize("packed", [False, True])
def test_what_macos_keeps_beside_an_image_is_no_image(packed, tmp_path):
    root = made_data.imagewoof_folder(tmp_path, 2)
    for image in list(root.rglob("*.JPEG")):
        image.with_name(f"._{image.name}").write_bytes(b"\0\5\26\7 resource fork")
    source = root
    if packed:
        source = tmp_path / "imagewoof2.tgz"
        with tarfile.open(source, "w:gz") as archive:
            archive.add(root, arcname="imagewoof2")
    data = images.load_imagewoof(source, size=16, stored=18)
    assert (len(data.train), len(data.test)) == (4, 4)


def test_a_folder_with_a_broken_image_or_an_unknown_class_is_refused(tmp_path):
    root = made_data.imagewoof_folder(tmp_path, 2)
    image = next((root / "train").rglob("*.JPEG"))
    whole = image.read_bytes()
    for content in (b"", b"no image", whole[: len(whole) // 2]):
        image.write_bytes(content)
        with pytest.raises(UserError, match=f"{image.name} is not a readable image"):
            images.load_imagewoof(root, size=16, stored=18)
    image.write_bytes(whole)
    (root / "val" / made_data.WNIDS[0]).rename(root / "val" / "cats")
    with pytest.raises(UserError, match="no class 'cats'"):
        images.load_imagewoof(root, size=16, stored=18)


HEADER = "smiles,task_a,task_b\n"
BAD_TABLES = {
    "nothing": ("", "no column 'smiles'"),
    "no tasks": ("smiles\nCCO\n", "none for a task"),
    "a short row": (f"{HEADER}CCO,1,0\nCCN,1\n", "row 3: 2 cells where the header has 3"),
    "a long row": (f"{HEADER}CCO,1,0,1\n", "row 2: 4 cells"),
    "a word": (f"{HEADER}CCO,yes,0\n", "row 2: could not convert"),
    "a label of 7": (f"{HEADER}CCO,7,0\n", "neither 0 nor 1"),
    "too few": (f"{HEADER}CCO,1,0\n", "no molecules for training or for validation"),
}


@pytest.mark.parametrize(("content", "word"), BAD_TABLES.values(), ids=BAD_TABLES)
def test_a_ragged_table_of_molecules_is_refused(content, word, tmp_path):
    path = tmp_path / "tox21.csv"
    path.write_text(content)
    with pytest.raises(UserError, match=word):
        molecules.load_molecules(path)


def test_a_split_that_is_no_list_of_rows_is_refused(tmp_path):
    root = made_data.ogb_folder(tmp_path)
    split = root / "split" / "scaffold" / "train.csv.gz"
    for content in (b"a\nb\n", b"\n", b"1000000\n"):
        split.write_bytes(gzip.compress(content))
        with pytest.raises(UserError, match=r"not a list of row numbers|no molecules for training"):
            molecules.load_molecules(root)


PIXELS, HELD_OUT = np.zeros((4, 16, 16), np.uint8), np.arange(4) > 2
BAD_ARRAYS = {
    "other keys": {"pictures": PIXELS},
    "one key": {"images": PIXELS},
    "flat images": {"images": PIXELS[0], "is_test": HELD_OUT},
    "another count": {"images": PIXELS, "is_test": HELD_OUT[1:]},
    "objects": {"images": np.array([None] * 4), "is_test": HELD_OUT},
    "words": {"images": np.full((4, 16, 16), "x"), "is_test": HELD_OUT},
    "no images": {"images": PIXELS[:0], "is_test": HELD_OUT[:0]},
    "nothing held out": {"images": PIXELS, "is_test": HELD_OUT & False},
    "three pixels": {"images": PIXELS[:, :3, :3], "is_test": HELD_OUT},
    "not numbers": {"images": np.full((4, 16, 16), np.nan), "is_test": HELD_OUT},
}


@pytest.mark.parametrize("arrays", BAD_ARRAYS.values(), ids=BAD_ARRAYS)
def test_an_npz_of_something_else_is_refused(arrays, tmp_path):
    path = tmp_path / "mri.npz"
    np.savez(path, **arrays)
    with pytest.raises(UserError, match=r"mri\.npz is damaged or foreign"):
        mri.load_mri(path, size=16)


def test_one_array_under_the_name_of_an_npz_is_refused(tmp_path):
    buffer = io.BytesIO()
    np.save(buffer, PIXELS)
    (tmp_path / "mri.npz").write_bytes(buffer.getvalue())
    with pytest.raises(UserError, match=r"mri\.npz is damaged or foreign"):
        mri.load_mri(tmp_path, size=16)


SLICES = np.zeros((2, 24, 24), np.complex64)
BAD_VOLUMES = {
    "no target": ({"kspace": SLICES}, "reconstruction_rss"),
    "no k-space": ({"reconstruction_esc": SLICES.real}, "kspace"),
    "flat": ({"kspace": SLICES[0], "reconstruction_esc": SLICES[0].real}, "shape"),
    "real k-space": ({"kspace": SLICES.real, "reconstruction_esc": SLICES.real}, "shape"),
    "smaller target": ({"kspace": SLICES, "reconstruction_esc": SLICES.real[:, 4:]}, "shape"),
    "no pixels": ({"kspace": SLICES[:, :0], "reconstruction_esc": SLICES.real[:, :0]}, "smaller"),
    "fewer targets": ({"kspace": SLICES, "reconstruction_esc": SLICES.real[1:]}, "2 slices and 1"),
    "other slices": (
        {"kspace": SLICES[:, 4:], "reconstruction_esc": SLICES.real[:, 4:]},
        "another shape than those before",
    ),
}


@pytest.mark.parametrize(("content", "word"), BAD_VOLUMES.values(), ids=BAD_VOLUMES)
def test_a_volume_of_another_shape_is_refused(content, word, tmp_path):
    import h5py

    root = made_data.fastmri_folder(tmp_path, size=24, slices=2)
    path = root / "singlecoil_train" / "file1.h5"
    path.unlink()
    with h5py.File(path, "w") as file:
        for key, array in content.items():
            file[key] = array
    with pytest.raises(UserError, match=rf"file1\.h5 is not a fastMRI volume.*{word}"):
        mri.load_mri(root, size=24)


def test_a_volume_whose_target_is_text_is_refused(tmp_path):
    import h5py

    root = made_data.fastmri_folder(tmp_path, size=24, slices=2)
    with h5py.File(root / "singlecoil_train" / "file0.h5", "a") as file:
        del file["reconstruction_esc"]
        file["reconstruction_esc"] = np.full((2, 24, 24), b"x")
    with pytest.raises(UserError, match=r"file0\.h5 is not a fastMRI volume"):
        mri.load_mri(root, size=24).train[0]


BAD_TEXTS = {
    "half a character": ('{"text": "\\ud800"}\n' * 20, "line 1: not JSON"),
    "one document": ('{"text": "word word word word"}\n', "the training text has"),
    "no JSON": ('{"text": "a"}\n\n', "line 2: not JSON"),
}


@pytest.mark.parametrize(("content", "word"), BAD_TEXTS.values(), ids=BAD_TEXTS)
def test_a_text_that_cannot_be_used_is_refused(content, word, tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text(content)
    for load in (partial(text.load_text, vocabulary=300), text.load_characters):
        with pytest.raises(UserError, match=word):
            load(path, length=8)


def test_a_line_break_of_unicode_inside_a_document_is_no_end_of_a_line(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "first\u2028second"}\n{"text": "third\x85"}')
    assert text.json_documents(path) == ["first\u2028second", "third\x85"]


def test_a_truncated_volume_is_refused_when_it_is_listed_or_read(tmp_path):
    root = made_data.fastmri_folder(tmp_path, size=24, slices=2)
    path = root / "singlecoil_train" / "file0.h5"
    whole = path.read_bytes()
    for share in (0, 0.1, 0.5, 0.99):
        path.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(UserError, match=r"file0\.h5 is not a fastMRI volume"):
            mri.load_mri(root, size=24).train[0]


def test_the_command_refuses_damaged_data_in_one_line_and_leaves_nothing(tmp_path, capsys):
    path = small_tgz(tmp_path)
    path.write_bytes(path.read_bytes()[:-4])
    words = ["train", "imagewoof-vit", "--optimizer", "adamw", "--scale", "tiny"]
    out = tmp_path / "deep" / "run"
    assert main([*words, "--data", str(path), "--out", str(out), "--tensorboard"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"eshampoo: {path} is not a readable tar")
    assert error.count("\n") == 1
    assert not (tmp_path / "deep").exists()
