"""The U-Net of fastMRI (Zbontar et al.): instance norm, LeakyReLU 0.2, average pooling."""

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, pad


def double_convolution(inputs: int, outputs: int) -> nn.Sequential:
    """Build two 3×3 convolutions, each with instance norm and LeakyReLU."""
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [
            nn.Conv2d(channels, outputs, 3, padding=1, bias=False),
            nn.InstanceNorm2d(outputs),
            nn.LeakyReLU(0.2),
        ]
    return nn.Sequential(*layers)


def transposed_convolution(inputs: int, outputs: int) -> nn.Sequential:
    """Build a 2×2 transposed convolution of stride 2 with instance norm and LeakyReLU."""
    return nn.Sequential(
        nn.ConvTranspose2d(inputs, outputs, 2, stride=2, bias=False),
        nn.InstanceNorm2d(outputs),
        nn.LeakyReLU(0.2),
    )


class UNet(nn.Module):
    """``pools`` halvings with doubling channels, and back with skip connections."""

    def __init__(self, outputs: int, *, channels: int, pools: int) -> None:
        super().__init__()
        widths = [channels * 2**level for level in range(pools + 1)]
        self.down = nn.ModuleList(
            double_convolution(before, width)
            for before, width in zip([1, *widths], widths[:-1], strict=False)
        )
        self.bottom = double_convolution(widths[-2], widths[-1])
        self.grow = nn.ModuleList(
            transposed_convolution(2 * width, width) for width in reversed(widths[:-1])
        )
        self.up = nn.ModuleList(
            double_convolution(2 * width, width) for width in reversed(widths[:-1])
        )
        self.head = nn.Conv2d(channels, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = avg_pool2d(x, 2)
        x = self.bottom(x)
        for grow, up in zip(self.grow, self.up, strict=True):
            x, skip = grow(x), skips.pop()
            # pooling drops the last row or column of an odd size; a mirrored one takes its place
            missing = (skip.shape[-1] - x.shape[-1], skip.shape[-2] - x.shape[-2])
            x = pad(x, (0, missing[0], 0, missing[1]), "reflect") if any(missing) else x
            x = up(torch.cat([x, skip], 1))
        image: Tensor = self.head(x)
        return image
