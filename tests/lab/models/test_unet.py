"""The U-Net gives back the size that it was given."""

import torch

from eshampoo.lab.models.unet import UNet


def test_unet_keeps_odd_sizes():
    assert UNet(1, channels=2, pools=2)(torch.randn(1, 1, 37, 30)).shape == (1, 1, 37, 30)
