"""Parameter shapes of the models that are measured; no model is trained, gradients are random."""

from collections.abc import Callable

import torch
from torch import Tensor

from eshampoo.lab.models.vit import SimpleViT

Shape = tuple[int, ...]


def vit(width: int, depth: int, patch: int) -> list[Shape]:
    """The lab's SimpleViT with ten classes, heads of 64 and an MLP of four times the width.

    >>> from math import prod
    >>> round(sum(map(prod, vit(384, 12, 16))) / 1e6, 1)
    21.6
    """
    with torch.device("meta"):  # only the shapes are wanted: the model takes no memory
        model = SimpleViT(
            10,
            size=14 * patch,
            patch=patch,
            width=width,
            depth=depth,
            heads=width // 64,
            hidden=4 * width,
        )
    return [tuple(p.shape) for p in model.parameters()]


def unet(width: int = 32, levels: int = 4) -> list[Shape]:
    """A conv U-Net as for MRI: two 3×3 convolutions per level, transposed ones to go up."""
    widths = [width * 2**level for level in range(levels + 1)]
    shapes: list[Shape] = []
    before = 1
    for channels in widths:  # down, and the bottom
        shapes += [(channels, before, 3, 3), (channels, channels, 3, 3)]
        before = channels
    for channels in reversed(widths[:-1]):  # up: the skip connection doubles the input
        shapes += [(2 * channels, channels, 2, 2)]
        shapes += [(channels, 2 * channels, 3, 3), (channels, channels, 3, 3)]
    return [*shapes, (1, width, 1, 1), (1,)]


def llama(width: int = 512, depth: int = 6, vocabulary: int = 8192) -> list[Shape]:
    """Llama with tied embeddings and SwiGLU of 8/3 width, rounded up to a multiple of 64."""
    hidden = -(-8 * width // 3 // 64) * 64
    shapes: list[Shape] = [(vocabulary, width)]
    for _ in range(depth):
        shapes += [(width,), *[(width, width)] * 4]
        shapes += [(width,), (hidden, width), (hidden, width), (width, hidden)]
    return [*shapes, (width,)]


def llama_3(
    width: int,
    depth: int,
    hidden: int,
    keys: int = 1024,
    vocabulary: int = 128_256,
    tied: bool = False,
) -> list[Shape]:
    """Llama 3 with keys and values of eight heads of 128, and a head of its own unless tied.

    >>> from math import prod
    >>> names = "llama-1b", "llama-8b", "llama-70b"
    >>> [round(sum(map(prod, named(name))) / 1e9, 2) for name in names]
    [1.24, 8.03, 70.55]
    """
    layer: list[Shape] = [(width,), (width, width), (keys, width), (keys, width), (width, width)]
    layer += [(width,), (hidden, width), (hidden, width), (width, hidden)]
    shapes = [(vocabulary, width), *layer * depth, (width,)]
    return shapes if tied else [*shapes, (vocabulary, width)]


def paper_llama() -> list[Shape]:
    """The Llama of the paper as the lab builds it, with 324 million parameters."""
    from eshampoo.lab.language import TEXT_LLAMA  # its libraries are not in benchmarks/.venv

    with torch.device("meta"):
        model = TEXT_LLAMA.settings["paper"].model(32_768)
    return [tuple(p.shape) for p in model.parameters()]


def layers(width: int, count: int) -> list[Shape]:
    """So many square layers with biases: for growth."""
    return [(width, width), (width,)] * count


MODELS: dict[str, Callable[[], list[Shape]]] = {
    "vit_s": lambda: vit(384, 12, 16),
    "vit_192": lambda: vit(192, 6, 16),
    "vit_64": lambda: vit(64, 4, 8),
    "unet": unet,
    "llama": llama,
}

# Those that are only counted, or measured once.
LARGE: dict[str, Callable[[], list[Shape]]] = {
    "llama-324m": paper_llama,
    "llama-1b": lambda: llama_3(2048, 16, 8192, keys=512, tied=True),
    "llama-8b": lambda: llama_3(4096, 32, 14_336),
    "llama-70b": lambda: llama_3(8192, 80, 28_672),
}

TITLES = {
    "vit_s": "SimpleViT-S/16 (384×12, mlp 1536)",
    "vit_192": "ViT 192×6",
    "vit_64": "ViT 64×4",
    "unet": "conv U-Net (32 … 512 channels)",
    "llama": "Llama 512×6, vocabulary 8192",
}

WIDTHS = (64, 128, 256, 512, 1024, 2048)
DEPTHS = (1, 2, 4, 8, 16, 32, 64)
GROWTH_LAYERS, GROWTH_WIDTH = 4, 128


def named(name: str) -> list[Shape]:
    """The shapes of a model of the table, or "layers:WIDTH:COUNT"."""
    if name.startswith("layers:"):
        width, count = name.split(":")[1:]
        return layers(int(width), int(count))
    known = MODELS | LARGE
    if name not in known:
        raise ValueError(f"no shapes are called {name!r}; known: {', '.join(known)}")
    return known[name]()


def parameters(name: str, seed: int = 0, device: str = "cpu") -> list[Tensor]:
    """Parameters with gradients, the same numbers for every optimizer."""
    generator = torch.Generator().manual_seed(seed)
    params = []
    for shape in named(name):
        p = torch.randn(shape, generator=generator).mul_(0.02).to(device).requires_grad_()
        p.grad = torch.randn(shape, generator=generator).mul_(1e-2).to(device)
        params.append(p)
    return params


def without_memory(name: str, gradients: bool = False) -> list[Tensor]:
    """Parameters on the meta device."""
    params = [torch.empty(shape, device="meta").requires_grad_() for shape in named(name)]
    for p in params if gradients else ():
        p.grad = torch.empty_like(p)
    return params


def renewer(params: list[Tensor]) -> Callable[[], None]:
    """A function that gives the parameters new random gradients, in the memory of the old ones.

    New ones, because the factors of a single gradient have no full rank, which no training shows
    for long. HeavyBall takes the gradients away in its step, so they are given back.
    """
    kept = [(p, p.grad) for p in params if p.grad is not None]
    generator = torch.Generator(kept[0][1].device).manual_seed(1)

    def renew() -> None:
        for p, grad in kept:
            p.grad = grad.normal_(std=1e-2, generator=generator)

    return renew
