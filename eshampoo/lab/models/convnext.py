"""ConvNeXt V2 (Woo et al.): depthwise 7×7 convolutions and global response normalisation."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of [N, C, H, W]."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ResponseNorm(nn.Module):
    """Global response normalisation: γ · x · ‖x‖ / mean‖x‖ + β + x, norms over positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(width))
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:  # [N, H, W, C]
        norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
        share: Tensor = norm / (norm.mean(-1, keepdim=True) + 1e-6)
        return self.scale * (x * share) + self.shift + x


class Block(nn.Module):
    """Depthwise convolution, then a perceptron over channels; dropped as a whole at random."""

    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.drop = drop
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.expand = nn.Linear(width, 4 * width)
        self.activation = nn.GELU()
        self.response = ResponseNorm(4 * width)
        self.project = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.project(self.response(self.activation(self.expand(y)))).permute(0, 3, 1, 2)
        if self.training and self.drop > 0:
            kept = torch.rand(len(x), 1, 1, 1, device=x.device) >= self.drop
            y = y * kept / (1 - self.drop)
        return x + y


class ConvNeXt(nn.Module):
    """Stages of blocks, each but the first behind a norm and a 2×2 convolution of stride 2."""

    def __init__(
        self,
        classes: int,
        *,
        widths: Sequence[int],
        depths: Sequence[int],
        patch: int,
        drop_path: float,
    ) -> None:
        super().__init__()
        # the chance of dropping a block grows linearly with its depth
        rates = torch.linspace(0, drop_path, sum(depths), device="cpu").tolist()
        layers: list[nn.Module] = []
        before = 3
        for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            if stage == 0:
                layers += [nn.Conv2d(3, width, patch, stride=patch), ChannelNorm(width, eps=1e-6)]
            else:
                layers += [ChannelNorm(before, eps=1e-6), nn.Conv2d(before, width, 2, stride=2)]
            layers += [Block(width, rates.pop(0)) for _ in range(depth)]
            before = width
        self.stages = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(before, eps=1e-6)
        self.head = nn.Linear(before, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.stages(images).mean((2, 3))))
        return logits
