"""The networks: paper-scale settings take a step, and the parts do what their papers say."""

import pytest
import torch

from eshampoo.lab.catalogue import WORKLOADS
from eshampoo.lab.data import molecules
from eshampoo.lab.models import parameter_kinds
from eshampoo.lab.models.convnext import ConvNeXt
from eshampoo.lab.models.llama import Llama, rotary_angles, rotate
from eshampoo.lab.models.unet import UNet

from . import made_data


def images(tmp_path, channels=3, size=224):
    return torch.randn(2, channels, size, size), torch.tensor([0, 1])


def slices(tmp_path):
    image = torch.randn(1, 1, 320, 320)
    return image, image, torch.zeros(1), torch.ones(1), torch.ones(1)


def graphs(tmp_path):
    return molecules.load_molecules(made_data.moleculenet_csv(tmp_path)).graph(torch.arange(4))


def tokens(tmp_path):
    return torch.randint(32_768, (1, 8)), torch.randint(32_768, (1, 8))


# outputs, a reduced batch, and millions of parameters
PAPER = {
    "digits-vit": (10, lambda path: images(path, 1, 8), 21.3),
    "imagewoof-vit": (10, images, 21.5),
    "imagewoof-convnext": (10, images, 27.9),
    "mri-unet": (1, slices, 7.76),
    "molecules-gnn": (2, graphs, 3.6),
    "text-llama": (32_768, tokens, 324),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_paper_scale_takes_a_step(name, tmp_path):
    outputs, make, millions = PAPER[name]
    row = WORKLOADS[name]
    model = row.settings["paper"].model(outputs)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count / 1e6 == pytest.approx(millions, rel=0.02)
    # without momentum: the largest model has 324 million parameters
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loss = row.loss(model, make(tmp_path))
    loss.backward()
    optimizer.step()
    assert torch.isfinite(loss)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_papers_vit_has_the_papers_dimensions():
    setting = WORKLOADS["imagewoof-vit"].settings["paper"]
    expected = {"patch": 16, "width": 384, "depth": 12, "heads": 6, "hidden": 1536}
    assert expected.items() <= setting.record()["model"].items()
    assert (setting.batch, setting.clip, round(setting.warmup * setting.steps)) == (128, 1.0, 352)
    assert setting.options == {
        "lr": 6e-4,
        "betas": (0.9, 0.999),
        "eps": 1e-10,
        "weight_decay": 1e-4,
    }


def test_llama_does_not_see_the_future():
    model = Llama(50, width=16, depth=2, heads=4, key_heads=2, hidden=32, length=12)
    text = torch.randint(50, (1, 12))
    changed = text.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 50
    difference = (model(text) - model(changed)).abs().amax(-1)[0]
    assert (difference[:7] == 0).all()
    assert (difference[7:] > 0).all()


def test_rotary_positions_make_products_depend_on_distance_alone():
    angles = rotary_angles(20, 8)
    q, k = torch.randn(8), torch.randn(8)
    at = [rotate(x.expand(20, 8), angles) for x in (q, k)]
    products = at[0] @ at[1].T
    torch.testing.assert_close(products[3, 1], products[12, 10])
    assert not torch.allclose(products[3, 1], products[3, 2])


def test_unet_keeps_odd_sizes():
    assert UNet(1, channels=2, pools=2)(torch.randn(1, 1, 37, 30)).shape == (1, 1, 37, 30)


def test_paths_are_dropped_in_training_alone():
    model = ConvNeXt(3, widths=(4, 8), depths=(2, 2), patch=4, drop_path=0.9)
    x = torch.randn(4, 3, 16, 16)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_parameters_have_kinds():
    llama = Llama(50, width=16, depth=1, heads=4, key_heads=2, hidden=32, length=12)
    kinds = parameter_kinds(llama)
    assert kinds["embedding.weight"] == "embedding"
    assert kinds["blocks.0.attention.query.weight"] == "attention"
    assert kinds["blocks.0.attention_norm.weight"] == "norm"
    assert kinds["blocks.0.feed_forward.gate.weight"] == "feed_forward"
    assert kinds["head.weight"] == "linear"
    convnext = parameter_kinds(ConvNeXt(3, widths=(4,), depths=(1,), patch=4, drop_path=0.0))
    assert convnext["stages.0.weight"] == "convolution"
    assert convnext["stages.2.response.scale"] == "norm"
    assert convnext["stages.2.expand.bias"] == "bias"
