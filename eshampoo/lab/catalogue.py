"""The table of workloads; the paper's appendix E where the scale is "paper"."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from eshampoo.lab import objectives
from eshampoo.lab.data import images, molecules, mri, text
from eshampoo.lab.equations import PINN_CONVECTION, PINN_POISSON
from eshampoo.lab.errors import UserError
from eshampoo.lab.language import TEXT_CHAR, TEXT_LLAMA, TEXT_LLAMA_12M
from eshampoo.lab.models.convnext import ConvNeXt
from eshampoo.lab.models.gnn import GraphNetwork
from eshampoo.lab.models.unet import UNet
from eshampoo.lab.models.vit import SimpleViT
from eshampoo.lab.run.runs import SCALES, Run
from eshampoo.lab.tuning import TEXT_LORA, TEXT_TUNE
from eshampoo.lab.workloads import Setting, Workload, options

classifier = partial(
    Workload,
    loss=objectives.cross_entropy,
    sampled=objectives.sampled_cross_entropy,
    metric=objectives.accuracy,
    metric_name="accuracy",
    trivial=objectives.majority_accuracy,
)
of_dogs = partial(classifier, origin=images.ORIGIN, locate=images.locate_imagewoof)


def varied(row: Workload, name: str, title: str, model: Mapping[str, Any]) -> Workload:
    """Return a workload with other values of its model, at every scale."""
    settings = {
        scale: replace(setting, model=partial(setting.model, **model))
        for scale, setting in row.settings.items()
    }
    return replace(row, name=name, title=title, settings=settings)


DIGITS_VIT = classifier(
    name="digits-vit",
    title="SimpleViT on handwritten digits",
    origin="inside scikit-learn",
    locate=images.locate_digits,
    settings={
        "tiny": Setting(
            model=partial(
                SimpleViT, size=8, patch=4, width=16, depth=1, heads=2, hidden=32, channels=1
            ),
            data=partial(images.load_digits),
            steps=30,
            batch=32,
            threads=1,
            options=options(3e-3, 1e-4),
        ),
        "small": Setting(
            model=partial(
                SimpleViT, size=8, patch=2, width=64, depth=3, heads=4, hidden=128, channels=1
            ),
            data=partial(images.load_digits),
            steps=300,
            batch=64,
            threads=1,
            options=options(3e-3, 1e-4),
            # each rate was the best of several in runs of this length; Shampoo's F keeps its
            # share of the run
            tuned={
                "adamw": {"lr": 6e-3},
                "shampoo": {"lr": 1e-2, "frequency": 4},
                "soap": {"lr": 1e-2},
                "eshampoo": {"lr": 3e-3},
                "klshampoo": {"lr": 1e-2},
                "muon": {"lr": 1e-2},
            },
        ),
        "paper": Setting(
            model=partial(
                SimpleViT, size=8, patch=1, width=384, depth=12, heads=6, hidden=1536, channels=1
            ),
            data=partial(images.load_digits),
            steps=7050,
            batch=128,
            options=options(6e-4, 1e-4),
        ),
    },
)

IMAGEWOOF_VIT = of_dogs(
    name="imagewoof-vit",
    title="SimpleViT on ten breeds of dogs",
    settings={
        "tiny": Setting(
            model=partial(SimpleViT, size=16, patch=8, width=16, depth=1, heads=2, hidden=32),
            data=partial(images.load_imagewoof, size=16, stored=18),
            steps=10,
            batch=8,
            options=options(1e-3, 1e-4),
        ),
        "small": Setting(
            model=partial(SimpleViT, size=48, patch=12, width=64, depth=4, heads=4, hidden=256),
            data=partial(images.load_imagewoof, size=48, stored=56),
            steps=420,
            batch=128,
            # each rate is the best of 3e-4, 1e-3, 3e-3, 1e-2 (docs/reproduction.md)
            options=options(3e-3, 1e-4),
            tuned={"adamw": {"lr": 1e-3}},
            evaluations=2,
            threads=1,
        ),
        "paper": Setting(
            model=partial(SimpleViT, size=224, patch=16, width=384, depth=12, heads=6, hidden=1536),
            data=partial(images.load_imagewoof, size=224, stored=256),
            steps=7050,
            batch=128,
            options=options(6e-4, 1e-4),
        ),
    },
)

IMAGEWOOF_VIT_BARE = varied(
    IMAGEWOOF_VIT,
    "imagewoof-vit-bare",
    "the same, its norms without parameters",
    model={"affine": False},
)

IMAGEWOOF_CONVNEXT = of_dogs(
    name="imagewoof-convnext",
    title="ConvNeXt V2 on ten breeds of dogs",
    settings={
        "tiny": Setting(
            model=partial(ConvNeXt, widths=(8, 16), depths=(1, 1), patch=4, drop_path=0.1),
            data=partial(images.load_imagewoof, size=16, stored=18),
            steps=10,
            batch=8,
            options=options(1e-3, 0.05),
            clip=None,
        ),
        "small": Setting(
            model=partial(ConvNeXt, widths=(24, 48, 96), depths=(1, 1, 1), patch=6, drop_path=0.1),
            data=partial(images.load_imagewoof, size=48, stored=56),
            steps=210,
            batch=128,
            options=options(3e-3, 0.05),
            clip=None,
            evaluations=2,
            threads=1,
        ),
        # the paper does not give the size of its model; ConvNeXt V2 "tiny" is as large as its ViT
        "paper": Setting(
            model=partial(
                ConvNeXt, widths=(96, 192, 384, 768), depths=(3, 3, 9, 3), patch=4, drop_path=0.1
            ),
            data=partial(images.load_imagewoof, size=224, stored=256),
            steps=7050,
            batch=128,
            options=options(6e-4, 0.05),
            clip=None,
        ),
    },
)

MRI_UNET = Workload(
    name="mri-unet",
    title="U-Net on undersampled magnetic resonance",
    origin=mri.ORIGIN,
    locate=mri.locate_mri,
    loss=objectives.reconstruction_loss,
    metric=objectives.similarity,
    metric_name="SSIM",
    trivial=objectives.zero_filled_similarity,
    settings={
        "tiny": Setting(
            model=partial(UNet, channels=4, pools=2),
            data=partial(mri.load_mri, size=32),
            steps=10,
            batch=4,
            options=options(1e-3, 1e-4),
        ),
        "small": Setting(
            model=partial(UNet, channels=8, pools=3),
            data=partial(mri.load_mri, size=128),
            steps=600,
            batch=8,
            options=options(3e-3, 1e-4),
            evaluations=2,
        ),
        # the model and the length are AlgoPerf's
        "paper": Setting(
            model=partial(UNet, channels=32, pools=4),
            data=partial(mri.load_mri, size=320),
            steps=36_189,
            batch=32,
            options=options(1e-3, 1e-4),
        ),
    },
)

graph_network = partial(
    GraphNetwork,
    atom_sizes=molecules.ATOM_SIZES,
    bond_sizes=molecules.BOND_SIZES,
    dropout=0.1,
)
MOLECULES_GNN = Workload(
    name="molecules-gnn",
    title="Message passing on molecular graphs",
    origin=molecules.ORIGIN,
    locate=molecules.locate_molecules,
    loss=objectives.masked_binary_loss,
    metric=objectives.mean_average_precision,
    metric_name="mean average precision",
    trivial=objectives.prevalence,
    settings={
        "tiny": Setting(
            model=partial(graph_network, width=8, rounds=2),
            data=partial(molecules.load_molecules),
            steps=10,
            batch=4,
            options=options(1e-3, 1e-4),
        ),
        "small": Setting(
            model=partial(graph_network, width=64, rounds=3),
            data=partial(molecules.load_molecules),
            steps=200,
            batch=128,
            options=options(1e-2, 1e-4),
        ),
        "paper": Setting(
            model=partial(graph_network, width=256, rounds=5),
            data=partial(molecules.load_molecules),
            steps=80_000,
            batch=512,
            options=options(1e-3, 1e-4),
        ),
    },
)

WORKLOADS: Mapping[str, Workload] = {
    row.name: row
    for row in (
        DIGITS_VIT,
        IMAGEWOOF_VIT,
        IMAGEWOOF_VIT_BARE,
        IMAGEWOOF_CONVNEXT,
        MRI_UNET,
        MOLECULES_GNN,
        TEXT_LLAMA,
        TEXT_CHAR,
        PINN_POISSON,
        PINN_CONVECTION,
    )
}

# Workloads of another size or text, and of fine-tuning, which only figures use.
VARIANTS: Mapping[str, Workload] = {
    row.name: row
    for row in (
        replace(TEXT_LLAMA, name="text-llama-c4", title="tokens of C4", locate=text.locate_c4),
        TEXT_LLAMA_12M,
        *(
            varied(
                TEXT_CHAR,
                f"text-char-width-{width}",
                f"characters with a width of {width}",
                {"width": width, "hidden": hidden},
            )
            for width, hidden in ((64, 176), (256, 704))
        ),
        TEXT_TUNE,
        TEXT_LORA,
    )
}


def workload(name: str) -> Workload:
    """Return the workload of this name."""
    if name not in {**WORKLOADS, **VARIANTS}:
        raise UserError(f"unknown workload {name!r}; choose one of: {', '.join(WORKLOADS)}")
    return {**WORKLOADS, **VARIANTS}[name]


def setting(run: Run) -> Setting:
    """Return the setting of the workload and scale that a run asks for."""
    if run.scale not in SCALES:
        raise UserError(f"unknown scale {run.scale!r}; choose one of: {', '.join(SCALES)}")
    return workload(run.workload).settings[run.scale]
