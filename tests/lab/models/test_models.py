"""All networks: paper-scale settings take a step, and every parameter has a kind."""

import made_data
import pytest
import torch

from eshampoo.lab.catalogue import WORKLOADS
from eshampoo.lab.data import molecules
from eshampoo.lab.models import parameter_kinds
from eshampoo.lab.models.convnext import ConvNeXt
from eshampoo.lab.models.llama import Llama


def images(tmp_path):
    return torch.randn(2, 3, 224, 224), torch.tensor([0, 1])


def slices(tmp_path):
    image = torch.randn(1, 1, 320, 320)
    return image, image, torch.zeros(1), torch.ones(1), torch.ones(1)


def graphs(tmp_path):
    return molecules.load_molecules(made_data.moleculenet_csv(tmp_path)).graph(torch.arange(4))


# outputs, a reduced batch, and millions of parameters
PAPER = {
    "imagewoof-vit": (10, images, 21.5),
    "imagewoof-convnext": (10, images, 27.9),
    "mri-unet": (1, slices, 7.76),
    "molecules-gnn": (2, graphs, 3.6),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PAPER)
def test_paper_scale_takes_a_step(name, tmp_path):
    outputs, make, millions = PAPER[name]
    row = WORKLOADS[name]
    model = row.settings["paper"].model(outputs)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count / 1e6 == pytest.approx(millions, rel=0.02)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loss = row.loss(model, make(tmp_path))
    loss.backward()
    optimizer.step()
    assert torch.isfinite(loss)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_papers_llama_has_324_million_parameters():
    with torch.device("meta"):
        model = WORKLOADS["text-llama"].settings["paper"].model(32_768)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count / 1e6 == pytest.approx(324, rel=0.005)


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


def test_a_vit_with_bare_norms_has_the_same_other_parameters():
    kinds = [
        parameter_kinds(WORKLOADS[name].settings["tiny"].model(3))
        for name in ("imagewoof-vit", "imagewoof-vit-bare")
    ]
    assert kinds[1] == {name: kind for name, kind in kinds[0].items() if kind != "norm"} != kinds[0]


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
