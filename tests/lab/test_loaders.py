"""Every published format loads, and what is missing or broken is said in one line."""

import gzip

import numpy as np
import pytest
import torch

from eshampoo.lab.data import batch_indices, images, molecules, mri, seeded, text
from eshampoo.lab.errors import UserError

from . import made_data


def test_data_order_is_a_function_of_seed_and_step():
    """Epochs are permutations without repetition, and differ."""
    epochs = [torch.cat([batch_indices(12, 4, 7, 3 * e + i) for i in range(3)]) for e in range(2)]
    assert all(sorted(epoch.tolist()) == list(range(12)) for epoch in epochs)
    assert epochs[0].tolist() != epochs[1].tolist()
    assert torch.equal(batch_indices(12, 4, 7, 5), batch_indices(12, 4, 7, 5))
    assert not torch.equal(batch_indices(100, 50, 0, 1), batch_indices(100, 50, 1, 0))


@pytest.mark.parametrize("make", [made_data.imagewoof_folder, made_data.imagewoof_tar])
def test_imagewoof_folder_and_tar_give_the_same_images(make, tmp_path):
    data = images.load_imagewoof(make(tmp_path), size=16, stored=18)
    assert data.train.shape == (24, 3, 18, 18)
    assert data.outputs == 2
    assert data.train_labels.bincount().tolist() == [12, 12]
    # the first class was made dark, the second light
    means = [data.train[data.train_labels == label].float().mean() for label in (0, 1)]
    assert means[0] + 50 < means[1]


def test_crops_are_windows_of_the_image_or_of_its_mirror(tmp_path):
    data = images.load_imagewoof(made_data.imagewoof_folder(tmp_path), size=16, stored=18)
    batch, labels = data.batch(torch.arange(8), seeded(3))
    assert batch.shape == (8, 3, 16, 16)
    assert torch.equal(labels, data.train_labels[:8])
    for index in range(8):
        whole = data.normalised(data.train[index])
        windows = whole.unfold(1, 16, 1).unfold(2, 16, 1).reshape(3, 9, 16, 16).transpose(0, 1)
        candidates = torch.cat([windows, windows.flip(-1)])
        assert any(torch.equal(batch[index], candidate) for candidate in candidates)


def test_decoded_images_come_from_the_cache_the_second_time(tmp_path, monkeypatch):
    source = made_data.imagewoof_folder(tmp_path)
    first = images.load_imagewoof(source, size=16, stored=18)
    monkeypatch.setattr(images, "decode", lambda *arguments: pytest.fail("decoded again"))
    assert torch.equal(images.load_imagewoof(source, size=16, stored=18).train, first.train)


def test_fully_sampled_k_space_gives_the_image_back(tmp_path):
    data = mri.load_mri(made_data.fastmri_folder(tmp_path), size=40)
    k_space, target = data.train[3]
    assert len(data) == 8
    torch.testing.assert_close(mri.inverse_transform(k_space).abs(), target, atol=1e-5, rtol=0)


def test_mask_measures_a_quarter_of_the_columns_with_the_centre():
    masks = torch.stack([mri.column_mask(100, seeded(i)) for i in range(200)])
    assert masks[:, 46:54].all()
    assert abs(masks.float().mean() - 0.25) < 0.01


def test_magnitude_images_are_simulated(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (6, 32, 32), dtype=np.uint8)
    np.savez(tmp_path / "brain_mri.npz", images=pixels, is_test=np.arange(6) > 3)
    data = mri.load_mri(tmp_path, size=32)
    image, target, mean, std, peak = data.batch(torch.arange(2), seeded(0))
    assert len(data) == 4
    original = torch.tensor(pixels[1] / 255.0).float()
    torch.testing.assert_close(target[1, 0] * std[1] + mean[1], original)
    assert not torch.allclose(image, target)
    torch.testing.assert_close(peak[1], torch.tensor(pixels[1].max() / 255.0).float())


def test_moleculenet_csv_becomes_graphs(tmp_path):
    data = molecules.load_molecules(made_data.moleculenet_csv(tmp_path))
    assert len(data) + len(data.test) == 30  # the unreadable row is left out
    assert data.outputs == 2
    atoms, bonds, senders, receivers, owner, count, labels = data.graph(torch.tensor([1, 0]))
    assert len(atoms) == 6 + 3  # benzene, ethanol
    assert len(bonds) == 12 + 4
    assert int(count) == 2
    assert owner.tolist() == [0] * 6 + [1] * 3
    assert torch.equal(owner[senders], owner[receivers])
    assert labels[:, 0].tolist() == [1, 0]


def test_ogb_folder_brings_its_own_split(tmp_path):
    data = molecules.load_molecules(made_data.ogb_folder(tmp_path))
    assert data.train.tolist() == list(range(20))
    assert data.test.tolist() == list(range(20, 30))
    assert data.labels[0].tolist() == [0, 1]


@pytest.mark.parametrize(
    "make",
    [
        made_data.wikitext_folder,
        made_data.c4_lines,
        lambda directory: made_data.c4_lines(directory, ("prefix", "gold_completion")),
        made_data.text_file,
    ],
)
def test_text_formats_become_tokens(make, tmp_path):
    data = text.load_text(make(tmp_path), vocabulary=300, length=8)
    inputs, targets = data.batch(torch.tensor([0, 2]), seeded(0))
    assert 256 < data.outputs <= 300
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(inputs[1], data.train[16:24])


def test_python_ships_a_corpus():
    train, test = text.corpus(None)
    assert sum(map(len, train)) > 300_000
    assert sum(map(len, test)) > 10_000


@pytest.mark.parametrize(
    "locate", [images.locate_imagewoof, mri.locate_mri, molecules.locate_molecules]
)
@pytest.mark.parametrize("given", [True, False])
def test_missing_data_says_where_it_comes_from_and_which_flag(locate, given, tmp_path):
    with pytest.raises(UserError, match=r"get .*\(.*\).*--data PATH .*ESHAMPOO_DATA"):
        locate(tmp_path if given else None)


def test_damaged_files_are_named(tmp_path):
    (tmp_path / "imagewoof2.tgz").write_bytes(b"no tar")
    (tmp_path / "tox.csv.gz").write_bytes(b"no gzip")
    (tmp_path / "c4.jsonl").write_text('{"text": "good"}\nbad\n')
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"x" * 9999)[:20])
    with pytest.raises(UserError, match=r"imagewoof2\.tgz is not a readable tar"):
        images.load_imagewoof(tmp_path, size=16, stored=18)
    with pytest.raises(UserError, match=r"tox\.csv\.gz is not a readable CSV"):
        molecules.load_molecules(tmp_path)
    with pytest.raises(UserError, match=r"c4\.jsonl, line 2"):
        text.load_text(tmp_path / "c4.jsonl", vocabulary=300, length=8)
    with pytest.raises(UserError, match=r"cut\.txt\.gz is not readable text"):
        text.load_text(tmp_path / "cut.txt.gz", vocabulary=300, length=8)
