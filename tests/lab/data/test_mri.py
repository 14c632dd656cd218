"""Magnetic resonance: k-space as published or simulated, and which columns are measured."""

import made_data
import numpy as np
import torch

from eshampoo.lab.data import mri, seeded


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
