"""ConvNeXt drops whole paths at random."""

import torch

from eshampoo.lab.models.convnext import ConvNeXt


def test_paths_are_dropped_in_training_alone():
    model = ConvNeXt(3, widths=(4, 8), depths=(2, 2), patch=4, drop_path=0.9)
    x = torch.randn(4, 3, 16, 16)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))
