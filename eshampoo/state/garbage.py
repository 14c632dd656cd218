"""Python's search for garbage, which waits while thousands of views are made."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def not_collected() -> Iterator[None]:
    """Make many objects, none of which is garbage, without looking through them again and again.

    With 10,000 small parameters that takes half of the time of a `state_dict`.
    """
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()
