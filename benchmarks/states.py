"""What the state of one of our optimizers shows, also on the meta device: bytes and factors."""

from collections.abc import Iterator

from torch.optim import Optimizer


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of all entries of the state, none of which share memory."""
    return sum(
        value.numel() * value.element_size()
        for values in optimizer.state.values()
        for value in values.values()
    )


def factors(optimizer: Optimizer) -> Iterator[tuple[int, int, int]]:
    """How many blocks have a factor, its size, and the elements of all these blocks.

    The state shows the blocks: "factor_0.1" [N, d, d] belongs to the N blocks of "exp_avg.1".
    """
    for values in optimizer.state.values():
        for name, value in values.items():
            if name.startswith("factor_"):
                _, dot, number = name.partition(".")
                yield *value.shape[:2], values["exp_avg" + dot + number].numel()
