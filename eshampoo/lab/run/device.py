"""Where a run computes. The CPU loads and augments the data."""

import torch
from torch import nn

from eshampoo.lab.data import Batch
from eshampoo.lab.errors import UserError


def placed(model: nn.Module, name: str) -> nn.Module:
    """Bring a model to a device."""
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise RuntimeError("tensors have no values there")
        return model.to(device)
    except (RuntimeError, AssertionError) as error:  # a build of torch without CUDA raises this
        reason = str(error).splitlines()[0]
        raise UserError(f"cannot compute on {name!r}: {reason}; give --device cpu") from error


def beside(batch: Batch, model: nn.Module) -> Batch:
    """Bring a batch to the device of a model."""
    device = next(model.parameters()).device
    return tuple(part.to(device) for part in batch)


def wait(model: nn.Module) -> None:
    """Wait until a GPU has finished its work, so that the seconds include it."""
    device = next(model.parameters()).device
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_record(model: nn.Module) -> dict[str, str]:
    """Name the device in the log, if it is not the processor, which the log names already."""
    device = next(model.parameters()).device
    if device.type == "cpu":
        return {}
    return {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)}
