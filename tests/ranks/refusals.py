"""Errors that every rank raises, in the same words."""

from contextlib import contextmanager

import torch.distributed as dist


class Caught:
    """The error that a block of code raised."""

    text = ""

    def __str__(self):
        return self.text


@contextmanager
def expect(kind):
    caught = Caught()
    try:
        yield caught
    except kind as error:
        caught.text = str(error)
        return
    raise AssertionError(f"no {kind.__name__} was raised")


def alike(text):
    """All ranks say the same."""
    everyone = [""] * dist.get_world_size()
    dist.all_gather_object(everyone, text)
    assert text
    assert set(everyone) == {text}, everyone
