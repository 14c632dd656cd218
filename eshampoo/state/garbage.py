"""Python's garbage collector, which waits while thousands of views are made."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def not_collected() -> Iterator[None]:
    """Make many objects, none of which is garbage, without a collector that scans them repeatedly.

    With 10,000 small parameters the scans take half of the time of a `state_dict`.
    """
    running = gc.isenabled()
    try:  # from here on, because a signal can come right after the collector is off
        gc.disable()
        yield
    finally:
        if running:
            gc.enable()
