"""The networks of the workloads in plain torch, and the kinds of their parameters."""

from torch import nn

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.InstanceNorm2d)
PARTS = ("attention", "feed_forward")  # linear layers that reports distinguish
CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)


def parameter_kinds(model: nn.Module) -> dict[str, str]:
    """Return each parameter's kind: a norm, a bias, or the part of the network it belongs to."""
    kinds = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            kind = next((word for word in PARTS if word in prefix), "linear")
            if isinstance(module, NORMS):
                kind = "norm"
            elif name == "bias":
                kind = "bias"
            elif isinstance(module, nn.Embedding):
                kind = "embedding"
            elif isinstance(module, CONVOLUTIONS):
                kind = "convolution"
            elif parameter.ndim == 1 or parameter.numel() == max(parameter.shape):
                # vectors that are no bias: the scale and shift of ConvNeXt's response norm
                kind = "norm"
            kinds[f"{prefix}.{name}" if prefix else name] = kind
    return kinds
