"""What all loaders share: the order of examples; a line for data that are missing or damaged."""

import gzip

import made_data
import numpy as np
import pytest
import torch

from eshampoo.lab.cli import main
from eshampoo.lab.data import batch_indices, images, molecules, mri, text
from eshampoo.lab.errors import UserError


def test_data_order_is_a_function_of_seed_and_step():
    """Epochs are permutations without repetition, and differ."""
    epochs = [torch.cat([batch_indices(12, 4, 7, 3 * e + i) for i in range(3)]) for e in range(2)]
    assert all(sorted(epoch.tolist()) == list(range(12)) for epoch in epochs)
    assert epochs[0].tolist() != epochs[1].tolist()
    assert torch.equal(batch_indices(12, 4, 7, 5), batch_indices(12, 4, 7, 5))
    assert not torch.equal(batch_indices(100, 50, 0, 1), batch_indices(100, 50, 1, 0))


@pytest.mark.parametrize(
    "locate", [images.locate_imagewoof, mri.locate_mri, molecules.locate_molecules]
)
@pytest.mark.parametrize("given", [True, False])
def test_missing_data_says_where_it_comes_from_and_which_flag(locate, given, tmp_path):
    with pytest.raises(UserError, match=r"get .*\(.*\).*--data PATH .*ESHAMPOO_DATA"):
        locate(tmp_path if given else None)


def magnitudes(directory):
    """MRI as one .npz."""
    path = directory / "brain_mri.npz"
    pixels = np.random.default_rng(0).integers(0, 255, (6, 16, 16), dtype=np.uint8)
    np.savez_compressed(path, images=pixels, is_test=np.arange(6) > 3)
    return path


def volume(directory):
    """One file of fastMRI's folders."""
    made_data.fastmri_folder(directory, size=24, slices=2)
    return directory / "singlecoil_train" / "file0.h5"


LOADERS = {
    "tgz": (made_data.imagewoof_tar, lambda path: images.load_imagewoof(path, size=16, stored=18)),
    "npz": (magnitudes, lambda path: mri.load_mri(path, size=16)),
    "h5": (volume, lambda path: mri.load_mri(path.parents[1], size=24).train[0]),
    "csv.gz": (made_data.moleculenet_csv, molecules.load_molecules),
    "txt.gz": (made_data.text_file, lambda path: text.load_text(path, vocabulary=300, length=8)),
}


@pytest.mark.parametrize(("make", "load"), LOADERS.values(), ids=LOADERS)
def test_a_file_that_is_cut_off_or_something_else_is_named(make, load, tmp_path):
    path = make(tmp_path)
    whole = path.read_bytes()
    load(path)
    for content in (whole[: len(whole) // 2], b"something else"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=path.name):
            load(path)


CONTENTS = {
    "a row too short": ("tox21.csv", "smiles,task\nCCO,1\nCCN\n", "row 3: 1 cells"),
    "a label of 7": ("tox21.csv", "smiles,task\nCCO,7\n", "neither 0 nor 1"),
    "no tasks": ("tox21.csv", "smiles\nCCO\n", "none for a task"),
    "no JSON": ("c4.jsonl", '{"text": "good"}\nbad\n', "line 2: not JSON"),
    "a short text": ("some.txt", "too short", "the training text has 8 characters"),
}


@pytest.mark.parametrize(("name", "content", "told"), CONTENTS.values(), ids=CONTENTS)
def test_content_that_cannot_be_used_is_told(name, content, told, tmp_path):
    path = tmp_path / name
    path.write_text(content)
    load = molecules.load_molecules if name.endswith(".csv") else text.load_characters
    with pytest.raises(UserError, match=told):
        load(path, **({} if name.endswith(".csv") else {"length": 8}))


def test_the_command_refuses_damaged_data_in_one_line_and_leaves_nothing(tmp_path, capsys):
    path = tmp_path / "tinyshakespeare.txt.gz"
    path.write_bytes(gzip.compress(b"x" * 9999)[:20])
    words = ["train", "text-char", "--optimizer", "adamw", "--scale", "tiny"]
    assert main([*words, "--data", str(path), "--out", str(tmp_path / "deep" / "run")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"eshampoo: {path} is not readable text")
    assert error.count("\n") == 1
    assert not (tmp_path / "deep").exists()
