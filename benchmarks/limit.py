"""The limit: bare matrix products of the same shapes, three units for EShampoo, two for Shampoo."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from .shapes import Shape

Block = tuple[Shape, tuple[int, ...]]
"""Shape of a block and its modes that have a basis."""
Product = tuple[Tensor, Tensor, Tensor]  # out, left, right


def blocks(params: Sequence[Tensor], max_dim: int = 1024) -> list[Block]:
    """How EShampoo cuts these parameters; vectors have no products.

    Written anew, not taken from the library: sizes of 1 dropped, neighbours merged from the last
    while the product is ≤ max_dim, larger dimensions cut at multiples of it.
    """
    found: list[Block] = []
    for p in params:
        if p.dim() < 2:
            continue
        dims: list[int] = []
        for size in reversed([size for size in p.shape if size != 1]):
            if dims and dims[0] * size <= max_dim:
                dims[0] *= size
            else:
                dims.insert(0, size)
        cuts = [[min(max_dim, size - start) for start in range(0, size, max_dim)] for size in dims]
        found += [(shape, tuple(range(len(shape)))) for shape in _product(cuts)]
    return found


def _product(cuts: list[list[int]]) -> list[Shape]:
    shapes: list[Shape] = [()]
    for sizes in cuts:
        shapes = [(*shape, size) for shape in shapes for size in sizes]
    return shapes


def multiply_adds(found: Sequence[Block], units: int) -> int:
    """units · Σ numel · d_i: for a matrix, units · mn(m + n)."""
    return units * sum(prod(shape) * shape[i] for shape, modes in found for i in modes)


class Limit:
    """The products of one step on random matrices, into outputs made beforehand."""

    def __init__(self, found: Sequence[Block], units: int, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(1)

        def random(*size: int) -> Tensor:
            return torch.randn(size, generator=generator).to(device)

        self.products: list[Product] = []
        for shape, modes in found:
            numel = prod(shape)
            for mode in modes:
                d, rest = shape[mode], numel // shape[mode]
                # The last mode lies in rows, as in the library: nothing is copied.
                last = mode == len(shape) - 1 and len(shape) > 1
                X = random(rest, d) if last else random(d, rest)
                A, turned = random(d, d), torch.empty_like(X)
                rotation = (turned, X, A) if last else (turned, A.t(), X)
                gram = (torch.empty_like(A), X.t(), X) if last else (torch.empty_like(A), X, X.t())
                self.products += [*[rotation] * (units - 1), gram]

    def run(self) -> None:
        for out, left, right in self.products:
            torch.mm(left, right, out=out)


class StackedLimit:
    """The same products with one `bmm` for the blocks of one shape: what batching could reach."""

    def __init__(self, found: Sequence[Block], units: int, device: str = "cpu") -> None:
        counts: dict[Block, int] = {}
        for block in found:
            counts[block] = counts.get(block, 0) + 1
        self.products: list[Product] = []
        for (shape, modes), count in counts.items():
            for out, left, right in Limit([(shape, modes)], units, device).products:
                self.products.append(
                    (_stack(out, count), _stack(left, count), _stack(right, count))
                )

    def run(self) -> None:
        for out, left, right in self.products:
            torch.bmm(left, right, out=out)


def _stack(X: Tensor, count: int) -> Tensor:
    """Copies of X, transposed in memory where X is."""
    if X.is_contiguous():
        return X.repeat(count, 1, 1)
    return X.t().repeat(count, 1, 1).transpose(1, 2)
