"""Imagewoof as a folder or a tar, its crops, and the cache of decoded images."""

import made_data
import pytest
import torch

from eshampoo.lab.data import images, seeded


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


def test_what_macos_keeps_beside_an_image_is_no_image(tmp_path):
    root = made_data.imagewoof_folder(tmp_path, 2)
    for image in list(root.rglob("*.JPEG")):
        image.with_name(f"._{image.name}").write_bytes(b"\0\5\26\7 resource fork")
    data = images.load_imagewoof(root, size=16, stored=18)
    assert (len(data.train), len(data.test)) == (4, 4)
